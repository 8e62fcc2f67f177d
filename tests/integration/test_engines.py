"""The seams of training engines, as every back end keeps them, on one rank."""

from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rolecall.errors import ConfigError
from rolecall.settings import AlgorithmSection, TrainingBackend
from rolecall.training.engine import TokenOutputs
from rolecall.training.model.logits.logprobs import Wanted
from rolecall.training.objective.objectives import PolicyObjective, SftObjective, policy_columns
from rolecall.training.options import EngineOptions
from rolecall.training.packing.pack import local_counts, pack
from rolecall.v1.trajectory_pb2 import Coefficients
from tests.integration.exact_ranks import Engine, Job, make_engine
from tests.integration.fsdp_ranks import make_rows
from tests.tiny_models import write_qwen3, write_qwen3_moe

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("one_rank")]
CPU = torch.device("cpu")
SECTION = {"learning_rate": 1e-3}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {"tied": write_qwen3(root / "tied", tied=True, vocab=150), "moe": write_qwen3_moe(root / "moe")}


@pytest.fixture(params=get_args(TrainingBackend))
def backend(request: pytest.FixtureRequest) -> TrainingBackend:
    chosen: TrainingBackend = request.param
    return chosen


def made(backend: TrainingBackend, path: Path, **more: Any) -> Engine:
    return make_engine(Job(str(path), "", "", backend=backend, optimizer=SECTION, **more))


def weights_of(engine: Engine) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in engine.named_weights()}


@pytest.mark.parametrize("model", ["tied", "moe"])
def test_weights_come_back_under_the_checkpoints_own_names_bit_for_bit(
    models: dict[str, Path], backend: TrainingBackend, model: str
) -> None:
    published, saved = weights_of(made(backend, models[model])), load_file(models[model] / "model.safetensors")
    assert published.keys() == saved.keys()
    assert all(torch.equal(published[name], saved[name]) for name in saved)


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(
    models: dict[str, Path], backend: TrainingBackend
) -> None:
    engine, rows, algorithm = made(backend, models["tied"]), make_rows(4), AlgorithmSection(groups_per_batch=1)
    before = weights_of(engine)
    rows = [{**row, "advantages": row["advantages"] * np.float32("nan")} for row in rows]
    packed = pack(rows, policy_columns(algorithm), temperature=1.0, device=CPU)
    engine.forward_backward([packed], PolicyObjective(algorithm, local_counts(rows), Coefficients(), 1))
    assert not engine.step().applied
    assert (engine.num_updates, engine.num_skipped) == (0, 1)
    assert all(torch.equal(before[name], weight) for name, weight in weights_of(engine).items())


def test_what_waits_in_host_memory_changes_no_number(models: dict[str, Path], backend: TrainingBackend) -> None:
    rows = make_rows(6)
    packed = [
        pack(rows[:3], ["loss_mask"], temperature=0.7, device=CPU),
        pack(rows[3:], ["loss_mask"], temperature=1.0, device=CPU),
    ]
    stayed: list[float] = []
    moved: list[float] = []
    for norms, moves in ((stayed, False), (moved, True)):
        engine = made(backend, models["tied"])
        for _ in range(3):
            engine.forward_backward(packed, SftObjective(local_counts(rows)))
            if moves:
                engine.offload("gradients", "optimizer")
            norms.append(engine.step().grad_norm)
            if moves:
                engine.offload()
    assert moved == stayed


def test_both_say_the_same_of_a_tokens_distribution(models: dict[str, Path]) -> None:
    packed = pack(make_rows(5), [], temperature=0.7, device=CPU)
    seen = [
        made(each, models["tied"]).forward([packed], wanted=Wanted(top_k=3, squares=True))[0]
        for each in get_args(TrainingBackend)
    ]
    first, second = (each for each in seen if isinstance(each, TokenOutputs))
    assert first.top_logprobs_Nk is not None
    assert second.top_logprobs_Nk is not None
    torch.testing.assert_close(first.logprobs_N, second.logprobs_N, atol=1e-5, rtol=0)
    torch.testing.assert_close(first.top_logprobs_Nk, second.top_logprobs_Nk, atol=1e-5, rtol=0)
    torch.testing.assert_close(first.sum_squared_probs_N, second.sum_squared_probs_N)


def test_a_frozen_engine_refuses_to_step(models: dict[str, Path], backend: TrainingBackend) -> None:
    from rolecall.training.account.memory import PhaseMemory
    from rolecall.training.backends import make_engine as chosen

    options = EngineOptions(path=models["tied"], head="policy", dtype="float32", optimizer=None)
    engine, state = chosen(backend, options, device=CPU, memory=PhaseMemory(CPU), progressed=lambda: None)
    assert len(engine.forward([pack(make_rows(2), [], temperature=1.0, device=CPU)])) == 1
    state.offload()
    state.onload()
    with pytest.raises(ConfigError, match="frozen"):
        engine.step()


def test_megatron_reduces_gradients_once_before_each_step(models: dict[str, Path]) -> None:
    engine, rows = made("megatron", models["tied"]), make_rows(2)
    packed = [pack(rows, ["loss_mask"], temperature=1.0, device=CPU)]
    engine.forward_backward(packed, SftObjective(local_counts(rows)))
    with pytest.raises(ConfigError, match="call step before"):
        engine.forward_backward(packed, SftObjective(local_counts(rows)))
    engine.step()
    engine.forward_backward(packed, SftObjective(local_counts(rows)))
