"""The actor's step on a sealed batch: columns of old logprobs, then mini-batches and epochs of the configured
objective. Knows tensors and no gRPC.

A step: read this rank's rows; compute old_logprobs of every mini-batch but the first, whose own training pass gives
them (none when the rows hold them already, or when the sampler's take their place); then the updates. How far the
sampler's logprobs are from the actor's is measured on the way.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rolecall.algorithms.aggregation import sequence_index
from rolecall.algorithms.correction.mismatch import MismatchSums, mismatch, mismatch_sums, spread
from rolecall.algorithms.losses.custom import load
from rolecall.algorithms.selection import token_keys
from rolecall.columns import OLD_ROUTED_EXPERTS, ROUTED_EXPERTS, reference_column
from rolecall.settings import ACTOR_BASE, CovarianceLoss, CustomLoss, RunSettings
from rolecall.telemetry import Metrics
from rolecall.training.engine import Loss, Microbatch, TokenOutputs, ValueOutputs
from rolecall.training.model.logits.logprobs import Wanted
from rolecall.training.objective.objectives import PolicyObjective, policy_columns
from rolecall.training.objective.routing import RouterLosses, router_load
from rolecall.training.packing.pack import unpack
from rolecall.training.serving.applied import Applied
from rolecall.training.serving.trainer import Progress
from rolecall.training.step.mean_weight import mean_weight
from rolecall.training.step.optimize import MicrobatchCounter, StepCost, optimize, per_update
from rolecall.training.step.rank_context import StoreRankContext
from rolecall.training.step.share import Derive, Minibatch, TrainShare, read_share
from rolecall.training.step.token_selection import KEYS, select
from rolecall.trajectory import seed_of
from rolecall.v1.trajectory_pb2 import Coefficients, RowRef, TrainBatch
from rolecall.wire import Array
from services.actor import drift

logger = logging.getLogger(__name__)

ON_POLICY = "on_policy"
"""Derived column: 1 on the sampled tokens of a trajectory that was sampled wholly with the weights it is trained from.
"""
OLD = "old_logprobs"
SEEN = "seen_logprobs"
"""Derived column under `proximal: bypass`: what the training pass of the first epoch gave, to measure the sampler by.
"""
BASE = reference_column(ACTOR_BASE)
"""Logprobs of the actor's own model without its adapters: computed here, never stored."""
_SUMS = ("actor/loss", "actor/policy_loss", "actor/router_balance", "actor/router_z")
_SHOWN = {
    "kl": "mismatch_kl",
    "kl_k1": "mismatch_kl_k1",
    "reverse_kl": "mismatch_kl_reverse",
    "sampler_perplexity": "sampler_perplexity",
    "trainer_perplexity": "trainer_perplexity",
    "ess_tokens": "ess_tokens",
    "ess_sequences": "ess_sequences",
    "correlation": "probs_correlation",
}
"""Metric of each field of Mismatch."""


class PolicySteps:
    """The actor's columns and steps, by the settings of the algorithm."""

    def __init__(self, settings: RunSettings) -> None:
        self._algorithm = settings.algorithm
        squares = "sum_squared_probs" in settings.algorithm.advantage.needs
        replay = settings.actor.router_replay
        self._kept: tuple[str, ...] = (OLD, OLD_ROUTED_EXPERTS) if replay == "r2" else (OLD,)
        self.names: tuple[str, ...] = (*self._kept, "sum_squared_probs") if squares else self._kept
        self.reads: Sequence[str] = (ROUTED_EXPERTS,) if replay == "r3" else ()
        self.wanted = Wanted(squares=True) if squares else None
        self._length = settings.sampling.max_tokens
        self._seed = settings.run.seed
        self._warmup_steps = settings.critic.warmup_steps if settings.critic is not None else 0
        """Steps of the run before the first in which the policy learns."""
        loss = settings.algorithm.policy_loss
        self._covariance = loss if isinstance(loss, CovarianceLoss) else None
        self._moe = settings.actor.moe
        self._bypass = settings.algorithm.sampler_is_old
        correction = settings.algorithm.correction
        weight = correction.weight if correction is not None else None
        self._normalized = weight if weight is not None and weight.normalize else None
        """The weight that is divided by its mean."""
        self._named: str | None = None
        """Who is known to be far from all others."""
        self._looks_first = self._covariance is not None or self._moe is not None
        if isinstance(loss, CustomLoss):
            load(loss)  # not there: known at the start

    def encode(self, microbatch: Microbatch, outputs: TokenOutputs | ValueOutputs) -> list[dict[str, Array]]:
        """RoleColumns.encode."""
        assert isinstance(outputs, TokenOutputs)
        given = {
            OLD: outputs.logprobs_N,
            OLD_ROUTED_EXPERTS: outputs.routed_experts_NW,
            "sum_squared_probs": outputs.sum_squared_probs_N,
        }
        wanted = [tensor for name in self.names if (tensor := given[name]) is not None]
        rows = zip(*(unpack(each_N, microbatch.lengths) for each_N in wanted), strict=True)
        return [dict(zip(self.names, row, strict=True)) for row in rows]

    def apply(
        self, context: StoreRankContext, batch: TrainBatch, applied: Applied, progress: Progress
    ) -> tuple[Metrics, int]:
        """RoleSteps.apply. Nothing is done with a batch of which the critic alone learns."""
        if batch.critic_only:
            return Metrics(), 0
        started, cost, section = time.perf_counter(), StepCost(context), self._algorithm
        share = self._read(context, batch, applied)
        read_s = time.perf_counter() - started
        if self._bypass:
            for minibatch in share.minibatches:
                minibatch.add_column(
                    OLD, [each.columns["rollout_logprobs"] for each in minibatch.microbatches if each.lengths]
                )
        for minibatch in share.minibatches:
            if minibatch.has(OLD_ROUTED_EXPERTS):
                routed = [each.columns[OLD_ROUTED_EXPERTS] for each in minibatch.microbatches if each.lengths]
                minibatch.add_column(ROUTED_EXPERTS, routed)
        known_first = share.minibatches if self._normalized is not None else share.minibatches[1:]
        later = [minibatch for minibatch in known_first if not minibatch.has(OLD)]
        bases = share.minibatches if BASE in policy_columns(section) else []
        passes = (2 if self._looks_first else 1) * section.num_epochs * len(share.microbatches)
        passes += sum(len(minibatch.microbatches) for minibatch in (*later, *bases))
        counter = MicrobatchCounter(progress, passes)
        # Before the first update: what is compared with the policy as it was.
        _add_logprobs(context, later, OLD, counter)
        _add_logprobs(context, bases, BASE, counter, base=True)
        mean = 1.0
        if self._normalized is not None:
            mean = mean_weight(context.group, share.microbatches, self._normalized)
        seen = _FirstPasses(SEEN if self._bypass else OLD)

        def objective(minibatch: Minibatch) -> Loss:
            seen.add_to(minibatch)
            return seen.keeping(self._loss(context, minibatch, batch.coefficients, counter, mean), minibatch)

        # not of the updates so far: a run may go on with another number of them a step
        place = max(0, batch.step - self._warmup_steps) * section.num_minibatches * section.num_epochs
        metrics, skipped = optimize(context, share, objective, section.num_epochs, counter, "actor", place=place)
        for minibatch in share.minibatches:
            seen.add_to(minibatch)
        metrics = per_update(metrics, _SUMS, section.num_minibatches * section.num_epochs)
        # Without old_logprobs the later ones were seen after an update, and would be off by what it changed.
        compared = share.minibatches[:1] if self._bypass else share.minibatches
        _add_mismatch(context, metrics, compared, len(share.rows), seen.column)
        self._tell_drift(context, compared, share.refs, seen.column, batch.step)
        if context.group.is_leader:
            metrics.mean("actor/read_s", read_s)
            if self._normalized is not None:
                metrics.mean("actor/correction_normalizer", mean)
        cost.add_to(metrics, "actor", share.num_tokens)
        return metrics, skipped

    def _read(self, context: StoreRankContext, batch: TrainBatch, applied: Applied) -> TrainShare:
        section = self._algorithm
        versions = frozenset(version for version, step in applied.published.items() if step == batch.step)
        own = [*(name for name in policy_columns(section) if name not in (OLD, BASE)), "policy_versions"]
        seed, derive = seed_of(self._seed, batch.step, 0), self._derive(batch.step, versions)
        columns = [*own, *self.reads]
        return read_share(
            context,
            batch,
            columns,
            section.num_minibatches,
            seed,
            optional=self._kept,
            derive=derive,
            between_segments=not section.sees_trajectories,
            by_prompt=not section.compares_tokens,
        )

    def _loss(
        self,
        context: StoreRankContext,
        minibatch: Minibatch,
        coefficients: Coefficients,
        counter: MicrobatchCounter,
        mean: float,
    ) -> Loss:
        """Makes the loss of the next update with `minibatch`, after a look at all of it with the present weights where
        the loss wants one.
        """
        seen = context.engine.forward(minibatch.microbatches) if self._looks_first else []
        counter.advance(len(seen))
        if self._covariance is not None:
            select(context.group, minibatch, self._covariance, seen)
        policy = PolicyObjective(self._algorithm, minibatch.counts, coefficients, self._length, mean)
        return (
            policy if self._moe is None else RouterLosses(policy, self._moe, router_load(context.group, seen), "actor")
        )

    def _tell_drift(
        self,
        context: StoreRankContext,
        minibatches: Sequence[Minibatch],
        refs: Sequence[RowRef],
        measured: str,
        step: int,
    ) -> None:
        """Names the rollout or the rank that is far from the actor where all others are near, when that begins. A
        collective; columns as in _add_mismatch.
        """
        microbatches = [each for minibatch in minibatches for each in minibatch.microbatches if each.lengths]
        own: drift.Distances = {}
        if microbatches and context.group.is_slot_leader:
            old_N = torch.cat([each.columns[measured] for each in microbatches])
            rollout_N = torch.cat([each.columns["rollout_logprobs"] for each in microbatches])
            pure_N = torch.cat([each.columns[ON_POLICY] & each.score_mask_N for each in microbatches])
            own = drift.by_rollout(old_N[pure_N], rollout_N[pure_N], _trajectories(microbatches)[pure_N], refs)
        found = drift.outlier(context.group.gather(drift.encoded(own)))
        if found is not None and context.group.is_leader and found.name != self._named:
            logger.warning(
                "step %d: the logprobs of %s are %.2g off for each token that is unsure, those of all others %.2g: it "
                "computes another model; look at its log and its device, and start it again",
                step,
                found.name,
                found.distance,
                found.others,
            )
        self._named = found.name if found is not None else None

    def _derive(self, step: int, versions: frozenset[int]) -> Derive:
        def derive(row: dict[str, Array], ref: RowRef) -> Mapping[str, Array]:
            keys = {KEYS: token_keys(f"{self._seed}/{step}/{ref.id}", ref.num_tokens)} if self._covariance else {}
            return {**_on_policy(row, versions), **keys}

        return derive


def _on_policy(row: Mapping[str, Array], versions: frozenset[int]) -> dict[str, Array]:
    sampled = row["policy_versions"][row["response_mask"] != 0]
    pure = sampled.size > 0 and int(sampled[0]) in versions and bool((sampled == sampled[0]).all())
    return {ON_POLICY: row["response_mask"] if pure else np.zeros_like(row["response_mask"])}


def _add_logprobs(
    context: StoreRankContext,
    minibatches: Sequence[Minibatch],
    column: str,
    counter: MicrobatchCounter,
    *,
    base: bool = False,
) -> None:
    """Adds the logprobs of a pass without a graph over all of `minibatches`, and where it sent tokens if it says so; a
    collective, unless there are none.
    """
    microbatches = [microbatch for minibatch in minibatches for microbatch in minibatch.microbatches]
    if not microbatches:
        return
    outputs = iter(context.engine.forward(microbatches, base=base))
    for minibatch in minibatches:
        said = [(each, _said(next(outputs))) for each in minibatch.microbatches]
        _add_said(minibatch, column, [part for each, part in said if each.lengths])
    counter.advance(len(microbatches))


@dataclass(frozen=True)
class _Said:
    """The outputs of a pass over one microbatch, not an empty one, that later passes need."""

    logprobs_N: torch.Tensor
    routed_NW: torch.Tensor | None


def _said(outputs: TokenOutputs | ValueOutputs) -> _Said:
    assert isinstance(outputs, TokenOutputs)
    return _Said(outputs.logprobs_N.detach(), outputs.routed_experts_NW)


def _add_said(minibatch: Minibatch, column: str, said: Sequence[_Said]) -> None:
    """Adds the logprobs of a pass as `column`, and its routing, which later passes then replay, if it chose one."""
    minibatch.add_column(column, [each.logprobs_N for each in said])
    routed = [each.routed_NW for each in said if each.routed_NW is not None]
    if routed:
        minibatch.add_column(ROUTED_EXPERTS, routed)


class _FirstPasses:
    """The outputs of each mini-batch's first training pass, for mini-batches without a column of its logprobs: no pass
    is made for it alone.
    """

    def __init__(self, column: str) -> None:
        self.column = column
        self._kept: dict[int, list[_Said]] = {}

    def add_to(self, minibatch: Minibatch) -> None:
        """The columns, once its first pass is over."""
        if id(minibatch) in self._kept:
            _add_said(minibatch, self.column, self._kept.pop(id(minibatch)))

    def keeping(self, policy: Loss, minibatch: Minibatch) -> Loss:
        """`policy`, which in the first pass also leaves the logprobs it sees, in order."""
        if minibatch.has(self.column):
            return policy
        kept = self._kept.setdefault(id(minibatch), [])

        def loss(microbatch: Microbatch, outputs: TokenOutputs | ValueOutputs) -> tuple[torch.Tensor, Metrics]:
            kept.append(_said(outputs))
            return policy(microbatch, outputs)

        return loss


def _add_mismatch(
    context: StoreRankContext, metrics: Metrics, minibatches: Sequence[Minibatch], num_rows: int, measured: str
) -> None:
    """How far sampler and actor are apart in `minibatches` of `num_rows` rows or fewer: over trajectories sampled with
    these very weights (`mismatch_*`), and over all. A collective.

    `measured` is the column of the actor's logprobs. What adds up is summed over the slots and reported by rank 0,
    exact; order statistics are each rank's own, of which the extreme is kept.
    """
    microbatches = [each for minibatch in minibatches for each in minibatch.microbatches if each.lengths]
    sums = _mismatch_sums(microbatches, measured, num_rows) if microbatches else MismatchSums()
    whole = mismatch(MismatchSums(*context.group.sum_over_slots(np.array(sums.numbers())).tolist()))
    if whole is not None and context.group.is_leader:
        for name, value in vars(whole).items():
            if value is not None:
                metrics.mean(f"actor/{_SHOWN[name]}", value)
    if not microbatches:
        return
    trained_N = torch.cat([each.columns[measured] for each in microbatches])
    sampled_N = torch.cat([each.columns["rollout_logprobs"] for each in microbatches])
    all_N = torch.cat([each.score_mask_N for each in microbatches])
    pure_N = torch.cat([each.columns[ON_POLICY] for each in microbatches]) & all_N
    num_pure = int(pure_N.sum())
    metrics.sum("actor/mismatch_tokens", num_pure)
    pure, everything = spread(sampled_N, trained_N, pure_N), spread(sampled_N, trained_N, all_N)
    if pure is not None:
        metrics.mean("actor/mismatch_mean", pure.mean_abs, num_pure)
        metrics.max("actor/mismatch_max", pure.max_abs)
        metrics.max("actor/mismatch_p999", pure.p999_abs)
    if everything is not None:
        metrics.max("actor/mismatch_all_max", everything.max_abs)
        metrics.max("actor/mismatch_all_p999", everything.p999_abs)
        metrics.min("actor/sampler_ratio_min", everything.ratio_min)
        metrics.min("actor/sampler_ratio_p01", everything.ratio_p01)
        metrics.max("actor/sampler_ratio_p99", everything.ratio_p99)
        metrics.max("actor/sampler_ratio_max", everything.ratio_max)


def _mismatch_sums(microbatches: Sequence[Microbatch], measured: str, num_trajectories: int) -> MismatchSums:
    """The sums over all of them at once: a trajectory may have segments in several."""
    trajectory_N = _trajectories(microbatches)
    sampled_N = torch.cat([each.columns["rollout_logprobs"] for each in microbatches])
    trained_N = torch.cat([each.columns[measured] for each in microbatches])
    mask_N = torch.cat([each.score_mask_N for each in microbatches])
    return mismatch_sums(sampled_N, trained_N, mask_N, trajectory_N, num_trajectories)


def _trajectories(microbatches: Sequence[Microbatch]) -> torch.Tensor:
    """int64 [N]: the number of the trajectory of each token."""
    return torch.cat(
        [
            torch.tensor(each.trajectories, device=each.cu_seqlens.device)[
                sequence_index(each.cu_seqlens, each.token_ids_N.numel())
            ]
            for each in microbatches
        ]
    )
