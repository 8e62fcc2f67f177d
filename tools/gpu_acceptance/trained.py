"""Check 20: tokens a second and MFU of a 0.6B model as it is trained, supervised in rows of 8k and by policy gradient
in rows of 16k, beside what another trainer was seen to reach on one H100."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from rolecall.settings import AlgorithmSection
from rolecall.training.account.peaks import peak_flops
from rolecall.training.engine import Loss, Microbatch
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.objective.objectives import PolicyObjective, SftObjective, policy_columns
from rolecall.training.packing.pack import Row, local_counts, pack
from rolecall.training.ranks.device import name_of
from rolecall.v1.trajectory_pb2 import Coefficients
from tools.gpu_acceptance.findings import Findings
from tools.gpu_acceptance.stage import Stage, make_engine, make_rows, packed, write_zeros

SFT_8K = (26_000.0, 0.168)
"""Tokens a second and MFU of supervised training at 8k to be above."""
POLICY_16K = (11_900.0, 0.111)
"""The same of a policy-gradient step at 16k, its pass for the old logprobs included."""
_ROWS = 4
"""Full rows of a step, each a microbatch."""


def check_trained(found: Findings, folder: Path) -> None:
    """Whole steps, the optimizer's included, as a run of one GPU makes them: no recomputation."""
    stage = Stage.of(found, folder)
    config = stage.config("0.6B")
    engine = make_engine(stage, write_zeros(folder / "model", config))
    with found.attempt("supervised"):
        rows = make_rows([stage.pick(8192, 32)] * _ROWS, config.vocab_size)
        microbatches = [packed([row], stage.device) for row in rows]
        _judge(stage, engine, "SFT at 8k", _step(engine, microbatches, SftObjective(local_counts(rows))), rows, SFT_8K)
    with found.attempt("policy gradient"):
        algorithm = AlgorithmSection(groups_per_batch=1)
        rows = [_sampled(row) for row in make_rows([stage.pick(16384, 48)] * _ROWS, config.vocab_size)]
        columns = policy_columns(algorithm)
        microbatches = [pack([row], columns, temperature=1.0, device=stage.device) for row in rows]
        objective = PolicyObjective(algorithm, local_counts(rows), Coefficients(), stage.pick(16384, 48))
        train = _step(engine, microbatches, objective)

        def policy_step() -> None:
            engine.forward(microbatches)
            train()

        _judge(stage, engine, "policy step at 16k", policy_step, rows, POLICY_16K)


def _sampled(row: Row) -> Row:
    """`row` with what a sampled one has beside it."""
    likely = np.full(row["token_ids"].shape, -1.0, np.float32)
    return {**row, "advantages": np.ones_like(likely), "rollout_logprobs": likely, "old_logprobs": likely}


def _step(engine: FsdpEngine, microbatches: Sequence[Microbatch], loss: Loss) -> Callable[[], None]:
    def step() -> None:
        engine.forward_backward(microbatches, loss, entropy=True)
        engine.step()

    return step


def _judge(
    stage: Stage,
    engine: FsdpEngine,
    name: str,
    step: Callable[[], None],
    rows: Sequence[Row],
    above: tuple[float, float],
) -> None:
    step()  # so that what is measured allocates nothing new
    flops = engine.flops_done
    seconds = min(stage.seconds(step) for _ in range(2))
    flops = (engine.flops_done - flops) / 2
    peak = peak_flops(name_of(stage.device), engine.dtype)
    rate, mfu = sum(len(row["token_ids"]) for row in rows) / seconds, flops / seconds / peak if peak else 0.0
    stage.found.require(f"{name}: no arithmetic was counted", flops > 0)
    stage.found.at_least(f"{name}, tokens/s", rate, above[0], on_device=True)
    stage.found.at_least(f"{name}, MFU", mfu, above[1], on_device=True)
