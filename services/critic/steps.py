"""The critic's columns and steps: values of sampled tokens, and value-loss steps on sealed batches. It knows tensors
and no gRPC.
"""

import time
from collections.abc import Sequence

import numpy as np

from rolecall.settings import RunSettings
from rolecall.telemetry import Metrics
from rolecall.training.engine import Microbatch, TokenOutputs, ValueOutputs
from rolecall.training.model.logits.logprobs import Wanted
from rolecall.training.objective.objectives import VALUE_COLUMNS, ValueObjective
from rolecall.training.packing.pack import unpack
from rolecall.training.serving.applied import Applied
from rolecall.training.serving.trainer import Progress
from rolecall.training.step.optimize import MicrobatchCounter, StepCost, optimize, per_update
from rolecall.training.step.rank_context import StoreRankContext
from rolecall.training.step.share import read_share
from rolecall.trajectory import seed_of
from rolecall.v1.trajectory_pb2 import TrainBatch
from rolecall.wire import Array
from services.critic import config

_ROUNDING = 1e-12
"""Share of the mean square of the returns, float32, below which their variance is that of their last bits: then nothing
can be explained.
"""
_SUMS = ("critic/loss",)


class ValueSteps:
    """The critic's columns and steps: values, and the clipped value loss."""

    names: tuple[str, ...] = ("values", "bootstrap_value")
    wanted: Wanted | None = None
    reads: Sequence[str] = ()

    def __init__(self, settings: RunSettings) -> None:
        self._clip_eps = config.section(settings).value_clip_eps
        self._num_minibatches = config.num_minibatches(settings)
        self._num_epochs = settings.algorithm.num_epochs
        self._seed = settings.run.seed

    def encode(self, microbatch: Microbatch, outputs: TokenOutputs | ValueOutputs) -> list[dict[str, Array]]:
        """RoleColumns.encode."""
        assert isinstance(outputs, ValueOutputs)
        last_S = outputs.bootstrap_values_S.detach().to("cpu").numpy().astype(np.float32)
        values = unpack(outputs.values_N, microbatch.lengths)
        return [
            {"values": values_T, "bootstrap_value": last[None]} for values_T, last in zip(values, last_S, strict=True)
        ]

    def apply(
        self, context: StoreRankContext, batch: TrainBatch, applied: Applied, progress: Progress
    ) -> tuple[Metrics, int]:
        """RoleSteps.apply. The clip is around the values of the rows: those the critic gave before the batch was
        sealed.
        """
        started, cost = time.perf_counter(), StepCost(context)
        share = read_share(context, batch, VALUE_COLUMNS, self._num_minibatches, seed_of(self._seed, batch.step, 0))
        read_s = time.perf_counter() - started
        counter = MicrobatchCounter(progress, len(share.microbatches) * self._num_epochs)
        metrics, skipped = optimize(
            context,
            share,
            lambda part: ValueObjective(self._clip_eps, part.counts),
            self._num_epochs,
            counter,
            "critic",
            place=batch.step * self._num_minibatches * self._num_epochs,
        )
        metrics = per_update(metrics, _SUMS, self._num_minibatches * self._num_epochs)
        _add_explained_variance(context, metrics, share.rows)
        if context.group.is_leader:
            metrics.mean("critic/read_s", read_s)
        cost.add_to(metrics, "critic", share.num_tokens)
        return metrics, skipped


def _add_explained_variance(context: StoreRankContext, metrics: Metrics, rows: list[dict[str, Array]]) -> None:
    """1 - var(returns - values) / var(returns) of the values the batch's advantages were made of; a collective."""
    masks = [row["loss_mask"] != 0 for row in rows]
    returns = np.concatenate(
        [np.zeros(0), *(row["returns"][mask].astype(np.float64) for row, mask in zip(rows, masks, strict=True))]
    )
    errors = returns - np.concatenate(
        [np.zeros(0), *(row["values"][mask].astype(np.float64) for row, mask in zip(rows, masks, strict=True))]
    )
    num, sum_r, sum_rr, sum_e, sum_ee = context.group.sum_over_slots(
        np.array([returns.size, returns.sum(), (returns**2).sum(), errors.sum(), (errors**2).sum()])
    )
    variance = sum_rr / num - (sum_r / num) ** 2 if num else 0.0
    if context.group.is_leader and variance > _ROUNDING * sum_rr / max(num, 1):
        metrics.mean("critic/explained_variance", 1 - (sum_ee / num - (sum_e / num) ** 2) / variance)
