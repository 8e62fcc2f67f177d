"""Routing that is replayed in the engine: a model whose routers are told by hand what to choose, one sequence after
another, and the same on every cut, layout and way of saving memory.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    MixtralConfig,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from rolecall.columns import ROUTED_EXPERTS
from rolecall.data.model.mixture import read_mixture
from rolecall.errors import ConfigError, InvalidInputError
from rolecall.settings import LoraSection, OptimizerSection
from rolecall.training.engine import Microbatch, TokenOutputs
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.model.router_replay import decode_routing
from rolecall.training.options import EngineOptions
from rolecall.training.packing.pack import Row, pack
from rolecall.wire import Array
from tests.integration.exact_ranks import Answer, Job, Rank, Ranks, combine, living_ranks, write_rows
from tests.routed import MIXTURE, random_routing, route_by_hand, routed_ids
from tests.tiny_gemma import gemma4_config
from tests.tiny_models import write_qwen3, write_qwen3_moe

pytestmark = [pytest.mark.timeout(300), pytest.mark.usefixtures("one_rank")]

ALIKE = 9
"""Tokens with which the last three rows begin; the last of them is sent to other experts from the sixth on."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3_moe(tmp_path_factory.mktemp("model") / "moe")


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    with living_ranks(2, tmp_path_factory.mktemp("ranks") / "2") as ranks:
        yield ranks


def make_rows() -> list[Row]:
    """Rows of uneven length, sent to any experts."""
    rng = np.random.default_rng(5)
    rows: list[dict[str, Any]] = []
    for length in (7, 3, 12, 14, 16, 15):
        ids = rng.integers(0, 150, length, dtype=np.int32)
        mask = (np.arange(length) >= 2).astype(np.uint8)
        routed = MIXTURE.encode(random_routing(rng, length))
        rows.append({"token_ids": ids, "response_mask": mask, "loss_mask": mask, ROUTED_EXPERTS: routed})
    for row, num_routed_alike in zip(rows[-2:], (ALIKE, 5), strict=True):
        row["token_ids"][:ALIKE] = rows[-3]["token_ids"][:ALIKE]
        row[ROUTED_EXPERTS][:num_routed_alike] = rows[-3][ROUTED_EXPERTS][:num_routed_alike]
    return list(rows)


def by_hand(model: Path, rows: Sequence[Row]) -> tuple[list[Array], dict[str, torch.Tensor]]:
    """The oracle: logprobs float32 [T] of each row, and the gradients of their mean."""
    network = Qwen3MoeForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").train()
    total, num_tokens, logprobs = torch.zeros(()), 0, []
    for row in rows:
        route_by_hand(network, routed_ids(row[ROUTED_EXPERTS]))
        ids = torch.from_numpy(row["token_ids"].astype(np.int64))[None]
        picked = network(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        trained = torch.from_numpy(row["loss_mask"][1:].astype(np.float32))
        logprobs.append(np.concatenate([[0.0], (picked * trained).detach().numpy()]))
        total, num_tokens = total + (picked * trained).sum(), num_tokens + int(trained.sum())
    (-total / num_tokens).backward()  # type: ignore[no-untyped-call]
    return logprobs, {name: p.grad for name, p in network.named_parameters() if p.grad is not None}


@pytest.fixture
def job(model: Path, tmp_path: Path) -> Job:
    write_rows(tmp_path / "rows.npz", make_rows(), [1.0] * len(make_rows()))
    return Job(
        str(model),
        str(tmp_path / "rows.npz"),
        str(tmp_path),
        objective="sft",
        options={"router_replay": True},
        replay=True,
    )


def alone(job: Job) -> Answer:
    return combine([Rank().answer(job)])


def assert_by_hand(job: Job, answer: Answer) -> None:
    logprobs, gradients = by_hand(Path(job.model), make_rows())
    for index, expected in enumerate(logprobs):
        np.testing.assert_allclose(answer.outputs[index][0], expected, rtol=1e-5, atol=1e-5)
    ours = load_file(Path(job.out) / "gradients.safetensors")
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for name, gradient in gradients.items():
        torch.testing.assert_close(ours[name], gradient, rtol=1e-4, atol=3e-6 * largest)


@pytest.mark.parametrize("token_budget", [16, 30, 1000])
def test_tokens_go_where_they_are_sent_however_they_are_packed(job: Job, token_budget: int) -> None:
    assert_by_hand(job, alone(replace(job, token_budget=token_budget, seed=3)))


@pytest.mark.parametrize("saving", [{"gradient_checkpointing": True}, {"activation_offload": True}], ids=str)
def test_layers_that_are_recomputed_or_offloaded_are_routed_alike(job: Job, saving: dict[str, Any]) -> None:
    assert_by_hand(job, alone(replace(job, options={**job.options, **saving}, token_budget=30)))


@pytest.mark.parametrize("parallel", [{}, {"replicate": 2}, {"sequence": 2}, {"tensor": 2}], ids=str)
def test_two_ranks_route_as_one(job: Job, two_ranks: Ranks, parallel: dict[str, Any]) -> None:
    assert_by_hand(job, two_ranks.ask(replace(job, parallel=parallel, token_budget=30)))


def engine_of(model: Path, **options: Any) -> FsdpEngine:
    made = EngineOptions(path=model, head="policy", dtype="float32", router_replay=True, **options)
    return FsdpEngine(made, device=torch.device("cpu"))


def packed(rows: Sequence[Row], *columns: str) -> Microbatch:
    return pack(rows, columns, temperature=1.0, device=torch.device("cpu"))


def outputs_of(engine: FsdpEngine, *microbatches: Microbatch) -> list[TokenOutputs]:
    outputs = engine.forward(microbatches)
    assert all(isinstance(each, TokenOutputs) for each in outputs)
    return [each for each in outputs if isinstance(each, TokenOutputs)]


def recorded(microbatch: Microbatch, outputs: TokenOutputs) -> Microbatch:
    """`microbatch` with the routing that a pass says it chose."""
    assert outputs.routed_experts_NW is not None
    return replace(microbatch, columns={**microbatch.columns, ROUTED_EXPERTS: outputs.routed_experts_NW})


def test_a_replay_of_what_a_pass_chose_changes_nothing(model: Path) -> None:
    engine = engine_of(model, optimizer=None)
    microbatch = packed(make_rows())
    assert microbatch.prefixes is not None, "shared beginnings are part of it"
    (free,) = outputs_of(engine, microbatch)
    (again,) = outputs_of(engine, recorded(microbatch, free))
    assert free.rerouted_N is None
    assert again.routed_experts_NW is None
    assert again.rerouted_N is not None
    assert torch.equal(again.logprobs_N, free.logprobs_N)
    assert not again.rerouted_N.any()


SIZES = {
    "vocab_size": 150,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 64,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
}
ARCHITECTURES: dict[str, PretrainedConfig] = {
    "experts beside an MLP": gemma4_config(150, mixture=True),
    "experts beside a dense layer": Qwen3MoeConfig(
        **SIZES, head_dim=8, num_experts=6, moe_intermediate_size=12, mlp_only_layers=[1]
    ),
    "a shared expert": Qwen2MoeConfig(
        **SIZES, num_experts=6, moe_intermediate_size=12, shared_expert_intermediate_size=20
    ),
    "experts as wide as the MLP": MixtralConfig(**SIZES, num_local_experts=6),
    "routers with biases": GptOssConfig(**SIZES, head_dim=8, num_local_experts=6, sliding_window=4),
}


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_routers_of_every_kind_are_told_what_to_choose(name: str, tmp_path: Path) -> None:
    config = ARCHITECTURES[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path)
    engine, mixture = engine_of(tmp_path, optimizer=None), read_mixture(tmp_path)
    microbatch = packed(make_rows())
    (free,) = outputs_of(engine, microbatch)
    (again,) = outputs_of(engine, recorded(microbatch, free))
    assert torch.equal(again.logprobs_N, free.logprobs_N)
    assert free.routed_experts_NW is not None
    elsewhere_NLk = (decode_routing(free.routed_experts_NW, mixture) + 1) % mixture.num_experts
    other = replace(free, routed_experts_NW=torch.from_numpy(mixture.encode(elsewhere_NLk.numpy())))
    (moved,) = outputs_of(engine, recorded(microbatch, other))
    assert moved.rerouted_N is not None
    assert moved.rerouted_N.mean() > 0.8
    assert (moved.logprobs_N - free.logprobs_N).abs().max() > 1e-3


def test_another_policy_chooses_as_the_old_one_did_and_says_how_often_it_would_not_have(
    model: Path, tmp_path: Path
) -> None:
    other = write_qwen3_moe(tmp_path / "other", seed=1)
    microbatch = packed(make_rows())
    (old,) = outputs_of(engine_of(other, optimizer=None), microbatch)
    engine = engine_of(model, optimizer=None)
    (own,), (replayed,) = outputs_of(engine, microbatch), outputs_of(engine, recorded(microbatch, old))
    assert old.routed_experts_NW is not None
    assert own.routed_experts_NW is not None
    assert replayed.rerouted_N is not None
    first = [routed.view(-1, 2, 2)[:, 0].sort().values for routed in (old.routed_experts_NW, own.routed_experts_NW)]
    differs_N = (first[0] != first[1]).any(-1)  # in the first layer, before which nothing was replayed
    starts = microbatch.cu_seqlens[:-1].long()
    assert differs_N.any()
    for token in set(range(1, len(differs_N))) - set(starts.tolist()):
        share = float(replayed.rerouted_N[token])
        assert share in ((0.5, 1.0) if differs_N[token - 1] else (0.0, 0.5)), token


def test_microbatches_and_models_of_one_process_keep_their_own_routing(model: Path, tmp_path: Path) -> None:
    """Those with a routing, those without and those of another model, one between the others."""
    rows = make_rows()
    told, free = packed(rows, ROUTED_EXPERTS), packed(rows[:3])
    engine, other = engine_of(model, optimizer=None), engine_of(write_qwen3_moe(tmp_path / "o", seed=1), optimizer=None)
    alone_told, alone_free = outputs_of(engine, told)[0].logprobs_N, outputs_of(engine, free)[0].logprobs_N
    alone_other = outputs_of(other, free)[0].logprobs_N
    first, second, third = outputs_of(engine, told, free, told)
    assert torch.equal(outputs_of(other, free)[0].logprobs_N, alone_other)
    assert torch.equal(first.logprobs_N, alone_told)
    assert torch.equal(second.logprobs_N, alone_free)
    assert torch.equal(third.logprobs_N, alone_told)


def test_the_base_beneath_adapters_chooses_for_itself(model: Path) -> None:
    lora = LoraSection(rank=2, target_modules=("q_proj",))
    engine = engine_of(model, optimizer=OptimizerSection(), lora=lora)
    microbatch = packed(make_rows(), ROUTED_EXPERTS)
    (free,) = outputs_of(engine, packed(make_rows()))
    (base,) = engine.forward([microbatch], base=True)
    assert isinstance(base, TokenOutputs)
    assert base.routed_experts_NW is None
    torch.testing.assert_close(base.logprobs_N, free.logprobs_N)  # new adapters add nothing


def test_a_routing_of_another_shape_is_refused(model: Path) -> None:
    rows = [{**row, ROUTED_EXPERTS: row[ROUTED_EXPERTS][:, :3]} for row in make_rows()]
    with pytest.raises(InvalidInputError, match="3 bytes a token, and this model's 4"):
        engine_of(model, optimizer=None).forward([packed(rows, ROUTED_EXPERTS)])


def test_a_model_without_experts_refuses_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"actor\.router_replay: .* is no mixture of experts"):
        engine_of(write_qwen3(tmp_path / "dense"), optimizer=None)


def test_the_tiny_mixture_is_what_the_tests_say(model: Path) -> None:
    assert read_mixture(model) == MIXTURE
