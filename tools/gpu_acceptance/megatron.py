"""Check 28: the back end over Megatron-Core beside FSDP2 on the same GPU: the same steps, how fast, in what memory.

One rank, so that nothing is cut or sent; what is Megatron's own then is the layers, the experts in grouped products,
the routers, the gradients' buffer and the optimizer.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import PretrainedConfig, Qwen3Config, Qwen3ForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from rolecall.settings import OptimizerSection, TrainingBackend
from rolecall.training.account.memory import PhaseMemory
from rolecall.training.backends import make_engine
from rolecall.training.objective.objectives import SftObjective
from rolecall.training.options import EngineOptions
from rolecall.training.packing.pack import local_counts
from rolecall.training.ranks.device import free_cached_memory
from rolecall.training.serving.hooks import nothing
from tools.gpu_acceptance.findings import Findings
from tools.gpu_acceptance.stage import Stage, make_rows, packed

_NUM_STEPS = 3
_BOUNDS: dict[Literal["float32", "bfloat16"], float] = {"float32": 1e-3, "bfloat16": 2e-2}
"""Relative bounds of losses and gradient norms against FSDP2's, by the type that both compute in."""


@dataclass(frozen=True)
class _Trained:
    losses: list[float]
    norms: list[float]
    tokens_per_s: float
    peak_gib: float


def check_megatron(found: Findings, folder: Path) -> None:
    """Steps of a dense model and of a mixture of experts, in float32 and in bfloat16, by both back ends."""
    stage = Stage.of(found, folder)
    for name in ("dense", "experts"):
        path = _write(stage, folder / name, has_experts=name == "experts")
        for dtype, bound in _BOUNDS.items():
            with found.attempt(f"{name} in {dtype}"):
                theirs, ours = (_train(stage, path, backend, dtype) for backend in ("fsdp", "megatron"))
                label = f"{name}, {dtype}"
                found.at_most(f"{label}: losses, relative", _apart(ours.losses, theirs.losses), bound)
                found.at_most(f"{label}: gradient norms, relative", _apart(ours.norms, theirs.norms), bound)
                found.require(f"{label}: the steps change nothing", ours.losses[-1] < ours.losses[0])
                found.figure(f"{label}: tokens/s over FSDP2's", ours.tokens_per_s / theirs.tokens_per_s)
                found.figure(f"{label}: peak GiB, FSDP2's", theirs.peak_gib)
                found.figure(f"{label}: peak GiB", ours.peak_gib)


def _write(stage: Stage, path: Path, *, has_experts: bool) -> Path:
    """A model of random weights: dense 0.2 billion, or a mixture of 0.5, of whose 64 experts a token takes 8."""
    shape = stage.pick(
        {"hidden_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 16, "head_dim": 64, "vocab_size": 32_768},
        {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8, "vocab_size": 331},
    )
    shape |= {"num_key_value_heads": shape["num_attention_heads"] // 2, "eos_token_id": 0, "tie_word_embeddings": False}
    config: PretrainedConfig = Qwen3Config(**shape, intermediate_size=stage.pick(3072, 48))
    kind: Any = Qwen3ForCausalLM
    if has_experts:
        experts = stage.pick((64, 8, 256), (4, 2, 16))
        names = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
        config, kind = Qwen3MoeConfig(**shape, **dict(zip(names, experts, strict=True))), Qwen3MoeForCausalLM
    with torch.random.fork_rng():
        torch.manual_seed(0)
        kind(config).save_pretrained(path)
    return path


def _train(stage: Stage, path: Path, backend: TrainingBackend, dtype: Literal["float32", "bfloat16"]) -> _Trained:
    options = EngineOptions(
        path=path, head="policy", dtype=dtype, optimizer=OptimizerSection(learning_rate=1e-4), total_steps=1000
    )
    free_cached_memory(stage.device)  # of the engine before
    accounts = PhaseMemory(stage.device)
    engine, _ = make_engine(backend, options, device=stage.device, memory=accounts, progressed=nothing)
    rows = make_rows(stage.pick([2048, 1024, 777, 64], [20, 9, 5, 3]), stage.pick(32_768, 331))
    microbatches = [packed(rows[:2], stage.device), packed(rows[2:], stage.device)]
    objective, losses, norms = SftObjective(local_counts(rows)), list[float](), list[float]()

    def step() -> None:
        losses.append(engine.forward_backward(microbatches, objective, entropy=True).values()["sft/loss"])
        norms.append(engine.step().grad_norm)

    seconds = [stage.seconds(step) for _ in range(_NUM_STEPS)]
    peak = max(accounts.take_peaks().values())
    return _Trained(losses, norms, sum(len(row["token_ids"]) for row in rows) / min(seconds), peak / 2**30)


def _apart(ours: list[float], theirs: list[float]) -> float:
    return max(abs(mine / other - 1) for mine, other in zip(ours, theirs, strict=True))
