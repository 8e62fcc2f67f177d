"""Checks 6 and 7: the optimizer's arithmetic, adapters and value heads."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from rolecall.settings import LoraSection, OptimizerSection
from rolecall.training.engine import TokenOutputs
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.objective.objectives import SftObjective, ValueObjective
from rolecall.training.packing.pack import Row, local_counts, pack
from tools.gpu_acceptance.findings import Findings
from tools.gpu_acceptance.stage import (
    Stage,
    local_gradients,
    local_moments,
    local_parameters,
    make_engine,
    make_rows,
    packed,
    relative,
    write_zeros,
)

_RATE = 1e-7


def check_masters(found: Findings, folder: Path) -> None:
    """Many steps at a rate that bfloat16 could not represent, against AdamW of float32 that gets the same gradients."""
    stage = Stage.of(found, folder)
    num_steps = stage.pick(200, 8)
    config = stage.config("0.6B", **stage.pick({"num_hidden_layers": 4, "vocab_size": 8192}, {}))
    section = OptimizerSection(learning_rate=_RATE, max_grad_norm=1e30, weight_decay=0.0)
    engine = make_engine(stage, write_zeros(folder / "model", config), optimizer=section)
    parameters = local_parameters(engine)
    found.require(
        "a master weight is not float32", all(parameter.dtype == torch.float32 for parameter in parameters.values())
    )
    before = {name: parameter.clone() for name, parameter in parameters.items()}
    exact = {name: parameter.clone() for name, parameter in parameters.items()}
    reference = torch.optim.AdamW(
        exact.values(), lr=_RATE, betas=section.betas, eps=section.eps, weight_decay=0.0, foreach=False, fused=False
    )
    rows = make_rows(stage.pick((300, 200), (12, 9)), config.vocab_size)
    microbatch, objective = packed(rows, stage.device), SftObjective(local_counts(rows))
    for _ in range(num_steps):
        engine.forward_backward([microbatch], objective, entropy=True)
        gradients = local_gradients(engine)
        for name, tensor in exact.items():
            tensor.grad = gradients[name].clone()
        engine.step()
        reference.step()
    found.require(
        "a moment is not float32", all(moment.dtype == torch.float32 for moment in local_moments(engine).values())
    )
    after = local_parameters(engine)
    found.at_most("parameters, relative", max(relative(after[name], exact[name]) for name in exact), 1e-6)
    found.figure("steps", num_steps)
    # Matrices: a move of 1e-7 is lost in the rounding of a norm's weight, which is 1. Rows of the embedding that no
    # token names do not move.
    inner = [name for name, tensor in exact.items() if tensor.ndim == 2 and "embed" not in name]
    found.at_most(
        "moves, relative",
        max(relative(after[name] - before[name], exact[name] - before[name], _RATE) for name in inner),
        2e-2,
    )
    moved = sum(int((after[name] != before[name]).sum()) for name in inner) / sum(
        before[name].numel() for name in inner
    )
    found.at_least("share of weights that moved", moved, stage.pick(0.9, 0.5))


def check_heads(found: Findings, folder: Path) -> None:
    """One step of adapters and one of a value head; without its adapters the model is the frozen one, to the bit."""
    stage = Stage.of(found, folder)
    config = stage.config("0.6B")
    path = write_zeros(folder / "model", config)
    rows = make_rows(stage.pick((2000, 900, 500), (20, 9, 5)), config.vocab_size)
    microbatch = packed(rows, stage.device)
    frozen = make_engine(stage, path, optimizer=None)
    adapted = make_engine(
        stage,
        path,
        optimizer=OptimizerSection(learning_rate=1e-2),
        lora=LoraSection(rank=8, target_modules=("q_proj", "down_proj")),
    )
    of_base = _logprobs(frozen, rows, stage)
    found.require("new adapters change what the model says", torch.equal(_logprobs(adapted, rows, stage), of_base))
    for _ in range(2):  # the first moves B alone: A's gradient is 0 while B is
        adapted.forward_backward([microbatch], SftObjective(local_counts(rows)), entropy=True)
        outcome = adapted.step()
    found.require("the adapters' step was not applied", outcome.applied)
    found.figure("adapters' gradient norm", outcome.grad_norm)
    found.require(
        "base is not the frozen engine, bit for bit", torch.equal(_logprobs(adapted, rows, stage, base=True), of_base)
    )
    found.require("trained adapters change nothing", not torch.equal(_logprobs(adapted, rows, stage), of_base))
    del frozen, adapted
    _check_values(stage, path)


def _logprobs(engine: FsdpEngine, rows: Sequence[Row], stage: Stage, base: bool = False) -> torch.Tensor:
    (outputs,) = engine.forward([packed(rows, stage.device)], base=base)
    assert isinstance(outputs, TokenOutputs)
    return outputs.logprobs_N


def _check_values(stage: Stage, path: Path) -> None:
    rate = stage.pick(1e-7, 1e-4)  # AdamW's first step moves every weight by it
    engine = make_engine(stage, path, dtype="float32", head="value", optimizer=OptimizerSection(learning_rate=rate))
    rows = make_rows(stage.pick((2000, 900, 500), (20, 9, 5)), engine.config.vocab_size)
    rng = np.random.default_rng(0)
    rows = [
        {
            **row,
            "values": np.zeros(len(row["token_ids"]), np.float32),
            "returns": rng.random(len(row["token_ids"]), np.float32),
        }
        for row in rows
    ]
    microbatch = pack(rows, ["loss_mask", "values", "returns"], temperature=1.0, device=stage.device)
    losses = []
    for _ in range(2):
        losses.append(
            engine.forward_backward([microbatch], ValueObjective(None, local_counts(rows))).values()["critic/loss"]
        )
        outcome = engine.step()
    stage.found.figure("value loss", f"{losses[0]:.4f}, {losses[1]:.4f} after a step")
    stage.found.require("the value head's step was not applied", outcome.applied and outcome.grad_norm > 0)
    stage.found.require("the value loss did not fall", losses[1] < losses[0])
