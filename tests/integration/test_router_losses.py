"""Losses of routers in the engine: transformers' own on one unsplit batch, and the same on every cut, layout and way of
saving memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from rolecall.errors import ConfigError
from rolecall.settings import ActorSection, LoraSection, MoeSection, OptimizerSection, ParallelSection
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.options import EngineOptions
from rolecall.training.packing.pack import Row
from tests.integration.exact_ranks import Answer, Job, Rank, Ranks, combine, living_ranks, write_rows
from tests.tiny_models import write_gpt_oss, write_qwen3, write_qwen3_moe

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("one_rank")]

BALANCE, Z = 0.3, 0.01
PREFIX_TOKENS = 9


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("model") / "moe")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with living_ranks(2, tmp_path_factory.mktemp("ranks") / "2") as ranks:
        yield ranks


def make_rows() -> list[Row]:
    """Of uneven length; the last two begin alike, so that what they share is computed once."""
    rng = np.random.default_rng(5)
    rows: list[dict[str, Any]] = []
    for length in (7, 3, 12, 5, 14, 16):
        ids = rng.integers(0, 150, length, dtype=np.int32)
        mask = (np.arange(length) >= 2).astype(np.uint8)
        rows.append({"token_ids": ids, "response_mask": mask, "loss_mask": mask})
    rows[-1]["token_ids"][:PREFIX_TOKENS] = rows[-2]["token_ids"][:PREFIX_TOKENS]
    return list(rows)


@pytest.fixture
def job(model: Path, tmp_path: Path) -> Job:
    rows = make_rows()
    write_rows(tmp_path / "rows.npz", rows, [1.0] * len(rows))
    moe = {"balance_coef": BALANCE, "z_coef": Z}
    return Job(
        str(model),
        str(tmp_path / "rows.npz"),
        str(tmp_path),
        objective="sft",
        options={"routers": True},
        moe=moe,
    )


def alone(job: Job) -> tuple[Answer, dict[str, torch.Tensor]]:
    answer = combine([Rank().answer(job)])
    return answer, load_file(Path(job.out) / "gradients.safetensors")


def assert_same(ours: tuple[Answer, dict[str, torch.Tensor]], theirs: tuple[Answer, dict[str, torch.Tensor]]) -> None:
    for name in ("sft/router_balance", "sft/router_z", "sft/loss", "sft/expert_load_max"):
        assert ours[0].metrics[name] == pytest.approx(theirs[0].metrics[name], rel=1e-6), name
    largest = max(float(expected.abs().max()) for expected in theirs[1].values())
    for name, expected in theirs[1].items():
        torch.testing.assert_close(ours[1][name], expected, rtol=1e-5, atol=1e-6 * largest)


@pytest.mark.parametrize(("write", "kind"), [(write_qwen3_moe, "gate"), (write_gpt_oss, "router")])
def test_one_unsplit_batch_has_the_loss_and_gradients_of_transformers(
    job: Job, tmp_path: Path, write: Callable[..., Path], kind: str
) -> None:
    model = write(tmp_path / "model", vocab=150)
    answer, gradients = alone(replace(job, model=str(model)))
    network = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").train()
    per_layer: list[list[torch.Tensor]] = [[], []]
    likelihood, num_tokens = torch.zeros(()), 0
    for row in make_rows():  # one by one, without padding
        ids = torch.from_numpy(row["token_ids"].astype(np.int64))[None]
        output = network(ids, output_router_logits=True)
        for layer, logits in zip(per_layer, output.router_logits, strict=True):
            layer.append(logits)
        picked = output.logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        trained = torch.from_numpy(row["loss_mask"][1:].astype(np.float32))
        likelihood, num_tokens = likelihood + (picked * trained).sum(), num_tokens + int(trained.sum())
    router_logits = tuple(torch.cat(layer) for layer in per_layer)
    balance = load_balancing_loss_func(router_logits, 4, 2)
    z = torch.cat(router_logits).logsumexp(1).square().mean()
    assert answer.metrics["sft/router_balance"] == pytest.approx(balance.item(), rel=1e-6)
    assert answer.metrics["sft/router_z"] == pytest.approx(z.item(), rel=1e-6)
    loss = -likelihood / num_tokens + BALANCE * balance + Z * z
    assert answer.losses[0] == pytest.approx(loss.item(), rel=1e-6)
    loss.backward()
    router = f"model.layers.1.mlp.{kind}.weight"
    expected = network.get_parameter(router).grad
    assert expected is not None
    torch.testing.assert_close(gradients[router], expected, rtol=1e-4, atol=1e-6)
    embedding = network.get_parameter("model.embed_tokens.weight").grad
    torch.testing.assert_close(gradients["model.embed_tokens.weight"], embedding, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("token_budget", [16, 30])
def test_the_cut_into_microbatches_does_not_matter(job: Job, token_budget: int) -> None:
    assert_same(alone(replace(job, token_budget=token_budget, seed=3)), alone(job))


@pytest.mark.parametrize("saving", [{"gradient_checkpointing": True}, {"activation_offload": True}], ids=str)
def test_ways_of_saving_memory_do_not_matter(job: Job, saving: dict[str, Any]) -> None:
    assert_same(alone(replace(job, options={**job.options, **saving})), alone(job))


@pytest.mark.parametrize("parallel", [{}, {"replicate": 2}, {"sequence": 2}], ids=str)
@pytest.mark.parametrize("token_budget", [18, 1000])
def test_two_ranks_have_the_losses_and_gradients_of_one(
    job: Job, two_ranks: Ranks, parallel: dict[str, Any], token_budget: int
) -> None:
    expected = alone(job)
    answer = two_ranks.ask(replace(job, parallel=parallel, token_budget=token_budget))
    assert_same((answer, load_file(Path(job.out) / "gradients.safetensors")), expected)


def test_without_coefficients_routers_are_measured_and_the_loss_stays(job: Job) -> None:
    measured, gradients = alone(replace(job, moe={}))
    plain, expected = alone(replace(job, moe=None, options={}))
    assert measured.losses == plain.losses
    assert measured.metrics["sft/expert_load_max"] >= 1
    for name, gradient in expected.items():
        torch.testing.assert_close(gradients[name], gradient)


def test_adapters_are_trained_by_them_too(model: Path, job: Job) -> None:
    trained = replace(
        job, lora={"rank": 2, "target_modules": ["q_proj"]}, optimizer={"learning_rate": 1e-2}, num_steps=2
    )
    weights = []
    for each in (trained, replace(trained, moe=None)):
        Rank().answer(each)
        weights.append(load_file(Path(job.out) / "weights.safetensors"))
    assert any(not torch.equal(weights[0][name], tensor) for name, tensor in weights[1].items())


FROZEN = {f"model.layers.{layer}.mlp.gate.weight" for layer in range(2)}


@pytest.mark.parametrize("parallel", [None, {}, {"replicate": 2}, {"sequence": 2}, {"tensor": 2}], ids=str)
def test_beside_frozen_routers_all_else_has_the_gradients_that_it_has_without(
    job: Job, two_ranks: Ranks, parallel: dict[str, Any] | None
) -> None:
    plain = replace(job, moe=None, options={})
    _, expected = alone(plain)
    frozen = replace(plain, options={"freeze_routers": True}, parallel=parallel or {})
    if parallel is None:
        alone(frozen)
    else:
        two_ranks.ask(frozen)
    gradients = load_file(Path(job.out) / "gradients.safetensors")
    assert gradients.keys() == expected.keys() - FROZEN
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_frozen_routers_are_what_they_were_after_steps_with_decay(model: Path, job: Job, kind: str) -> None:
    optimizer = {"learning_rate": 1e-2, "weight_decay": 0.1, "kind": kind}
    Rank().answer(replace(job, options={"routers": True, "freeze_routers": True}, optimizer=optimizer, num_steps=2))
    before, after = load_file(model / "model.safetensors"), load_file(Path(job.out) / "weights.safetensors")
    assert {name for name, tensor in before.items() if torch.equal(after[name], tensor)} == FROZEN


def test_routers_with_biases_are_frozen_whole(job: Job, tmp_path: Path) -> None:
    model = write_gpt_oss(tmp_path / "model", vocab=150)
    frozen = replace(job, model=str(model), options={"freeze_routers": True}, moe=None)
    Rank().answer(replace(frozen, optimizer={"learning_rate": 1e-2, "weight_decay": 0.1}, num_steps=2))
    before, after = load_file(model / "model.safetensors"), load_file(Path(job.out) / "weights.safetensors")
    assert {name for name, tensor in before.items() if torch.equal(after[name], tensor)} == {
        f"model.layers.{layer}.mlp.router.{part}" for layer in range(2) for part in ("weight", "bias")
    }


def test_a_model_without_routers_refuses_the_settings(tmp_path: Path) -> None:
    path = write_qwen3(tmp_path / "dense")
    options = EngineOptions(path=path, head="policy", dtype="float32", optimizer=OptimizerSection())
    with pytest.raises(ConfigError, match=r"actor\.moe: Qwen3ForCausalLM has no routers"):
        FsdpEngine(replace(options, routers=True), device=torch.device("cpu"))
    with pytest.raises(ConfigError, match=r"model\.freeze_routers: Qwen3ForCausalLM has no routers"):
        FsdpEngine(replace(options, freeze_routers=True), device=torch.device("cpu"))


def test_experts_that_are_spread_over_ranks_refuse_it() -> None:
    with pytest.raises(ValueError, match=r"parallel\.tensor"):
        ActorSection(num_ranks=2, parallel=ParallelSection(tensor=2), moe=MoeSection(balance_coef=0.1))
    assert ActorSection(lora=LoraSection(), moe=MoeSection()).moe is not None
