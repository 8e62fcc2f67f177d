"""The back end over Megatron-Core says and trains what FSDP2 does on one rank, in every layout, and each goes on from
the other's checkpoints.

Ranks stay up and take one layout after another: what costs is to start them. Float32 but where a test says otherwise.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from megatron.core.transformer import TransformerConfig
from pydantic import ValidationError
from safetensors.torch import load_file
from torch.nn.functional import silu

from rolecall.columns import ROUTED_EXPERTS
from rolecall.data.model.adapters import ADAPTER, adapted_matrices, num_adapter_parameters
from rolecall.data.model.files import num_experts, text_config
from rolecall.data.model.mixture import Mixture, read_mixture
from rolecall.data.model.trainable import check_parallel
from rolecall.errors import ConfigError, RoleCallError
from rolecall.settings import ActorSection, LayoutSection, LoraSection
from rolecall.training.megatron.experts import Experts
from rolecall.training.megatron.on_cpu import on_cpu
from rolecall.training.model.lora import adapter_names, peft_name, stacked_experts, write_adapter
from rolecall.training.model.packed_model import build_model
from rolecall.training.objective.objectives import SftObjective
from rolecall.training.options import DTYPES
from rolecall.training.packing.pack import Row, local_counts, pack
from rolecall.training.serving.hooks import nothing
from tests.checkpoint_rig import exported
from tests.integration.exact_ranks import (
    Answer,
    Job,
    Objective,
    Rank,
    Ranks,
    combine,
    living_ranks,
    make_engine,
    write_rows,
)
from tests.integration.fsdp_ranks import make_rows
from tests.routed import MIXTURE, random_routing
from tests.tiny_families import write_family
from tests.tiny_models import (
    write_deepseek_v2,
    write_glm4_moe,
    write_llama,
    write_qwen2,
    write_qwen3,
    write_qwen3_moe,
)

pytestmark = [pytest.mark.timeout(400), pytest.mark.usefixtures("one_rank")]

VOCAB = 152
NUM_STEPS = 3
JOBS_OF_RANKS = 20
FURTHER_MIXTURES = ("mixtral", "qwen2_moe", "deepseek_v3", "glm4_moe_lite", "glm4_moe")
FURTHER = ("mistral", "seed_oss", "qwen3", *FURTHER_MIXTURES)
WINDOWS = "windows"
"""A model of which one layer attends in windows, and the others to all tokens."""
MOONLIGHT = "moonlight"
"""A DeepSeek-V3 without a latent of queries, groups and yarn."""
FSDP: tuple[int, None] = (1, None)
"""One rank of the other back end."""
NUM_ALIKE, NUM_ROUTED_ALIKE = 9, 5
ATOL = 2e-4
"""Of weights after the steps: AdamW divides by the root of tiny second moments, so that last bits of a gradient may
move one weight of thousands by some per cent of the rate.
"""
TRAINING = {"learning_rate": 1e-3, "weight_decay": 0.1, "schedule": "linear", "warmup_steps": 1}
MODELS: dict[str, Callable[[Path], Path]] = {
    "tied": lambda path: write_qwen3(path, tied=True, vocab=VOCAB),
    "deep": lambda path: write_qwen3(path, tied=True, vocab=VOCAB, num_layers=4),
    "untied": lambda path: write_qwen3(path, vocab=VOCAB),
    "three": lambda path: write_qwen3(path, vocab=VOCAB, num_layers=3),
    "five": lambda path: write_qwen3(path, tied=True, vocab=VOCAB, num_layers=5),
    "wide": lambda path: write_qwen3(path, tied=True, vocab=VOCAB, kv_heads=4),
    "moe": lambda path: write_qwen3_moe(path, vocab=VOCAB),
    "deep_moe": lambda path: write_qwen3_moe(path, vocab=VOCAB, num_layers=4),
    "three_moe": lambda path: write_qwen3_moe(path, vocab=VOCAB, num_layers=3),
    "five_moe": lambda path: write_qwen3_moe(path, vocab=VOCAB, num_layers=5),
    "latent": write_deepseek_v2,
    "llama": write_llama,
    "qwen2": write_qwen2,
    **{kind: partial(write_family, model_type=kind) for kind in FURTHER},
    WINDOWS: partial(write_family, model_type="qwen2"),
    MOONLIGHT: partial(
        write_family, model_type="deepseek_v3", q_lora_rank=None, n_group=1, topk_group=1, rope_parameters=None
    ),
    "glm4_moe": lambda path: write_glm4_moe(path, vocab=VOCAB),
}


LOSSES = {"balance_coef": 0.3, "z_coef": 0.01}
ROUTERS: dict[str | None, dict[str, Any]] = {
    None: {},
    "losses": {"moe": LOSSES, "options": {"routers": True}},
    "told": {"options": {"router_replay": True}},
    "replayed": {"replay": True, "options": {"router_replay": True}},
    "replayed_with_losses": {"replay": True, "moe": LOSSES, "options": {"routers": True, "router_replay": True}},
    "frozen": {"options": {"freeze_routers": True}},
    "frozen_with_losses": {"moe": LOSSES, "options": {"routers": True, "freeze_routers": True}},
}
"""What a job asks of routers: auxiliary losses, to say which experts they chose, to choose those of the rows, to stay
as they are.
"""


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ADAPTERS: dict[str | None, dict[str, Any] | None] = {
    None: None,
    "lora": {"rank": 4, "alpha": 12.0},
    "some": {"rank": 3, "alpha": 6.0, "target_modules": ["v_proj", "up_proj", "down_proj"]},
    "attention": {"rank": 4, "alpha": 12.0, "target_modules": ATTENTION},
    "experts": {"rank": 4, "alpha": 6.0, "target_modules": ATTENTION, "experts": True},
    "latent": {
        "rank": 4,
        "alpha": 12.0,
        "target_modules": [
            *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
            *("gate_proj", "up_proj", "down_proj"),
        ],
    },
}
"""What is trained in place of the model, beginning as noise."""


@dataclass(frozen=True)
class Case:
    """A model in a layout."""

    world_size: int
    model: str
    parallel: dict[str, int] = field(default_factory=dict)
    megatron: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    objective: Objective = "sft"
    routers: str | None = None
    """Of ROUTERS."""
    lora: str | None = None
    """Of ADAPTERS."""

    def __str__(self) -> str:
        more = {**self.parallel, **self.megatron, **self.options}
        words = [self.model, str(self.world_size), *(f"{key}_{value}" for key, value in more.items())]
        return "-".join([*words, *filter(None, (self.routers, self.lora))])


EVERY_DAY = [
    Case(2, "tied", {"tensor": 2}),
    Case(2, "three", {"pipeline": 2}),
    Case(2, "moe", {"tensor": 2, "expert": 2}),
    Case(2, "tied", objective="value"),
    Case(2, "moe", {"pipeline": 2}, routers="replayed_with_losses"),
    Case(2, "qwen2_moe", {"pipeline": 2}, routers="losses"),
    Case(2, "glm4_moe", {"tensor": 2, "expert": 2}, routers="replayed"),
    Case(1, "deepseek_v3"),
    Case(1, "tied", lora="lora"),
    Case(2, "tied", {"tensor": 2}, lora="lora"),
    Case(2, "moe", {"tensor": 2, "expert": 2}, lora="experts"),
]
MATRIX = [
    *(Case(1, model) for model in FURTHER if model != "deepseek_v3"),
    *(Case(2, model, {"tensor": 2}) for model in FURTHER),
    *(Case(2, model, {"pipeline": 2}) for model in FURTHER),
    *(Case(2, MOONLIGHT, parallel) for parallel in ({"tensor": 2}, {"pipeline": 2})),
    *(Case(2, model, {"sequence": 2}) for model in (WINDOWS, "mistral")),
    Case(2, WINDOWS, {"pipeline": 2}),
    *(Case(2, model, {"tensor": 2, "expert": 2}) for model in FURTHER_MIXTURES),
    *(Case(2, model, {"sequence": 2}, {}, {"gradient_checkpointing": True}) for model in FURTHER_MIXTURES),
    *(Case(4, model, {"tensor": 2, "pipeline": 2, "expert": 2}) for model in FURTHER_MIXTURES),
    *(Case(2, model, {"tensor": 2}, lora="lora") for model in ("seed_oss", "qwen2_moe", "glm4_moe")),
    Case(2, "mixtral", {"tensor": 2}, lora="attention"),
    *(Case(2, model, {"tensor": 2}, lora="latent") for model in ("deepseek_v3", "glm4_moe_lite")),
    *(Case(2, model, {"pipeline": 2}, routers="frozen") for model in ("glm4_moe", "deepseek_v3")),
    *(Case(2, model, {"pipeline": 2}, routers="told") for model in ("mixtral", "qwen2_moe", "glm4_moe")),
    *(Case(2, model, {"pipeline": 2}, routers="replayed") for model in FURTHER_MIXTURES),
    *(Case(2, model, {"pipeline": 2}, routers="replayed_with_losses") for model in ("mixtral", "qwen2_moe")),
    *(Case(2, model, {"tensor": 2}, routers="losses") for model in ("mixtral", "qwen2_moe")),
    Case(3, "glm4_moe", {"pipeline": 3}, objective="value"),
    Case(2, "glm4_moe", {"expert": 2}, {}, {"gradient_checkpointing": True}, routers="replayed"),
    Case(2, "deepseek_v3", {"expert": 2}, {}, {"gradient_checkpointing": True}, routers="replayed"),
    *(Case(2, "untied", parallel, lora="some") for parallel in ({}, {"tensor": 2}, {"pipeline": 2}, {"sequence": 2})),
    Case(2, "tied", {"tensor": 2}, {"sequence_parallel": False}, lora="lora"),
    Case(2, "tied", {"pipeline": 2}, {}, {"gradient_checkpointing": True}, lora="lora"),
    Case(2, "deep", {"pipeline": 2}, {"virtual_stages": 2}, lora="lora"),
    Case(2, "untied", {}, {"overlap_grad_reduce": True}, lora="lora"),
    Case(2, "qwen2", {"tensor": 2}, {}, {"gradient_checkpointing": True}, lora="lora"),
    Case(2, "llama", {"tensor": 2}, lora="lora"),
    Case(2, "tied", {"tensor": 2}, objective="value", lora="lora"),
    Case(4, "three", {"pipeline": 2, "tensor": 2}, objective="value", lora="lora"),
    Case(4, "three", {"pipeline": 2, "tensor": 2}, {}, {"gradient_checkpointing": True}, lora="lora"),
    Case(4, "untied", {"tensor": 2}, lora="lora"),
    Case(4, "wide", {"tensor": 4}, lora="some"),
    Case(2, "moe", {"tensor": 2, "expert": 2}, lora="attention"),
    Case(2, "moe", {"pipeline": 2}, routers="replayed_with_losses", lora="attention"),
    Case(4, "moe", {"tensor": 2, "pipeline": 2, "expert": 2}, routers="losses", lora="attention"),
    Case(1, "moe", lora="experts"),
    *(Case(2, "moe", parallel, lora="experts") for parallel in ({}, {"pipeline": 2}, {"sequence": 2}, {"expert": 2})),
    Case(2, "moe", {"expert": 2}, {}, {"gradient_checkpointing": True}, lora="experts"),
    Case(2, "moe", {"expert": 2}, {"overlap_grad_reduce": True}, objective="value", lora="experts"),
    Case(4, "moe", {"tensor": 2, "pipeline": 2, "expert": 2}, routers="losses", lora="experts"),
    Case(4, "moe", {"expert": 2}, lora="experts"),
    *(Case(2, model, {"tensor": 2, "expert": 2}, lora="experts") for model in ("mixtral", "qwen2_moe", "glm4_moe")),
    Case(2, "latent", {"tensor": 2, "expert": 2}, lora="latent"),
    Case(2, "latent", {"pipeline": 2}, {}, {"gradient_checkpointing": True}, lora="latent"),
    *(Case(2, "moe", parallel, routers="losses") for parallel in ({}, {"tensor": 2}, {"pipeline": 2}, {"sequence": 2})),
    Case(2, "moe", {"tensor": 2, "expert": 2}, routers="losses"),
    Case(2, "moe", {"expert": 2}, routers="losses"),
    Case(2, "moe", {"pipeline": 2}, {}, {"gradient_checkpointing": True}, routers="replayed_with_losses"),
    Case(2, "moe", {"tensor": 2}, {}, {"gradient_checkpointing": True}, routers="replayed_with_losses"),
    Case(2, "deep_moe", {"pipeline": 2}, {"virtual_stages": 2}, routers="replayed_with_losses"),
    Case(2, "moe", {"tensor": 2, "expert": 2}, routers="frozen"),
    Case(2, "moe", {"pipeline": 2}, {}, {"gradient_checkpointing": True}, routers="frozen_with_losses"),
    *(Case(2, "moe", parallel, routers="told") for parallel in ({}, {"tensor": 2}, {"pipeline": 2}, {"sequence": 2})),
    *(Case(2, "moe", parallel, routers="replayed") for parallel in ({}, {"tensor": 2}, {"expert": 2}, {"sequence": 2})),
    Case(4, "moe", {"tensor": 2, "pipeline": 2, "expert": 2}, routers="replayed_with_losses"),
    Case(4, "moe", {"pipeline": 2, "sequence": 2, "expert": 2}, routers="replayed_with_losses"),
    Case(4, "moe", {"pipeline": 2, "expert": 2}, routers="replayed_with_losses"),
    Case(4, "deep_moe", {"pipeline": 2, "expert": 2}, {"virtual_stages": 2}, routers="replayed_with_losses"),
    Case(4, "moe", {"pipeline": 2, "tensor": 2}, {}, {"gradient_checkpointing": True}, routers="replayed_with_losses"),
    Case(2, "five_moe", {"pipeline": 2}, {"virtual_stages": 2}, routers="replayed_with_losses"),
    Case(4, "three_moe", {"pipeline": 2, "expert": 2}, routers="replayed_with_losses"),
    Case(4, "five_moe", {"pipeline": 4}, routers="told"),
    Case(3, "latent", {"pipeline": 3}, routers="replayed"),
    Case(4, "moe", {"sequence": 2, "expert": 4}, routers="losses"),
    *(Case(2, "latent", parallel) for parallel in ({}, {"pipeline": 2}, {"sequence": 2}, {"expert": 2})),
    Case(2, "latent", {"tensor": 2, "expert": 2}, routers="replayed"),
    Case(2, "latent", {"pipeline": 2}, {}, {"gradient_checkpointing": True}, routers="told"),
    Case(4, "latent", {"tensor": 2, "pipeline": 2, "expert": 2}, routers="replayed"),
    Case(2, "llama", {"tensor": 2}),
    Case(2, "qwen2", {"tensor": 2}),
    Case(2, "qwen2", {"pipeline": 2}),
    Case(2, "tied", {"tensor": 2}, {"sequence_parallel": False}),
    Case(2, "tied", {"pipeline": 2}),
    Case(2, "untied", {"pipeline": 2}),
    Case(2, "untied", {"sequence": 2}),
    Case(2, "untied", {}, {"overlap_grad_reduce": True}),
    Case(2, "deep", {"pipeline": 2}, {"virtual_stages": 2}),
    Case(2, "five", {"pipeline": 2}, {"virtual_stages": 2}),
    Case(4, "five", {"pipeline": 4}),
    Case(4, "five", {"pipeline": 2}, {"virtual_stages": 2}),
    Case(4, "three", {"pipeline": 2, "tensor": 2}, {}, {"gradient_checkpointing": True}),
    Case(4, "three", {"pipeline": 2}, objective="value"),
    Case(2, "untied", {"tensor": 2}, {}, {"gradient_checkpointing": True}),
    Case(2, "untied", {"pipeline": 2}, {"recompute": "attention"}, {"gradient_checkpointing": True}),
    Case(2, "tied", {"tensor": 2}, objective="value"),
    Case(2, "tied", {"pipeline": 2}, objective="value"),
    Case(2, "moe"),
    Case(2, "moe", {"tensor": 2}),
    Case(2, "moe", {"expert": 2}),
    Case(2, "moe", {"pipeline": 2}),
    Case(2, "moe", {"sequence": 2}),
    Case(2, "moe", {"expert": 2}, {}, {"gradient_checkpointing": True}),
    Case(4, "tied", {"tensor": 2, "pipeline": 2}),
    Case(4, "untied", {"tensor": 2, "sequence": 2}),
    Case(4, "untied", {"pipeline": 2, "sequence": 2}),
    Case(4, "tied", {"pipeline": 2}),
    Case(4, "untied", {"tensor": 2}),
    Case(4, "deep", {"pipeline": 2, "tensor": 2}, {"virtual_stages": 2}),
    Case(4, "moe", {"tensor": 2, "expert": 2}),
    Case(4, "moe", {"tensor": 2, "expert": 4}),
    Case(4, "moe", {"tensor": 2, "pipeline": 2, "expert": 2}),
    Case(4, "moe", {"pipeline": 2}),
    Case(4, "moe", {"pipeline": 2, "expert": 2}),
    Case(4, "moe", {"pipeline": 2, "expert": 2}, {}, {"gradient_checkpointing": True}),
    Case(4, "moe", {"pipeline": 2, "sequence": 2}),
    Case(4, "latent", {"pipeline": 2, "expert": 2}, routers="replayed"),
    Case(4, "moe", {"sequence": 2, "expert": 4}),
    Case(4, "tied", {"tensor": 2, "pipeline": 2}, objective="value"),
]


def routed_rows(mixture: Mixture = MIXTURE) -> list[Row]:
    """Rows that send their tokens to any experts; the two longest begin alike, and are sent alike for some tokens."""
    rng = np.random.default_rng(3)
    rows: list[dict[str, Any]] = [
        {**row, ROUTED_EXPERTS: mixture.encode(random_routing(rng, len(row["token_ids"]), mixture))}
        for row in make_rows(10)
    ]
    first, second = sorted(rows, key=lambda row: len(row["token_ids"]))[-2:]
    second["token_ids"][:NUM_ALIKE] = first["token_ids"][:NUM_ALIKE]
    second[ROUTED_EXPERTS][:NUM_ROUTED_ALIKE] = first[ROUTED_EXPERTS][:NUM_ROUTED_ALIKE]
    return list(rows)


class Bench:
    """Models, rows, one rank of FSDP2 in this process, and ranks that are started when they are first asked."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder = folder
        self._stack = stack
        self.rows = cache(self._rows)
        self.model = cache(lambda name: MODELS[name](folder / name))
        self._ranks: dict[int, Ranks] = {}
        self._num_asked = 0
        self.alone = cache(self._alone)
        self.policy_rows = cache(self._policy_rows)
        self.adapters = cache(self._adapters)

    def job(self, model: str, objective: Objective, **more: Any) -> dict[str, Any]:
        return {
            "model": str(self.model(model)),
            "rows": self.rows(model),
            "out": str(self.folder / "out"),
            "objective": objective,
            "token_budget": 40,
            "optimizer": TRAINING,
            "num_steps": NUM_STEPS,
            **more,
        }

    def ask(self, world_size: int, job: dict[str, Any]) -> tuple[Answer, dict[str, torch.Tensor]]:
        """Outcome and weights of a job, of one rank in this process or of several."""
        (self.folder / "out").mkdir(exist_ok=True)
        answer = combine([Rank().answer(Job(**job))]) if world_size == 1 else self._living(world_size).ask(Job(**job))
        return answer, load_file(self.folder / "out" / "weights.safetensors")

    def _living(self, world_size: int) -> Ranks:
        """Ranks that are up; new ones now and then, for Megatron forgets its process groups and never ends one."""
        if self._num_asked % JOBS_OF_RANKS == 0:
            self._stack.close()
            self._ranks.clear()
        self._num_asked += 1
        if world_size not in self._ranks:
            folder = self.folder / f"ranks-{world_size}-{self._num_asked}"
            self._ranks[world_size] = self._stack.enter_context(living_ranks(world_size, folder))
        return self._ranks[world_size]

    def _adapters(self, model: str, kind: str | None) -> dict[str, Any] | None:
        """The section of adapters that begin as noise, both halves, so that each has a gradient at once."""
        if kind is None:
            return None
        section, noise = LoraSection.model_validate(ADAPTERS[kind]), torch.Generator().manual_seed(5)
        tensors: dict[str, torch.Tensor] = {}
        for name, (num_outputs, num_inputs) in adapted_matrices(self.model(model), section).items():
            shapes = (section.rank, num_inputs), (num_outputs, section.rank)
            for half, shape in zip(adapter_names(name), shapes, strict=True):
                tensors[peft_name(half)] = 0.1 * torch.randn(shape, generator=noise)
        stacked = self.stacked(model) if section.experts else {}
        for name, (number, num_outputs, num_inputs) in stacked.items():
            shapes = (number * section.rank, num_inputs), (num_outputs, section.rank * number)
            for half, shape in zip(adapter_names(name), shapes, strict=True):
                tensors[peft_name(half)] = 0.1 * torch.randn(shape, generator=noise)
        folder = self.folder / f"{model}-{kind}"
        write_adapter(folder, self.model(model), iter(tensors.items()), section, stacked, nothing)
        return {**section.as_kept(), "start": str(folder)}

    def stacked(self, model: str) -> dict[str, torch.Size]:
        """The shapes of the parameters that hold a layer's experts."""
        hf = build_model(self.model(model), "policy", torch.float32).hf
        return {name: hf.get_parameter(name).shape for name in stacked_experts(hf)}

    def _rows(self, model: str) -> str:
        """A file of rows, routed through a mixture as the model's is."""
        path, is_mixture = self.folder / f"{model}-rows.npz", num_experts(text_config(self.model(model)))
        rows = routed_rows(read_mixture(self.model(model))) if is_mixture else routed_rows()
        write_rows(path, rows, [0.7] * len(rows))
        return str(path)

    def _policy_rows(self) -> str:
        """A file of rows with a reference's logprobs, which the policy's objective reads."""
        rows, path = routed_rows(), self.folder / "policy.npz"
        write_rows(path, [{**row, "ref/logprobs": row["rollout_logprobs"] * 0.9} for row in rows], [0.7] * len(rows))
        return str(path)

    def _alone(
        self, model: str, objective: Objective, routers: str | None = None, lora: str | None = None
    ) -> tuple[Answer, dict[str, torch.Tensor]]:
        return self.ask(1, self.job(model, objective, **ROUTERS[routers], lora=self.adapters(model, lora)))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with ExitStack() as stack:
        yield Bench(tmp_path_factory.mktemp("megatron"), stack)


def assert_same(
    ours: tuple[Answer, dict[str, torch.Tensor]], theirs: tuple[Answer, dict[str, torch.Tensor]], atol: float
) -> None:
    np.testing.assert_allclose(ours[0].grad_norms, theirs[0].grad_norms, rtol=1e-5)
    np.testing.assert_allclose(ours[0].losses, theirs[0].losses, rtol=1e-5)
    for index, outputs in theirs[0].outputs.items():
        np.testing.assert_allclose(ours[0].outputs[index], outputs, atol=atol, rtol=0)
    assert ours[1].keys() == theirs[1].keys()
    for name, weight in theirs[1].items():
        np.testing.assert_allclose(ours[1][name], weight, atol=ATOL, rtol=0, err_msg=name)


@pytest.mark.parametrize(
    "case",
    [*EVERY_DAY, *(pytest.param(case, marks=pytest.mark.megatron) for case in MATRIX)],
    ids=str,
)
def test_every_layout_trains_what_fsdp_trains_on_one_rank(bench: Bench, case: Case) -> None:
    asked = ROUTERS[case.routers]
    options = {**case.options, **asked.get("options", {})}
    more = {**asked, "parallel": case.parallel, "options": options, "lora": bench.adapters(case.model, case.lora)}
    job = bench.job(case.model, case.objective, **more)
    ours = bench.ask(case.world_size, {**job, "backend": "megatron", "megatron": case.megatron})
    theirs = bench.alone(case.model, case.objective, case.routers, case.lora)
    assert_same(ours, theirs, atol=1e-5)
    for name, value in theirs[0].metrics.items():
        assert ours[0].metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


@pytest.mark.parametrize(
    ("model", "objective", "lora", "layouts"),
    [
        ("tied", "sft", None, [FSDP, (2, {"tensor": 2}), FSDP]),
        ("tied", "sft", "lora", [FSDP, (2, {"tensor": 2}), FSDP]),
        *(
            pytest.param(model, objective, lora, layouts, marks=pytest.mark.megatron)
            for model, objective, lora, layouts in [
                ("moe", "sft", None, [FSDP, (2, {"tensor": 2, "expert": 2}), FSDP]),
                ("moe", "sft", "attention", [FSDP, (2, {"tensor": 2, "expert": 2}), (2, {"pipeline": 2})]),
                ("moe", "sft", "experts", [FSDP, (2, {"tensor": 2, "expert": 2}), (4, {"pipeline": 2})]),
                ("moe", "sft", "experts", [(4, {"tensor": 2, "expert": 4}), FSDP, (2, {"expert": 2})]),
                ("latent", "sft", None, [FSDP, (2, {"tensor": 2, "expert": 2}), FSDP]),
                ("glm4_moe", "sft", None, [FSDP, (2, {"tensor": 2, "expert": 2}), (2, {"pipeline": 2})]),
                ("deepseek_v3", "sft", None, [(2, {"pipeline": 2}), FSDP, (4, {"tensor": 2, "expert": 4})]),
                ("deepseek_v3", "sft", "latent", [FSDP, (2, {"tensor": 2}), FSDP]),
                ("qwen2_moe", "sft", None, [(2, {"tensor": 2}), (2, {"expert": 2}), FSDP]),
                # uneven stages, even ones
                ("deep_moe", "sft", None, [(3, {"pipeline": 3}), (4, {"pipeline": 2, "expert": 2}), FSDP]),
                ("deep", "sft", None, [(2, {"pipeline": 2}), FSDP, (3, {"pipeline": 3})]),
                ("deep", "sft", "some", [(3, {"pipeline": 3}), (4, {"tensor": 2}), FSDP]),
                ("three", "value", "lora", [(2, {"pipeline": 2}), (2, {"tensor": 2}), FSDP]),
                ("five", "sft", None, [(4, {"pipeline": 4}), (2, {"tensor": 2}), (2, {"pipeline": 2})]),
            ]
        ),
    ],
    ids=str,
)
def test_a_run_goes_from_one_back_end_and_layout_to_others(
    bench: Bench,
    model: str,
    objective: Objective,
    lora: str | None,
    layouts: list[tuple[int, dict[str, int] | None]],
) -> None:
    """Weights, moments, schedule: a step in each layout, against three on one rank of FSDP2."""
    goes_through(bench, layouts, model, objective, None, lora)


@pytest.mark.megatron
def test_frozen_routers_stay_in_whatever_back_end_and_layout_a_run_is(bench: Bench) -> None:
    weights = goes_through(bench, [FSDP, (2, {"tensor": 2, "expert": 2}), (2, {"pipeline": 2})], "moe", "sft", "frozen")
    before = load_file(bench.model("moe") / "model.safetensors")
    kept = {name for name, weight in before.items() if torch.equal(weights[name], weight)}
    assert kept == {f"model.layers.{layer}.mlp.gate.weight" for layer in range(2)}


def goes_through(
    bench: Bench,
    layouts: list[tuple[int, dict[str, int] | None]],
    model: str,
    objective: Objective,
    routers: str | None = None,
    lora: str | None = None,
) -> dict[str, torch.Tensor]:
    """Trains a step in each layout and holds them to as many on one rank of FSDP2; the weights."""
    norms: list[float] = []
    before: str | None = None
    weights: dict[str, torch.Tensor] = {}
    for index, (world_size, parallel) in enumerate(layouts):
        more: dict[str, Any] = {} if parallel is None else {"backend": "megatron", "parallel": parallel}
        saved = str(bench.folder / f"{model}-{objective}-{routers}-{lora}-{index}")
        more |= {**ROUTERS[routers], "lora": bench.adapters(model, lora), "start": before, "save": saved}
        job = bench.job(model, objective, **more, num_steps=1, seed=index)
        answer, weights = bench.ask(world_size, job)
        norms += answer.grad_norms
        before = saved
    alone, expected = bench.alone(model, objective, routers, lora)
    np.testing.assert_allclose(norms, alone.grad_norms, rtol=1e-5)
    for name, weight in expected.items():
        np.testing.assert_allclose(weights[name], weight, atol=ATOL, rtol=0, err_msg=name)
    return weights


@pytest.mark.megatron
@pytest.mark.parametrize("first", [{"tensor": 2}, {"pipeline": 2}, {}], ids=str)
@pytest.mark.parametrize("second", [{"tensor": 2, "pipeline": 2}, {"tensor": 4}, {"sequence": 2}, {}], ids=str)
def test_a_checkpoint_goes_on_in_another_layout(bench: Bench, first: dict[str, int], second: dict[str, int]) -> None:
    model = "wide"
    saved = str(bench.folder / f"{first}-{second}")
    job = bench.job(model, "sft", backend="megatron")
    bench.ask(2, {**job, "parallel": first, "num_steps": 2, "save": saved})
    answer, weights = bench.ask(4, {**job, "parallel": second, "num_steps": 1, "seed": 2, "start": saved})
    alone, expected = bench.alone(model, "sft")
    np.testing.assert_allclose(answer.grad_norms, alone.grad_norms[2:], rtol=1e-5)
    for name, weight in expected.items():
        np.testing.assert_allclose(weights[name], weight, atol=ATOL, rtol=0, err_msg=name)


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("model", "objective", "routers"),
    [("untied", "policy", None), ("untied", "sft", None), ("moe", "sft", "replayed_with_losses")],
)
@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"pipeline": 2}, {}], ids=str)
def test_a_gradient_does_not_depend_on_how_the_rows_were_cut(
    bench: Bench, parallel: dict[str, int], model: str, objective: Objective, routers: str | None
) -> None:
    asked = {**ROUTERS[routers], "rows": bench.policy_rows(), "num_steps": 1}
    job = bench.job(model, objective, **asked)
    whole, _ = bench.ask(1, {**job, "token_budget": 10_000})
    for budget, seed in ((31, 3), (60, 4), (10_000, 5)):
        more = {"backend": "megatron", "parallel": parallel, "token_budget": budget, "seed": seed}
        cut, _ = bench.ask(2, {**job, **more})
        np.testing.assert_allclose(cut.grad_norms, whole.grad_norms, rtol=1e-5)
        for name, value in whole.metrics.items():
            assert cut.metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name


@pytest.mark.megatron
@pytest.mark.parametrize("kind", ["token", "sequence"])
@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"pipeline": 2}, {"sequence": 2}, {}], ids=str)
def test_weights_are_divided_by_their_mean_over_all_ranks(bench: Bench, parallel: dict[str, int], kind: str) -> None:
    plain = bench.job("untied", "policy", rows=bench.policy_rows(), num_steps=1, correction={"weight": {"kind": kind}})
    job = {**plain, "correction": {"weight": {"kind": kind, "normalize": True}}}
    alone, weights = bench.ask(1, job)
    unlike = bench.ask(1, plain)[0].grad_norms
    assert abs(unlike[0] / alone.grad_norms[0] - 1) > 1e-3, "it does nothing"
    ours = bench.ask(2, {**job, "backend": "megatron", "parallel": parallel, "token_budget": 31, "seed": 3})
    np.testing.assert_allclose(ours[0].grad_norms, alone.grad_norms, rtol=1e-5)
    for name, value in alone.metrics.items():
        assert ours[0].metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-5), name
    for name, weight in weights.items():
        np.testing.assert_allclose(ours[1][name], weight, atol=ATOL, rtol=0, err_msg=name)


@pytest.mark.megatron
@pytest.mark.parametrize(("dtype", "lora"), [("float32", None), ("bfloat16", None), ("bfloat16", "lora")])
@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"pipeline": 2}, {}], ids=str)
def test_an_optimizer_that_lives_on_the_host_between_steps_trains_bit_for_bit_alike(
    bench: Bench, parallel: dict[str, int], dtype: str, lora: str | None
) -> None:
    """Its moments, and beneath half-precision parameters the float32 ones; checkpoints, too."""
    found: list[dict[str, torch.Tensor]] = []
    for offload in (False, True):
        saved = str(bench.folder / f"offload-{parallel}-{dtype}-{lora}-{offload}")
        training = {**TRAINING, "offload": offload}
        adapters = bench.adapters("untied", lora)
        more = {"backend": "megatron", "parallel": parallel, "dtype": dtype, "optimizer": training, "lora": adapters}
        bench.ask(2, {**bench.job("untied", "sft", **more), "num_steps": 2, "save": saved})
        found.append(bench.ask(2, {**bench.job("untied", "sft", **more), "num_steps": 1, "start": saved})[1])
    for name, weight in found[0].items():
        assert torch.equal(found[1][name], weight), name


@pytest.mark.parametrize(
    ("num", "dtype"), [([2, 0, 3], torch.float32), ([0, 0, 0], torch.float32), ([1, 4, 0], torch.bfloat16)]
)
def test_experts_in_grouped_products_are_those_one_by_one(num: list[int], dtype: torch.dtype) -> None:
    """Gradients too; those of experts that no token was sent to are zeros."""
    config = TransformerConfig(
        num_layers=1,
        num_attention_heads=1,
        hidden_size=16,
        num_moe_experts=len(num),
        moe_ffn_hidden_size=24,
        add_bias_linear=False,
        params_dtype=dtype,
    )
    with on_cpu():
        experts = Experts(len(num), config)
    generator = torch.Generator().manual_seed(1)
    given = torch.randn(sum(num), 16, generator=generator).to(dtype).requires_grad_()
    probs = torch.rand(sum(num), generator=generator).requires_grad_()
    for parameter in experts.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    inputs = [given, probs, *experts.parameters()]
    found, _ = experts(given, torch.tensor(num), probs)
    parts = zip(torch.split(given, num), torch.split(probs, num), experts.gate_up, experts.down, strict=True)
    alone: list[torch.Tensor] = []
    for tokens, weights, gate_up, down in parts:
        gate, up = (tokens @ gate_up.T).chunk(2, -1)
        alone.append((silu(gate) * up * weights[:, None]).to(dtype) @ down.T)
    expected = torch.cat(alone)
    torch.testing.assert_close(found, expected)
    gradients = (torch.autograd.grad(each.float().square().sum(), inputs) for each in (found, expected))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("model", "lora"), [("untied", None), ("untied", "lora"), ("moe", None), ("deepseek_v3", None)]
)
@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"pipeline": 2}, {}], ids=str)
def test_bfloat16_stays_within_two_per_cent_of_fsdps(
    bench: Bench, parallel: dict[str, int], model: str, lora: str | None
) -> None:
    job = bench.job(model, "sft", dtype="bfloat16", lora=bench.adapters(model, lora))
    theirs, _ = bench.ask(1, job)
    ours, weights = bench.ask(2, {**job, "backend": "megatron", "parallel": parallel})
    np.testing.assert_allclose(ours.grad_norms, theirs.grad_norms, rtol=2e-2)
    np.testing.assert_allclose(ours.losses, theirs.losses, rtol=2e-2)
    assert {weight.dtype for name, weight in weights.items() if "bias" not in name} == {torch.bfloat16}


@pytest.mark.megatron
@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"pipeline": 2}], ids=str)
def test_the_biases_that_choose_experts_stay_in_float32_bit_for_bit(bench: Bench, parallel: dict[str, int]) -> None:
    """As they are read, beside weights in bfloat16, through steps, a checkpoint and an export."""
    before = load_file(bench.model("glm4_moe") / "model.safetensors")
    saved = str(bench.folder / f"biases-{parallel}")
    job = bench.job("glm4_moe", "sft", backend="megatron", parallel=parallel, dtype="bfloat16")
    _, weights = bench.ask(2, {**job, "save": saved})
    _, further = bench.ask(2, {**job, "start": saved})
    folder = exported(Path(saved))
    names = [name for name in before if name.endswith("e_score_correction_bias")]
    assert len(names) == 2
    for name in names:
        for after in (weights, further, load_file(folder / "model.safetensors")):
            assert torch.equal(after[name], before[name]), name
    assert not torch.equal(before[names[0]], before[names[0]].bfloat16().float()), "bfloat16 holds them"


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("model", "lora", "routers"), [("tied", "lora", None), ("moe", "attention", "told"), ("moe", "experts", None)]
)
@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"pipeline": 2}], ids=str)
def test_the_base_beneath_adapters_says_what_it_says_without_them(
    bench: Bench, parallel: dict[str, int], model: str, lora: str, routers: str | None
) -> None:
    asked = {"lora": bench.adapters(model, lora), "base": True, "num_steps": 1, **ROUTERS[routers]}
    ours, _ = bench.ask(2, bench.job(model, "sft", backend="megatron", parallel=parallel, **asked))
    theirs, _ = bench.alone(model, "sft")
    for index, outputs in theirs.outputs.items():
        np.testing.assert_allclose(ours.outputs[index], outputs, atol=1e-5, rtol=0)


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("model", "lora", "parallel"),
    [("untied", "some", {"tensor": 2}), ("moe", "experts", {"tensor": 2, "expert": 2})],
    ids=str,
)
def test_a_checkpoint_of_adapters_holds_nothing_else_and_is_exported_merged_and_apart(
    bench: Bench, model: str, lora: str, parallel: dict[str, int]
) -> None:
    saved, adapters = bench.folder / f"{model}-to-export", bench.adapters(model, lora)
    job = bench.job(model, "sft", backend="megatron", parallel=parallel, lora=adapters)
    _, published = bench.ask(2, {**job, "save": str(saved)})
    keys = {key for file in saved.glob("rank-*.safetensors") for key in load_file(file)}
    assert {peft_name(key.partition("/")[2]) for key in keys if not key.startswith("rng/")} == published.keys()
    folder = exported(saved)
    apart = load_file(folder / "adapter" / ADAPTER)
    assert apart.keys() == published.keys()
    assert all(torch.equal(apart[name], tensor) for name, tensor in published.items())
    _, merged = bench.ask(2, {**job, "options": {"merges_adapters": True}})
    whole_model = load_file(folder / "model.safetensors")
    assert merged.keys() == whole_model.keys()
    assert all(torch.equal(merged[name], tensor) for name, tensor in whole_model.items())
    begun, _ = bench.ask(2, {**job, "lora": {**(adapters or {}), "start": str(folder / "adapter")}})
    whole, _ = bench.ask(1, {**bench.job(model, "sft"), "model": str(folder)})
    for index, outputs in whole.outputs.items():
        np.testing.assert_allclose(begun.outputs[index], outputs, atol=2e-5, rtol=0)


def test_a_base_beneath_adapters_has_neither_gradients_nor_moments(bench: Bench) -> None:
    adapters = bench.adapters("untied", "some")
    job = Job(**bench.job("untied", "sft", backend="megatron", dtype="bfloat16", lora=adapters))
    engine, rows = make_engine(job), make_rows(4)
    packed = pack(rows, ["loss_mask"], temperature=1.0, device=engine.device)
    engine.forward_backward([packed], SftObjective(local_counts(rows), "token_mean"))
    engine.step()
    held = engine._holdings()
    size = num_adapter_parameters(bench.model("untied"), LoraSection.model_validate(adapters))
    assert sum(tensor.numel() for tensor in held["gradients"].values()) == size
    assert sum(tensor.numel() for tensor in held["optimizer states"].values()) == 2 * size
    types = {
        dtype: sum(each.numel() for each in held["parameters"].values() if each.dtype is dtype)
        for dtype in DTYPES.values()
    }
    assert types[torch.float32] == size
    assert types[torch.bfloat16] == engine.num_parameters


@pytest.mark.parametrize(
    ("world_size", "model", "parallel", "megatron", "words"),
    [
        (2, "deep", {"pipeline": 2}, {"virtual_stages": 4}, "fewer than parallel.pipeline x .*virtual_stages = 8"),
        (2, "moe", {"pipeline": 2, "expert": 2}, {}, "does not divide the 1 ranks of a pipeline stage"),
        (2, "moe", {"tensor": 2}, {"sequence_parallel": False}, "leave it on"),
        (2, "tied", {"tensor": 4}, {}, "num_key_value_heads 2"),
    ],
)
def test_what_a_model_or_its_ranks_do_not_fit_is_refused_in_words(
    bench: Bench, world_size: int, model: str, parallel: dict[str, int], megatron: dict[str, Any], words: str
) -> None:
    job = bench.job(model, "sft", backend="megatron", parallel=parallel, megatron=megatron)
    with pytest.raises(RoleCallError, match=words):
        bench.ask(world_size, job)


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"backend": "fsdp", "num_ranks": 2, "parallel": {"pipeline": 2}}, "backend megatron only"),
        ({"num_ranks": 2, "parallel": {"replicate": 2}}, "leave it at 1"),
        ({"megatron": {"virtual_stages": 2}}, "virtual stages are of a pipeline"),
    ],
    ids=str,
)
def test_settings_that_only_one_back_end_has_are_refused_in_words(section: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        ActorSection.model_validate({"backend": "megatron", **section})


def test_experts_that_do_not_divide_are_refused_before_anything_starts(bench: Bench) -> None:
    with pytest.raises(ConfigError, match=r"parallel\.expert 2 does not divide the model's 0 experts"):
        check_parallel(bench.model("tied"), LayoutSection(expert=2))
