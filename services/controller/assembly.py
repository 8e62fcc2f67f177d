"""From scored groups to a train batch: which groups are ready, which are filtered, what is written to the rows of a batch before it is sealed.

Owns the groups between their commit and their seal. The choice of groups is admission.py's, the numbers are rolecall/algorithms'.
"""

import asyncio
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rolecall.algorithms.advantages import ScoredBatch, estimate, needs
from rolecall.algorithms.shaping import penalise_kl, place_rewards
from rolecall.settings import RunSettings
from rolecall.trajectory import reference_column
from rolecall.v1 import trajectory_pb2
from rolecall.wire import Array
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
    columns += needs(settings.algorithm.advantage)
    if settings.algorithm.kl is not None and settings.algorithm.kl.placement == "reward":
        columns.append(reference_column(settings.algorithm.kl.reference))
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
) -> tuple[trajectory_pb2.TrainBatch, list[dict[str, Array]]]:
    """The batch to seal, and for each row the columns to write: loss_mask, advantages and, for a critic, returns.

    `rows` are the groups' rows in order, with `columns_read`; `greedy_rows` those of their greedy responses, with GREEDY_COLUMNS, where the estimator
    wants them."""
    refs = [ref for group in groups for ref in group.rows]
    masks = [row["response_mask"] for row in rows]
    rewards = [place_rewards(float(row["reward"][0]), row["response_mask"], row.get("token_rewards")) for row in rows]
    kl = settings.algorithm.kl
    if kl is not None and kl.placement == "reward":
        # The sampler's own logprobs are those of the policy that made the tokens: an unbiased estimate without another pass.
        name = reference_column(kl.reference)
        rewards = [
            penalise_kl(reward, row["rollout_logprobs"], row[name], mask, kl.kl_coef, kl.estimator)
            for reward, row, mask in zip(rewards, rows, masks, strict=True)
        ]
    truncated = [flag for group in groups for flag in group.truncated_G]
    columns_needed = {name: [row[name] for row in rows] for name in needs(settings.algorithm.advantage)}
    if "bootstrap_value" in columns_needed:
        columns_needed["bootstrap_value"] = [value * cut for value, cut in zip(columns_needed["bootstrap_value"], truncated, strict=True)]
    batch = ScoredBatch(
        gids=[group.gid for group in groups for _ in group.rows],
        rewards=rewards,
        response_masks=masks,
        loss_masks=masks,
        columns=columns_needed,
        greedy_rewards=_greedy_rewards(groups, greedy_rows) if settings.algorithm.wants_greedy_response else None,
    )
    result = estimate(settings.algorithm.advantage, batch)
    columns = [{"loss_mask": mask, "advantages": advantage} for mask, advantage in zip(masks, result.advantages, strict=True)]
    if result.returns is not None:
        for column, returns in zip(columns, result.returns, strict=True):
            column["returns"] = returns
    train_batch = trajectory_pb2.TrainBatch(step=step, rows=refs, gids=[group.gid for group in groups], coefficients=coefficients(settings))
    train_batch.greedy_rows.extend(group.greedy.row for group in groups if group.greedy is not None)
    train_batch.digest = _digest(refs, rows, columns)
    return train_batch, columns


def _greedy_rewards(groups: Sequence[ScoredGroup], greedy_rows: Sequence[Mapping[str, Array]]) -> Array:
    """float32 [B]: for each trajectory, all that the greedy response to its prompt earned."""
    totals = [place_rewards(float(row["reward"][0]), row["response_mask"], row.get("token_rewards")).sum() for row in greedy_rows]
    return np.repeat(np.array(totals, np.float32), [len(group.rows) for group in groups])


def coefficients(settings: RunSettings) -> trajectory_pb2.Coefficients:
    """The loss's coefficients as configured."""
    kl, entropy = settings.algorithm.kl, settings.algorithm.entropy
    return trajectory_pb2.Coefficients(kl_coef=kl.kl_coef if kl else 0.0, entropy_coef=entropy.entropy_coef if entropy else 0.0)


def _digest(refs: Sequence[trajectory_pb2.RowRef], rows: Sequence[Mapping[str, Array]], columns: Sequence[Mapping[str, Array]]) -> str:
    """Over ids, attempts, order and the bits of what is trained on."""
    state = hashlib.blake2b(digest_size=16)
    for ref, row, column in zip(refs, rows, columns, strict=True):
        state.update(f"{ref.id}:{ref.token}".encode())
        for name, array in [*sorted(row.items()), *sorted(column.items())]:
            state.update(name.encode())
            state.update(array.tobytes())
    return state.hexdigest()
