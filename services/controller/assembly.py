"""From scored groups to a train batch: which groups are ready, which are filtered, what is written to the rows of a batch before it is sealed.

Owns the groups between their commit and their seal. The choice of groups is admission.py's, the numbers are rolecall/algorithms'.
"""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from rolecall.algorithms import control
from rolecall.algorithms.advantages import ScoredBatch, estimate, needs
from rolecall.algorithms.distillation import distil
from rolecall.algorithms.shaping import Moments, clip_rewards, kl_estimate, penalise_kl, place_rewards, shape_rewards, trained_mask
from rolecall.settings import TEACHER, DistillationSection, RunSettings
from rolecall.trajectory import reference_column
from rolecall.v1 import trajectory_pb2
from rolecall.wire import Array
from services.controller.adaptive import AdaptiveState
from services.controller.admission import AdmissionPolicy


@dataclass(frozen=True)
class GreedyResponse:
    """The response at temperature 0 that a group has beside its G: a baseline, never trained on."""

    row: trajectory_pb2.RowRef
    reward: float


@dataclass(frozen=True)
class ScoredGroup:
    """A committed group with its rewards. G rows, C reward components."""

    gid: int
    rows: tuple[trajectory_pb2.RowRef, ...]
    min_policy_version: int
    rewards_G: Array
    """float32 [G]."""
    components: Mapping[str, Array]
    """float32 [G] by name."""
    num_response_tokens_G: Array
    """int32 [G]."""
    truncated_G: Array
    """bool [G]."""
    generation_s: float
    """Seconds from claim to the group's last token."""
    landed_at_s: float
    """Monotonic clock of this process when the group was seen committed."""
    scored_at_s: float
    """Same clock, when its scores were in its rows."""
    greedy: GreedyResponse | None = None
    """Where the estimator wants one; in none of the arrays above."""
    prompt_uid: str = ""
    """Of its prompt."""

    @property
    def has_signal(self) -> bool:
        """Whether its rewards differ, from one another or from the greedy response's."""
        return bool(np.ptp(self.rewards_G if self.greedy is None else [*self.rewards_G, np.float32(self.greedy.reward)]) > 0)

    @property
    def all_rows(self) -> list[trajectory_pb2.RowRef]:
        """The rows to delete when it is dropped."""
        return [*self.rows, *([self.greedy.row] if self.greedy else [])]


class Assembly:
    """The live groups and the ready among them. Bounded by admission: never more than (max_staleness + 1) batches."""

    def __init__(self, policy: AdmissionPolicy) -> None:
        self._policy = policy
        self._live: dict[int, int] = {}
        self._ready: dict[int, ScoredGroup] = {}
        self._changed = asyncio.Event()

    def admitted(self, gid: int, admit_step: int) -> None:
        """A group came to life."""
        self._live[gid] = admit_step

    def dropped(self, gid: int) -> None:
        """A group ended without being trained."""
        self._live.pop(gid, None)
        self._ready.pop(gid, None)
        self._changed.set()

    def scored(self, group: ScoredGroup) -> None:
        """A group may be trained."""
        self._ready[group.gid] = group
        self._changed.set()

    def trained(self, gids: Sequence[int]) -> None:
        """Groups ended in a batch."""
        for gid in gids:
            self._live.pop(gid, None)
            self._ready.pop(gid, None)

    @property
    def num_live(self) -> int:
        """Groups neither trained nor dropped."""
        return len(self._live)

    @property
    def num_ready(self) -> int:
        """Groups that could be trained."""
        return len(self._ready)

    async def next_batch(self, batch: int, stall_timeout_s: float) -> list[ScoredGroup]:
        """The groups of batch number `batch`, oldest first; they stay live until `trained`. TimeoutError when nothing changes for stall_timeout_s."""
        while (gids := self._policy.choose(batch, self._ready.keys(), self._live)) is None:
            await self._change(stall_timeout_s)
        return [self._ready[gid] for gid in gids]

    async def groups(self, gids: Sequence[int], stall_timeout_s: float) -> list[ScoredGroup]:
        """Exactly these groups, once all are scored. TimeoutError when nothing changes for stall_timeout_s."""
        while not all(gid in self._ready for gid in gids):
            await self._change(stall_timeout_s)
        return [self._ready[gid] for gid in gids]

    async def _change(self, timeout_s: float) -> None:
        self._changed.clear()
        async with asyncio.timeout(timeout_s):
            await self._changed.wait()


def columns_read(settings: RunSettings) -> tuple[str, ...]:
    """Columns that `prepare` reads of every row of a batch."""
    columns = ["token_ids", "response_mask", "rollout_logprobs", "reward"]
    columns += [name for name in needs(settings.algorithm.advantage) if name not in (*columns, *OPTIONAL_COLUMNS)]
    if settings.algorithm.kl is not None and settings.algorithm.kl.placement == "reward":
        columns.append(reference_column(settings.algorithm.kl.reference))
    if settings.algorithm.distillation is not None:
        columns.append(reference_column(TEACHER))
    return tuple(columns)


GREEDY_COLUMNS = ("response_mask", "reward")
"""Columns that `prepare` reads of greedy responses."""

OPTIONAL_COLUMNS = ("token_rewards",)
"""Columns that `prepare` uses where a scorer gave them."""


def prepare(
    settings: RunSettings,
    step: int,
    groups: Sequence[ScoredGroup],
    rows: Sequence[Mapping[str, Array]],
    greedy_rows: Sequence[Mapping[str, Array]] = (),
    state: AdaptiveState | None = None,
) -> tuple[trajectory_pb2.TrainBatch, list[dict[str, Array]]]:
    """The batch to seal, and for each row the columns to write: loss_mask, advantages and, for a critic, returns.

    `rows` are the groups' rows in order, with `columns_read`; `greedy_rows` those of their greedy responses, with GREEDY_COLUMNS, where the estimator
    wants them; `state` what earlier steps left (absent: nothing). A pure function of these and the settings: whoever prepares the batch again gets the
    same bits. The order: raw reward, clipped, normalised, less the overlong punishment (shaping.py), on the last sampled token, with the scorer's token
    rewards, less the KL where that is in the reward; then advantages. loss_mask: response_mask, without truncated responses where those are masked."""
    algorithm, state = settings.algorithm, state or AdaptiveState.start(settings.algorithm)
    refs = [ref for group in groups for ref in group.rows]
    truncated = [bool(flag) for group in groups for flag in group.truncated_G]
    masks = [row["response_mask"] for row in rows]
    loss_masks = [trained_mask(algorithm.shaping, mask, cut) for mask, cut in zip(masks, truncated, strict=True)]
    moments = Moments.of(clip_rewards(algorithm.shaping, _raw_rewards(rows)))
    statistics = trajectory_pb2.BatchStatistics()
    if algorithm.shaping.normalize == "running":
        statistics.rewards.CopyFrom(trajectory_pb2.Moments(**asdict(moments)))
        moments = state.rewards.merged(moments)
    rewards = _placed_rewards(settings, rows, moments)
    kl = algorithm.kl
    if kl is not None and kl.placement == "reward":
        # The sampler's own logprobs are those of the policy that made the tokens: an unbiased estimate without another pass.
        name, kl_coef = reference_column(kl.reference), state.control.kl_coef
        rewards = [
            penalise_kl(reward, row["rollout_logprobs"], row[name], mask, kl_coef, kl.estimator) for reward, row, mask in zip(rewards, rows, masks, strict=True)
        ]
        estimates = [kl_estimate(row["rollout_logprobs"], row[name], kl.estimator)[mask != 0] for row, mask in zip(rows, masks, strict=True)]
        statistics.kl = float(np.concatenate(estimates).mean())
    columns_needed = {name: [row[name] for row in rows] for name in needs(settings.algorithm.advantage) if all(name in row for row in rows)}
    if "bootstrap_value" in columns_needed:
        columns_needed["bootstrap_value"] = [value * cut for value, cut in zip(columns_needed["bootstrap_value"], truncated, strict=True)]
    batch = ScoredBatch.of_rows(
        gids=[group.gid for group in groups for _ in group.rows],
        rewards=rewards,
        response_masks=masks,
        loss_masks=loss_masks,
        columns=columns_needed,
        components=_components(groups),
        component_weights={name: component.weight for name, component in settings.reward.components.items()},
        greedy_rewards=_greedy_rewards(settings, groups, greedy_rows, moments) if settings.algorithm.wants_greedy_response else None,
    )
    result = estimate(settings.algorithm.advantage, batch)
    advantages = batch.rows(result.advantages_N)
    if algorithm.distillation is not None:
        advantages = _distilled(algorithm.distillation, advantages, rows, loss_masks)
    columns = [{"loss_mask": mask, "advantages": advantage} for mask, advantage in zip(loss_masks, advantages, strict=True)]
    if result.returns_N is not None:
        for column, returns in zip(columns, batch.rows(result.returns_N), strict=True):
            column["returns"] = returns
    train_batch = trajectory_pb2.TrainBatch(
        step=step, rows=refs, gids=[group.gid for group in groups], coefficients=control.coefficients(algorithm, state.control), statistics=statistics
    )
    train_batch.greedy_rows.extend(group.greedy.row for group in groups if group.greedy is not None)
    train_batch.digest = _digest(train_batch, rows, columns)
    return train_batch, columns


def _distilled(section: DistillationSection, advantages: list[Array], rows: Sequence[Mapping[str, Array]], loss_masks: Sequence[Array]) -> list[Array]:
    coef = section.coef if section.placement == "advantage" else 0.0
    sampled, taught = [row["rollout_logprobs"] for row in rows], [row[reference_column(TEACHER)] for row in rows]
    return distil(advantages, sampled, taught, loss_masks, coef=coef, task_coef=section.task_coef)


def _raw_rewards(rows: Sequence[Mapping[str, Array]]) -> Array:
    """float64 [B]."""
    return np.array([float(row["reward"][0]) for row in rows])


def _placed_rewards(settings: RunSettings, rows: Sequence[Mapping[str, Array]], moments: Moments) -> list[Array]:
    """B arrays float32 [T]: shaped, on their tokens."""
    num_tokens_B = np.array([int(row["response_mask"].sum()) for row in rows])
    shaped_B = shape_rewards(settings.algorithm.shaping, _raw_rewards(rows), num_tokens_B, moments, settings.sampling.max_tokens)
    return [place_rewards(float(reward), row["response_mask"], row.get("token_rewards")) for reward, row in zip(shaped_B, rows, strict=True)]


def _components(groups: Sequence[ScoredGroup]) -> dict[str, Array]:
    """float32 [B] by name: the components that every group has."""
    names = set.intersection(*(set(group.components) for group in groups))
    return {name: np.concatenate([group.components[name] for group in groups]) for name in sorted(names)}


def _greedy_rewards(settings: RunSettings, groups: Sequence[ScoredGroup], greedy_rows: Sequence[Mapping[str, Array]], moments: Moments) -> Array:
    """float32 [B]: for each trajectory, all that the greedy response to its prompt earned, shaped as the others'."""
    totals = [rewards_T.sum() for rewards_T in _placed_rewards(settings, greedy_rows, moments)]
    return np.repeat(np.array(totals, np.float32), [len(group.rows) for group in groups])


def _digest(batch: trajectory_pb2.TrainBatch, rows: Sequence[Mapping[str, Array]], columns: Sequence[Mapping[str, Array]]) -> str:
    """Over ids, attempts, order, coefficients and the bits of what is trained on."""
    state = hashlib.blake2b(digest_size=16)
    state.update(f"{batch.coefficients.kl_coef!r} {batch.coefficients.entropy_coef!r}".encode())
    for ref, row, column in zip(batch.rows, rows, columns, strict=True):
        state.update(f"{ref.id}:{ref.token}".encode())
        for name, array in [*sorted(row.items()), *sorted(column.items())]:
            state.update(name.encode())
            state.update(array.tobytes())
    return state.hexdigest()
