"""The assembly of a batch: which scored groups are live, and which of them are ready.

Owns the groups between their commit and their seal. The choice of groups is admission.py's, what is written to their
rows preparation.py's.
"""

import asyncio
from collections import Counter
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass

import numpy as np

from rolecall.v1 import trajectory_pb2
from rolecall.wire import Array
from services.controller.groups.admission import AdmissionPolicy


@dataclass(frozen=True)
class GreedyResponse:
    """The response at temperature 0 that a group has beside its G: a baseline, never trained on."""

    row: trajectory_pb2.RowRef
    reward: float
    total: float
    """The reward, and what its tokens earned."""


@dataclass(frozen=True)
class EpisodeEnd:
    """The length of an episode, its calls of tools, what was cut of it, and its end."""

    num_turns: int
    num_tool_calls: int
    num_malformed: int
    """Turns whose calls of tools could not be read."""
    num_cut_observation_tokens: int
    """Tokens left out of the environment's answers before the policy read them."""
    num_images: int
    """Images that the environment showed."""
    ended_by: str
    """"terminated" or "truncated" by the environment, else the budget that was spent: "turns", "tokens", "time",
    "images", "malformed".
    """
    tokens: trajectory_pb2.EpisodeTokens | None = None
    """What came of all that was sampled in it, where an agent called the policy by itself."""


@dataclass(frozen=True)
class ScoredGroup:
    """A committed group with its rewards, as its rows hold them. G rows, C reward components.

    Whoever wants a reward, a component or whether a response was cut off reads it here.
    """

    gid: int
    rows: tuple[trajectory_pb2.RowRef, ...]
    min_policy_version: int
    rewards_G: Array
    """float32 [G]: of each response as a whole; success goes by them."""
    totals_G: Array
    """float32 [G]: these and what single tokens earned, where a scorer rewards those or an environment turns."""
    components: Mapping[str, Array]
    """float32 [G] by name, NaN where a component does not apply to the response."""
    num_response_tokens_G: Array
    """int32 [G]."""
    truncated_G: Array
    """bool [G]."""
    generation_s: float
    """Seconds from claim to the group's last token."""
    landed_at_s: float
    """Monotonic clock of this process when the group was seen committed."""
    scored_at_s: float
    """Time by the same clock when its scores were in its rows."""
    greedy: GreedyResponse | None = None
    """Where the estimator wants one; in none of the arrays above."""
    prompt_uid: str = ""
    """The uid of its prompt."""
    episodes: tuple[EpisodeEnd, ...] = ()
    """The ends of its episodes; empty where its rows are single responses."""
    environment: str = ""
    """Name of the environment that it was played in; empty where its rows are single responses."""
    references: tuple[tuple[str, str], ...] = ()
    """References that are asked once it is in a batch, with the prefix of their columns each."""

    @property
    def has_signal(self) -> bool:
        """Whether its rewards or its totals differ, from one another or from the greedy response's."""
        rewards, totals = list(self.rewards_G), list(self.totals_G)
        if self.greedy is not None:
            rewards.append(np.float32(self.greedy.reward))
            totals.append(np.float32(self.greedy.total))
        return bool(np.ptp(rewards) > 0 or np.ptp(totals) > 0)

    @property
    def all_rows(self) -> list[trajectory_pb2.RowRef]:
        """The rows to delete when it is dropped."""
        return [*self.rows, *([self.greedy.row] if self.greedy else [])]


class Assembly:
    """The live groups and the ready among them. Bounded by admission: never more than (max_staleness + 1) batches."""

    def __init__(self, policy: AdmissionPolicy, live: Mapping[int, int] | None = None) -> None:
        """`live`: the last batch by gid of the groups that live already when the loop goes on."""
        self._policy = policy
        self._live = dict(live or {})
        """Last batch by gid."""
        self._num_live = Counter(self._live.values())
        """Live groups by their last batch."""
        self._ready: dict[int, ScoredGroup] = {}
        self._num_ready = Counter[int]()
        """Ready groups by their last batch."""
        self._changed = asyncio.Event()
        self.num_changes = 0
        """How often a group was scored or dropped."""

    def admitted(self, gid: int, admit_step: int) -> None:
        """A group came to life."""
        self._live[gid] = self._policy.last_batch(admit_step)
        self._num_live[self._live[gid]] += 1

    def dropped(self, gid: int) -> None:
        """A group ended without being trained."""
        self._remove(gid)
        self._note_change()

    def scored(self, group: ScoredGroup) -> None:
        """A live group may be trained."""
        if group.gid not in self._ready:
            self._num_ready[self._live[group.gid]] += 1
        self._ready[group.gid] = group
        self._note_change()

    def trained(self, gids: Sequence[int]) -> None:
        """Groups ended in a batch."""
        for gid in gids:
            self._remove(gid)

    def _remove(self, gid: int) -> None:
        last = self._live.pop(gid, None)
        if last is None:
            return
        _lessen(self._num_live, last)
        if self._ready.pop(gid, None) is not None:
            _lessen(self._num_ready, last)

    @property
    def num_live(self) -> int:
        """Groups neither trained nor dropped."""
        return len(self._live)

    @property
    def num_ready(self) -> int:
        """Groups that could be trained."""
        return len(self._ready)

    async def next_batch(self, batch: int, begun: Collection[int] = (), *, at_rest: bool = False) -> list[ScoredGroup]:
        """The groups of batch number `batch`, oldest first, of which those in `begun` that are live must be; they stay
        live until `trained`. `at_rest`: once all that live are ready.
        """
        while True:
            first = self._live.keys() & set(begun)
            if not (at_rest and len(self._ready) < len(self._live)) and self._may_choose(batch, first):
                gids = self._policy.choose(batch, self._ready.keys(), self._live, first)
                if gids is not None:
                    return [self._ready[gid] for gid in gids]
            await self._change()

    def _may_choose(self, batch: int, begun: Set[int]) -> bool:
        """Whether there is a batch to choose: choosing sorts all groups, and many batches of groups may land before
        there is one.
        """
        counts = Counter(self._live[gid] for gid in begun)
        return begun <= self._ready.keys() and self._policy.may_choose(batch, self._num_ready, self._num_live, counts)

    async def groups(self, gids: Sequence[int]) -> list[ScoredGroup]:
        """Exactly these groups, once all are scored."""
        while not all(gid in self._ready for gid in gids):
            await self._change()
        return [self._ready[gid] for gid in gids]

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()  # bounded: by its caller, the loop, which looks at num_changes

    def _note_change(self) -> None:
        self.num_changes += 1
        self._changed.set()


def _lessen(counts: Counter[int], last: int) -> None:
    """Counts one less; nothing is kept of batches that are over."""
    counts[last] -= 1
    if not counts[last]:
        del counts[last]
