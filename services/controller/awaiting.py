"""The wait for the groups of the next batch: until they are ready, the run has stalled, or it is to end before them.

Owns when waiting is in vain. Which groups make a batch is admission.py's.
"""

import asyncio
import math
from asyncio import FIRST_COMPLETED
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from rolecall.errors import BudgetSpentError
from rolecall.scoring.client import RewardClient
from rolecall.settings import RunSettings
from rolecall.v1 import trajectory_pb2
from services.controller.board import RunBoard
from services.controller.fleet.members import Fleet
from services.controller.groups.assembly import Assembly, ScoredGroup
from services.controller.groups.failures import RunEnd, StallClock
from services.controller.groups.prompts import Cursor
from services.controller.recovered import Recovered

REST_S = 60.0
"""Seconds without sampling and scoring after which a run that was asked to stop ends before its next batch: an
environment is away, or hangs; one that lives answers sooner. The groups are live still when the run is resumed.
"""


@dataclass(frozen=True)
class NextBatch:
    """The groups of the batch to train next."""

    groups: Sequence[ScoredGroup]
    sealed: trajectory_pb2.TrainBatch | None
    """The batch itself, where an earlier loop sealed it."""


@dataclass(frozen=True)
class NextBatches:
    """The batches of one life of the loop, one after another."""

    settings: RunSettings
    recovered: Recovered
    assembly: Assembly
    fleet: Fleet
    board: RunBoard
    reward: RewardClient
    end: RunEnd
    look: Callable[[], Awaitable[None]]
    """Awaited at every look while the groups are not ready."""
    waits_for_room: Callable[[], bool]
    """Whether nothing can move before a checkpoint has freed rows: it is being written, or tried again and again."""
    cursor: Callable[[], Cursor]
    """The place in the sequence of prompts, which moves while admission passes over those that are too long."""
    trouble: Callable[[], str]
    """Why admission waits, where something that is away keeps it; else empty."""
    is_scoring: Callable[[], bool]
    """Whether some group is being scored."""

    async def next(self, step: int) -> NextBatch | None:
        """The batch of `step`: the one sealed by an earlier loop, or the groups that admission.py chooses. None when
        the run is to end before it.
        """
        sealed, begun = None, frozenset[int]()
        if step == self.recovered.position.step:  # a loop seals what comes later itself
            sealed, begun = self.recovered.sealed, self.recovered.begun
        if sealed is not None:
            groups = asyncio.create_task(self.assembly.groups(sealed.gids))
        else:
            # Rollouts that are to leave the devices for this batch, and do not keep what they have begun, end it first.
            at_rest = self.settings.takes_shifts and not self.settings.keeps_over_shifts
            groups = asyncio.create_task(self.assembly.next_batch(step, begun, at_rest=at_rest))
        ending = asyncio.create_task(self.end.wait())
        stall = StallClock(_patience_s(self.settings))
        away = StallClock(self.settings.reward.away_timeout_s or math.inf)
        rest = StallClock(REST_S)
        try:
            while True:
                self._show_what_is_awaited(step)
                await asyncio.wait(
                    [groups, ending] if sealed is None else [groups],
                    timeout=min(stall.look_s, away.look_s, rest.look_s),
                    return_when=FIRST_COMPLETED,
                )
                moves, paused, trouble = self._what_moves(), self.board.paused, self.reward.trouble
                has_stalled = stall.has_stalled(moves, paused=paused or bool(trouble) or self.waits_for_room())
                if away.has_stalled(moves, paused=paused or not trouble) and not groups.done():
                    self.end.call(self._scorer_away(trouble))
                    return None
                if has_stalled and not groups.done():
                    self.end.call(self._stalled(step))
                    return None
                rests = rest.has_stalled(self.assembly.num_changes, paused=self._works()) and not groups.done()
                if sealed is None and (rests or self._ends_now(is_ready=groups.done())):
                    return None
                if groups.done():
                    return NextBatch(groups.result(), sealed)
                await self.look()  # a publish has its own deadlines
        finally:
            groups.cancel()
            ending.cancel()

    def _what_moves(self) -> object:
        """The numbers that change while a batch is on its way: groups end, rollouts sample, or prompts are rendered;
        the longest responses take longer than controller.stall_timeout_s, and so do the prompts that do not fit.
        """
        progress = [(rollout.consumer, rollout.progress) for rollout in self.fleet.rollouts()]
        return self.assembly.num_changes, progress, self.cursor()

    def _works(self) -> bool:
        """Whether groups are sampled or scored, or nobody asked for the end."""
        is_sampling = any(rollout.busy for rollout in self.fleet.rollouts())
        return not self.board.stop_requested or is_sampling or self.is_scoring()

    def _scorer_away(self, trouble: str) -> BudgetSpentError:
        return BudgetSpentError(
            f"no group was scored for reward.away_timeout_s = {self.settings.reward.away_timeout_s:g} s; {trouble}"
        )

    def _stalled(self, step: int) -> BudgetSpentError:
        return BudgetSpentError(
            f"step {step}: no group was finished for {_patience_s(self.settings):.0f} s, "
            "controller.stall_timeout_s and what a scorer and a reference may take; "
            f"{self.assembly.num_live} are live, {self.assembly.num_ready} ready, "
            f"rollouts: {[rollout.consumer + ' ' + rollout.phase for rollout in self.fleet.rollouts()]}"
            + (f"; admission waits: {trouble}" if (trouble := self.trouble()) else "")
        )

    def _ends_now(self, *, is_ready: bool) -> bool:
        """Whether the batch that is awaited is not to be trained any more: a budget is spent, or a stop was asked for
        and nobody samples, or scores what is not ready, or too few groups are left for it: nothing is admitted any
        more, in place of those that filters drop either.
        """
        if self.end.error is not None or not self.board.stop_requested:
            return self.end.error is not None
        asked = set(self.settings.references) - set(self.settings.references_in_shifts)
        is_lost = any(self.fleet.is_lost(name) for name in ("reward", *asked))
        scorer_gone = is_lost or bool(self.reward.trouble and not is_ready)
        too_few = self.assembly.num_live < self.settings.algorithm.groups_per_batch
        return scorer_gone or too_few or not self.fleet.rollouts()

    def _show_what_is_awaited(self, step: int) -> None:
        """Says it to people: a run without rollouts waits for them, not for groups; one whose scorer is away waits for
        that, and admission stands still once the groups that wait with it fill their batches.
        """
        if not self.fleet.rollouts():
            self.board.wait_for("rollouts: none is alive", "waiting_rollouts")
        elif self.waits_for_room():
            self.board.wait_for("a checkpoint: the rows that it covers fill the store", "saving")
        elif self.reward.trouble and not self.board.paused:
            self.board.wait_for(
                f"the scorer, for groups of step {step}; nothing is admitted beyond those that wait for it",
                "waiting_groups",
            )
        else:
            self.board.wait_for(f"groups of step {step}", "waiting_groups")


def _patience_s(settings: RunSettings) -> float:
    """controller.stall_timeout_s beyond the longest that a group may wait for its scorer and references, both of which
    are asked while rollouts have nothing to do.
    """
    return (
        settings.controller.stall_timeout_s
        + settings.reward.timeout_s * settings.reward.max_attempts
        + (settings.actor.compute_timeout_s if settings.references else 0.0)
    )
