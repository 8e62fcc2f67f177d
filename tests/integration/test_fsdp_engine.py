"""FsdpEngine against plain Hugging Face with AdamW, on one rank in this process and on two ranks in processes of their
own.
"""

import json
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from rolecall.errors import ConfigError
from rolecall.settings import (
    AlgorithmSection,
    OptimizerSection,
)
from rolecall.telemetry import Metrics
from rolecall.training.engine import TokenOutputs, ValueOutputs
from rolecall.training.objective.objectives import PolicyObjective, SftObjective, ValueObjective, policy_columns
from rolecall.training.packing.pack import local_counts, pack, unpack
from rolecall.v1.trajectory_pb2 import Coefficients
from tests import forks
from tests.checkpoint_rig import exported, load, save
from tests.integration import fsdp_ranks
from tests.integration.fsdp_oracle import (
    CPU,
    SECTION,
    assert_same_weights,
    make_engine,
    oracle_model,
    oracle_outputs,
    oracle_training,
)
from tests.integration.fsdp_ranks import make_rows, train_step, weights_of

pytestmark = pytest.mark.usefixtures("one_rank")

MODELS = ["dense", "tied", "moe"]


@pytest.mark.parametrize("kind", MODELS)
def test_packed_logprobs_and_entropy_agree_with_hugging_face_one_sequence_at_a_time(
    models: dict[str, Path], kind: str
) -> None:
    rows = make_rows(9)
    packed = pack(rows, [], temperature=0.7, device=CPU)
    (outputs,) = make_engine(models[kind], optimizer=None).forward([packed], entropy=True)
    assert isinstance(outputs, TokenOutputs)
    model = oracle_model(models[kind])
    ours = zip(unpack(outputs.logprobs_N, packed.lengths), unpack(outputs.entropy_N, packed.lengths), strict=True)
    with torch.no_grad():
        for (logprobs, entropy), row in zip(ours, rows, strict=True):
            expected_logprobs, expected_entropy = oracle_outputs(model, row, 0.7)
            np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-5)
            np.testing.assert_allclose(entropy, expected_entropy, atol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_weights_come_back_under_the_checkpoints_own_names_bit_for_bit(models: dict[str, Path], kind: str) -> None:
    published = weights_of(make_engine(models[kind]))
    saved = load_file(models[kind] / "model.safetensors")
    assert_same_weights(published, saved, atol=0)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_publishing_holds_no_more_than_one_parameter_and_its_pieces_beyond_the_shard(
    models: dict[str, Path], kind: str
) -> None:
    engine = make_engine(models[kind], dtype="bfloat16")
    made: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    most = 0
    for _, tensor in engine.named_weights():
        made.add(tensor)
        del tensor
        most = max(
            most, sum({piece.untyped_storage().data_ptr(): piece.untyped_storage().nbytes() for piece in made}.values())
        )
    largest_parameter = max(
        parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(models[kind]).parameters()
    )
    assert most <= 2 * largest_parameter


@pytest.mark.parametrize("kind", MODELS)
def test_one_rank_trains_like_hugging_face_with_adamw(models: dict[str, Path], kind: str, tmp_path: Path) -> None:
    rows = make_rows(10)
    engine = make_engine(models[kind])
    outcomes = [train_step(engine, rows, token_budget=64, seed=step) for step in range(4)]
    losses, norms, model = oracle_training(models[kind], rows, 4)
    np.testing.assert_allclose([o["loss"] for o in outcomes], losses, rtol=1e-5)
    np.testing.assert_allclose([o["grad_norm"] for o in outcomes], norms, rtol=1e-4)
    model.save_pretrained(tmp_path)
    # AdamW divides by the root of tiny second moments: last bits of a gradient may move a weight by a few per cent of
    # the rate
    assert_same_weights(weights_of(engine), load_file(tmp_path / "model.safetensors"), atol=2e-4)


def run_ranks(world_size: int, model: Path, out: Path, **more: Any) -> list[dict[str, float]]:
    """Trains with fsdp_ranks.py in processes of their own; returns the outcomes of the steps."""
    out.mkdir()
    job = {
        "model": str(model),
        "out": str(out),
        "world_size": world_size,
        "rendezvous": str(out / "rendezvous"),
        "optimizer": SECTION.model_dump(),
        "gradient_checkpointing": False,
        "parallel": {},
        "num_rows": 10,
        "num_steps": 4,
        "save_after": 2,
        "token_budget": 40,
    } | more
    forks.run_ranks(out, world_size, fsdp_ranks.main, job)
    outcomes: list[dict[str, float]] = json.loads((out / "outcomes.json").read_text())
    return outcomes


@pytest.mark.parametrize(
    "kind",
    [
        "tied",
        pytest.param(
            "moe",
            marks=pytest.mark.thorough("test_two_ranks_train_like_hugging_face_and_their_checkpoint_goes_on_at_one"),
        ),
    ],
)
def test_two_ranks_train_like_hugging_face_and_their_checkpoint_goes_on_at_one(
    models: dict[str, Path], kind: str, tmp_path: Path
) -> None:
    rows = make_rows(10)
    outcomes = run_ranks(2, models[kind], tmp_path / "two", gradient_checkpointing=kind == "tied")
    losses, norms, model = oracle_training(models[kind], rows, 4)
    np.testing.assert_allclose([o["loss"] for o in outcomes], losses, rtol=1e-5)
    np.testing.assert_allclose([o["grad_norm"] for o in outcomes], norms, rtol=1e-4)
    model.save_pretrained(tmp_path / "oracle")
    two = load_file(tmp_path / "two" / "weights.safetensors")
    assert_same_weights(two, load_file(tmp_path / "oracle" / "model.safetensors"), atol=2e-4)

    engine = make_engine(models[kind])
    load(engine, tmp_path / "two" / "checkpoint")
    assert_same_weights(
        weights_of(engine), load_file(exported(tmp_path / "two" / "checkpoint") / "model.safetensors"), atol=0
    )
    later = [train_step(engine, rows, token_budget=40, seed=step) for step in (2, 3)]
    np.testing.assert_allclose([o["loss"] for o in later], losses[2:], rtol=1e-5)
    assert [o["learning_rate"] for o in later] == [o["learning_rate"] for o in outcomes[2:]]
    assert_same_weights(weights_of(engine), two, atol=2e-4)


def test_a_rank_without_rows_keeps_the_others_company(models: dict[str, Path], tmp_path: Path) -> None:
    rows = make_rows(1)
    outcomes = run_ranks(2, models["dense"], tmp_path / "two", num_rows=1, num_steps=2)
    losses, norms, _ = oracle_training(models["dense"], rows, 2)
    np.testing.assert_allclose([o["loss"] for o in outcomes], losses, rtol=1e-5)
    np.testing.assert_allclose([o["grad_norm"] for o in outcomes], norms, rtol=1e-4)


def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(
    models: dict[str, Path], caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(models["dense"])
    rows = make_rows(4)
    train_step(engine, rows, token_budget=64, seed=0)
    before = weights_of(engine)
    poisoned = [{**row, "advantages": row["advantages"] * np.float32("nan")} for row in rows]
    algorithm = AlgorithmSection(groups_per_batch=1)
    packed = pack(poisoned, policy_columns(algorithm), temperature=1.0, device=CPU)
    engine.forward_backward([packed], PolicyObjective(algorithm, local_counts(rows), Coefficients(), 1))
    outcome = engine.step()
    assert not outcome.applied
    assert not np.isfinite(outcome.grad_norm)
    assert_same_weights(weights_of(engine), before, atol=0)
    assert (engine.num_updates, engine.num_skipped) == (1, 1)
    assert "skipped" in caplog.text
    assert train_step(engine, rows, token_budget=64, seed=1)["learning_rate"] == pytest.approx(1e-3)


def test_a_critic_regresses_to_its_returns_and_keeps_its_head_on_disk(models: dict[str, Path], tmp_path: Path) -> None:
    section = OptimizerSection(learning_rate=3e-3)
    engine = make_engine(models["tied"], head="value", optimizer=section)
    rows = [
        {
            **row,
            "returns": np.where(row["token_ids"] > 75, 1.0, -1.0).astype(np.float32),
            "values": np.zeros_like(row["values"]),
        }
        for row in make_rows(8)
    ]
    packed = pack(rows, ["loss_mask", "values", "returns"], temperature=1.0, device=CPU)
    objective = ValueObjective(None, local_counts(rows))
    losses = []
    for _ in range(30):
        losses.append(engine.forward_backward([packed], objective).values()["critic/loss"])
        engine.step()
    assert losses[-1] < 0.2 * losses[0]
    save(engine, tmp_path / "checkpoint")
    again = make_engine(exported(tmp_path / "checkpoint"), head="value", optimizer=None)
    (first,), (second,) = engine.forward([packed]), again.forward([packed])
    assert isinstance(first, ValueOutputs)
    assert isinstance(second, ValueOutputs)
    torch.testing.assert_close(first.values_N, second.values_N)
    torch.testing.assert_close(first.bootstrap_values_S, second.bootstrap_values_S)
    assert {"value_head.weight", "value_head.bias"} <= weights_of(engine).keys()
    assert "lm_head.weight" not in weights_of(engine)


def test_values_stand_one_token_before_and_the_bootstrap_after_the_last(models: dict[str, Path]) -> None:
    engine = make_engine(models["dense"], head="value", optimizer=None)
    (row,) = make_rows(1, seed=3)
    full = {**row, "response_mask": np.ones_like(row["response_mask"])}
    shorter = {name: column[:-1] for name, column in full.items()}
    whole, cut = engine.forward(
        [pack([full], [], temperature=1.0, device=CPU), pack([shorter], [], temperature=1.0, device=CPU)]
    )
    assert isinstance(whole, ValueOutputs)
    assert isinstance(cut, ValueOutputs)
    assert float(whole.values_N[0]) == 0.0
    torch.testing.assert_close(whole.values_N[-1], cut.bootstrap_values_S[0])


def test_bfloat16_computes_and_publishes_halves_but_keeps_float32_masters(
    models: dict[str, Path], tmp_path: Path
) -> None:
    rows = make_rows(8)
    engine = make_engine(models["dense"], dtype="bfloat16")
    losses = [train_step(engine, rows, token_budget=64, seed=step)["loss"] for step in range(4)]
    expected, _, _ = oracle_training(models["dense"], rows, 4)
    np.testing.assert_allclose(losses, expected, rtol=2e-2)
    assert {tensor.dtype for tensor in weights_of(engine).values()} == {torch.bfloat16}
    save(engine, tmp_path)
    kept = load_file(tmp_path / "rank-00000.safetensors")
    assert {tensor.dtype for name, tensor in kept.items() if not name.startswith("rng/")} == {torch.float32}


def test_gradient_checkpointing_changes_no_number(models: dict[str, Path]) -> None:
    rows = make_rows(6)
    plain, checkpointed = (make_engine(models["dense"], gradient_checkpointing=flag) for flag in (False, True))
    for step in range(2):
        assert train_step(plain, rows, token_budget=64, seed=step) == pytest.approx(
            train_step(checkpointed, rows, token_budget=64, seed=step), rel=1e-6
        )


@pytest.mark.parametrize("again", [False, True], ids=["kept", "recomputed"])
def test_every_layer_is_progress_in_both_directions(models: dict[str, Path], again: bool) -> None:
    """One microbatch may take longer than a worker may stand still."""
    heard: list[int] = []
    engine = make_engine(models["dense"], gradient_checkpointing=again, progressed=lambda: heard.append(1))
    rows = make_rows(2)
    heard.clear()
    engine.forward_backward(
        [pack(rows, [], temperature=0.7, device=CPU)], lambda _, outputs: (logprobs_of(outputs).sum(), Metrics())
    )
    num_layers = 2
    assert len(heard) == 2 * num_layers + 2, "each layer twice, the head, and the end of the backward pass"


def logprobs_of(outputs: TokenOutputs | ValueOutputs) -> torch.Tensor:
    assert isinstance(outputs, TokenOutputs)
    return outputs.logprobs_N


def test_a_frozen_engine_holds_no_gradients_and_refuses_to_step(models: dict[str, Path]) -> None:
    engine = make_engine(models["dense"], optimizer=None)
    with pytest.raises(ConfigError, match="frozen"):
        engine.step()
    engine.offload()
    engine.onload()
    assert engine.num_parameters == sum(tensor.numel() for tensor in weights_of(engine).values())


def test_a_folder_that_is_no_model_is_refused_by_name(tmp_path: Path, models: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        make_engine(tmp_path)
    (tmp_path / "config.json").write_text((models["dense"] / "config.json").read_text())
    with pytest.raises(ConfigError, match="safetensors"):
        make_engine(tmp_path)


def test_sft_learns_its_rows(models: dict[str, Path]) -> None:
    engine = make_engine(models["dense"], optimizer=OptimizerSection(learning_rate=5e-3))
    rows = make_rows(4)
    packed = pack(rows, ["loss_mask"], temperature=1.0, device=CPU)
    counts = local_counts(rows)
    losses = []
    for _ in range(25):
        losses.append(engine.forward_backward([packed], SftObjective(counts)).values()["sft/loss"])
        engine.step()
    assert losses[-1] < 0.3 * losses[0]
