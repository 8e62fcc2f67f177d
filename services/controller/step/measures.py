"""The measures of a step: metrics of its batch, of its time and of the fleet.

Reads, decides nothing.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence

import numpy as np

from rolecall.columns import TEACHER, reference_column
from rolecall.errors import RoleCallError
from rolecall.settings import RunSettings
from rolecall.telemetry import Metrics
from rolecall.telemetry.engine_use import use_metrics
from rolecall.v1 import rollout_pb2, trajectory_pb2
from rolecall.wire import Array
from services.controller.fleet.members import Fleet
from services.controller.groups.assembly import ScoredGroup
from services.controller.step.preparation import policy_column

logger = logging.getLogger(__name__)

EPISODE_ENDS = {
    "terminated": "terminated",
    "truncated": "truncated",
    "turns": "out_of_turns",
    "tokens": "out_of_tokens",
    "time": "out_of_time",
    "images": "out_of_images",
    "malformed": "out_of_calls",
}
"""Names of the shares of episodes by what ended them."""
MASKED = ("row_full", "unseen")
"""Reasons why tokens of an episode that an agent ran are not trained on."""
BRANCHES = ("history", "fork", "tools", "template", "images")
"""Reasons why a call of an agent began a branch, beside the first."""
INFO_TIMEOUT_S = 5.0
"""Deadline of a rollout's GetInfo, which blocks on nothing."""


class Stopwatch:
    """Splits a step's wall time into named laps.

    A step lasts from the end of one publish to the end of the next: while the step before is still reported, the fleet
    samples for this one already.
    """

    def __init__(self) -> None:
        self._started = self._last = time.monotonic()
        self._laps: dict[str, float] = {}

    def lap(self, name: str) -> None:
        """The time since the last lap belongs to `name`."""
        now = time.monotonic()
        self._laps[name] = self._laps.get(name, 0.0) + now - self._last
        self._last = now

    def leave_out(self) -> None:
        """The time since the last lap belongs to no step."""
        now = time.monotonic()
        self._started += now - self._last
        self._last = now

    def waited(self, groups: Sequence[ScoredGroup]) -> Metrics:
        """Parts the time so far, which ended with the batch `groups` complete.

        Until its last group landed, and from there until its last score was in. What is left of the report and wait
        laps is the controller's own. Groups that landed before the step count nothing: nobody waited for them.
        """
        metrics = Metrics()
        landed = max(self._started, *(group.landed_at_s for group in groups))
        metrics.sum("time/generation_s", landed - self._started)
        metrics.sum("time/scoring_s", max(landed, *(group.scored_at_s for group in groups)) - landed)
        return metrics

    def metrics(self, groups: Sequence[ScoredGroup]) -> Metrics:
        """Seconds per lap, of the whole step, and sampled tokens of the batch per second of it."""
        metrics = Metrics()
        total = self._last - self._started
        for name, seconds in self._laps.items():
            metrics.sum(f"time/{name}_s", seconds)
        metrics.sum("time/step_s", total)
        metrics.max(
            "throughput/tokens_per_s",
            sum(int(group.num_response_tokens_G.sum()) for group in groups) / max(total, 1e-9),
        )
        return metrics


def _of_tokens(metrics: Metrics, tokens: trajectory_pb2.EpisodeTokens) -> None:
    """The token ledger of an episode."""
    metrics.mean("episode/calls", tokens.num_calls)
    metrics.sum("episode/sampled_tokens", tokens.num_sampled)
    metrics.sum("episode/trained_tokens", tokens.num_trained)
    for reason in MASKED:
        metrics.sum(f"episode/masked_{reason}_tokens", tokens.masked.get(reason, 0))
    for cause in BRANCHES:
        metrics.mean(f"episode/branches_{cause}", tokens.branches.get(cause, 0))


def of_batch(
    settings: RunSettings,
    step: int,
    groups: Sequence[ScoredGroup],
    rows: Sequence[Mapping[str, Array]],
    step_of_version: Mapping[int, int],
) -> Metrics:
    """Rewards, lengths, signal and staleness of a batch about to be trained as `step`."""
    metrics = Metrics()
    for group in groups:
        size = len(group.rows)
        metrics.mean("reward/mean", float(group.totals_G.mean()), size)
        metrics.mean("reward/std_in_group", float(group.totals_G.std()))
        metrics.max("reward/max", float(group.totals_G.max()))
        metrics.min("reward/min", float(group.totals_G.min()))
        metrics.mean("reward/accuracy", float((group.rewards_G >= settings.reward.solved_at).mean()), size)
        for name, values in group.components.items():
            applies = ~np.isnan(values)
            if applies.any():
                metrics.mean(f"reward/{name}", float(values[applies].mean()), int(applies.sum()))
        if group.greedy is not None:
            metrics.mean("reward/greedy", group.greedy.total)
        metrics.mean("response/tokens", float(group.num_response_tokens_G.mean()), size)
        metrics.max("response/tokens_max", float(group.num_response_tokens_G.max()))
        metrics.mean("response/truncated", float(group.truncated_G.mean()), size)
        if group.environment:
            played = f"episode/{group.environment}"
            metrics.mean(f"{played}/reward", float(group.totals_G.mean()), size)
            metrics.mean(f"{played}/turns", float(np.mean([episode.num_turns for episode in group.episodes])), size)
            metrics.sum(f"{played}/groups", 1)
        for ref, episode in zip(group.rows, group.episodes, strict=False):
            metrics.mean("episode/segments", 1 + len(ref.segment_starts))
            metrics.mean("episode/turns", episode.num_turns)
            metrics.max("episode/turns_max", episode.num_turns)
            metrics.mean("episode/tool_calls", episode.num_tool_calls)
            metrics.mean("episode/malformed", episode.num_malformed)
            metrics.mean("episode/cut_observation_tokens", episode.num_cut_observation_tokens)
            metrics.mean("episode/images", episode.num_images)
            if episode.tokens is not None:
                _of_tokens(metrics, episode.tokens)
            for end, name in EPISODE_ENDS.items():
                metrics.mean(f"episode/{name}", float(episode.ended_by == end))
        if len(group.rows) > 1 or group.greedy is not None:  # one response alone is compared with nothing
            metrics.mean("groups/without_signal", float(not group.has_signal))
        metrics.max("rollout/group_s", group.generation_s)
        staleness = step - step_of_version.get(group.min_policy_version, step)
        metrics.mean("staleness/mean", staleness)
        metrics.max("staleness/max", staleness)
    metrics.sum("batch/groups", len(groups))
    metrics.sum("batch/trajectories", len(rows))
    metrics.sum("batch/tokens", sum(len(row["token_ids"]) for row in rows))
    metrics.sum("batch/response_tokens", sum(int(group.num_response_tokens_G.sum()) for group in groups))
    sampled = np.concatenate([row["rollout_logprobs"][row["response_mask"] != 0] for row in rows])
    metrics.mean("rollout/entropy_estimate", float(-sampled.mean()), sampled.size)
    distillation = settings.algorithm.distillation
    if distillation is not None:
        taught = np.concatenate([row[reference_column(TEACHER)][row["response_mask"] != 0] for row in rows])
        compared = policy_column(settings.algorithm)  # which a batch that was sealed under other settings may lack
        policy = np.concatenate([row.get(compared, row["rollout_logprobs"])[row["response_mask"] != 0] for row in rows])
        metrics.mean("distillation/reverse_kl", float((policy - taught).mean()), policy.size)
        if distillation.top_k is None and distillation.max_log_ratio is not None:
            held = np.abs(policy - taught) > distillation.max_log_ratio
            metrics.mean("distillation/held_tokens", float(held.mean()), policy.size)
    return metrics


def of_sealed(settings: RunSettings, batch: trajectory_pb2.TrainBatch) -> Metrics:
    """The coefficients of a step, where the algorithm has terms for them, and the KL taken from the rewards."""
    metrics = Metrics()
    if settings.algorithm.kl is not None:
        metrics.max("algorithm/kl_coef", batch.coefficients.kl_coef)
    if settings.algorithm.entropy is not None:
        metrics.max("algorithm/entropy_coef", batch.coefficients.entropy_coef)
    if batch.statistics.HasField("kl"):
        metrics.mean("reward/kl", batch.statistics.kl)
    return metrics


async def of_fleet(fleet: Fleet) -> Metrics:
    """Tokens sampled since each replica's start, the seconds its engine had work, and their ratio, summed; and what
    requests take of the engines. A replica that does not answer is left out.
    """
    rollouts = fleet.rollouts()
    metrics = Metrics()
    request = rollout_pb2.GetRolloutInfoRequest()
    answers = await asyncio.gather(
        *(rollout.stub.GetInfo(request, timeout=INFO_TIMEOUT_S) for rollout in rollouts), return_exceptions=True
    )
    for rollout, answer in zip(rollouts, answers, strict=True):
        if isinstance(answer, RoleCallError):
            logger.warning("%s did not say how it is: %s", rollout.consumer, answer)
            continue
        if isinstance(answer, BaseException):
            raise answer
        if answer.busy_s > 0:
            metrics.sum("rollout/tokens_per_s", answer.num_sampled_tokens / answer.busy_s)
            metrics.sum("rollout/busy_s", answer.busy_s)
            metrics.sum("rollout/sampled_tokens", answer.num_sampled_tokens)
        if answer.HasField("engine_use"):
            metrics.merge(use_metrics(answer.engine_use))
    metrics.sum("rollout/replicas", len(rollouts))
    return metrics
