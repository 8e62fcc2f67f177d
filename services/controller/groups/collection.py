"""The collection: every committed group is scored as it lands, and then kept for a batch or dropped.

Owns what is dropped after it was sampled and why: failures of scorers, lost rows, the configured filters with their
budget of a step. What was dropped gives its place back to admission. The choice among the kept is admission.py's, the
rules of the filters are rolecall/algorithms/filters.py's.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Iterable, Sequence

from rolecall.algorithms.filters import REASONS, judged_by, reason_to_drop
from rolecall.columns import ROUTED_EXPERTS
from rolecall.errors import BudgetSpentError, RowMissingError, ScorerError, ScorerUnavailableError
from rolecall.settings import RunSettings
from rolecall.store.history import order
from rolecall.store.ledger import Ledger
from rolecall.store.position import garbage_of
from rolecall.store.rows import Rows
from rolecall.telemetry import attached, tracer
from rolecall.trajectory import rows_of
from rolecall.v1 import trajectory_pb2
from services.controller.board import RunBoard
from services.controller.groups.assembly import Assembly, ScoredGroup
from services.controller.groups.failures import FailureBudget, RunEnd
from services.controller.groups.group_scorer import GroupScorer
from services.controller.groups.intake import Intake
from services.controller.groups.prompts import PromptSequence
from services.controller.tasks import FirstErrorGroup
from services.controller.threads import StoreThreads
from services.controller.together import Together

logger = logging.getLogger(__name__)

READ_BLOCK_S = 0.2
"""Longest blocking read of the trajectories stream: a loop that is abandoned, and a controller that ends, wait for the
one under way.
"""

_OLDER = {
    ROUTED_EXPERTS: ("no_routed_experts", "sampled before actor.router_replay r3, without its experts"),
    "token_rewards": ("no_token_rewards", "scored before algorithm.policy_loss read token_rewards, without them"),
}
"""Columns that nobody can write any more where a group is older than the setting that trains on them: the reason to
drop it, and why.
"""

READ_COUNT = 256
"""Most committed groups taken in one read."""


class Collection:
    """The scoring and sorting of every committed group in one life of the loop. Used from one event loop."""

    def __init__(
        self,
        settings: RunSettings,
        ledger: Ledger,
        rows: Rows,
        threads: StoreThreads,
        scorer: GroupScorer,
        prompts: PromptSequence,
        board: RunBoard,
        assembly: Assembly,
        intake: Intake,
        end: RunEnd,
        sealed: frozenset[int],
        failed: Iterable[int],
        next_gid: int,
    ) -> None:
        """`end` is called when a budget is spent. `sealed`: groups of the batch that an earlier loop sealed, which are
        trained whatever the settings say of them now. `failed`: gids that could not be scored before. `next_gid`: those
        below may have been sampled under other settings.
        """
        self._settings = settings
        self._ledger = ledger
        self._rows = rows
        self._threads = threads
        self._noting = Together(threads, self._note_scored)
        self._scorer = scorer
        self._prompts = prompts
        self._board = board
        self._assembly = assembly
        self._intake = intake
        self._end = end
        self._sealed = sealed
        self._next_gid = next_gid
        self._failures = FailureBudget(settings.reward.max_failed_groups, settings.controller.failure_window, failed)
        """Groups that could not be scored."""
        self._filtered: Counter[str] = Counter()
        """Groups that the filters dropped since the last step, by reason."""
        self._scoring = set[asyncio.Task[None]]()

    @property
    def is_scoring(self) -> bool:
        """Whether some group is being scored and sorted."""
        return bool(self._scoring)

    async def run(self) -> None:
        """Scores every committed group once, from the oldest that is not trained, each beside the others. Runs until
        cancelled.
        """
        position = "0"
        async with FirstErrorGroup() as tasks:  # as many as admission lets live
            while True:
                for entry, group in await self._threads.call(
                    self._ledger.read_committed, position, READ_COUNT, READ_BLOCK_S
                ):
                    position = entry
                    self._board.landed(order(entry))
                    scoring = tasks.create_task(self._score(group))
                    self._scoring.add(scoring)
                    scoring.add_done_callback(self._scoring.discard)

    async def drop(self, gid: int, rows: Sequence[trajectory_pb2.RowRef], reason: str, error: str) -> None:
        """Ends a group untrained, deletes its rows and lets another take its place. `error`: what failed; empty when
        nothing did.
        """
        await self._threads.call(self._ledger.drop, gid, reason, error)
        if rows:
            await self._threads.call(self._ledger.discard, self._rows, garbage_of(gid, rows))
        if error:
            self._board.drop(gid, reason, error)
        self._assembly.dropped(gid)
        self._intake.drop(reason)

    def begin_step(self) -> None:
        """A step was counted: the filters' budget begins anew."""
        self._filtered.clear()

    async def _score(self, group: trajectory_pb2.CommittedGroup) -> None:
        if (
            self._settings.algorithm.wants_greedy_response
            and not group.HasField("greedy_row")
            and group.gid not in self._sealed
        ):
            logger.warning(
                "group %d was sampled for another estimator, without a greedy response; it is dropped", group.gid
            )
            await self.drop(group.gid, rows_of(group), "no_greedy_response", "")
            return
        with attached(group.traceparent), tracer().start_as_current_span("score", attributes={"gid": group.gid}):
            try:
                scored = await self._scored(group)
            except ScorerError as error:
                await self._give_up(group, error)
                return
            except ScorerUnavailableError as error:
                away_s = self._settings.reward.away_timeout_s  # a run that started over would wait as long again
                self._end.call(
                    BudgetSpentError(f"no group was scored for reward.away_timeout_s = {away_s} s; {error.message}")
                )
                return
            except RowMissingError as error:
                if group.gid in self._sealed:  # nothing can take its place
                    raise
                logger.error(
                    "group %d was committed and its rows are gone; it is dropped and another prompt takes its "
                    "place: %s",
                    group.gid,
                    error,
                )
                await self.drop(group.gid, rows_of(group), "row_missing", str(error))
                return
            for column, (reason, why) in _OLDER.items():
                if await self._lacks(group, column):
                    logger.warning("group %d was %s; it is dropped", group.gid, why)
                    await self.drop(group.gid, rows_of(group), reason, "")
                    return
            await self._noting.call((group.gid, float(scored.totals_G.mean())))
            await self._sort(scored)

    async def _lacks(self, group: trajectory_pb2.CommittedGroup, column: str) -> bool:
        """Whether the group is older than the setting that trains on the column of _OLDER."""
        return (
            column in self._settings.columns_trained_on
            and group.gid < self._next_gid
            and group.gid not in self._sealed
            and not await self._threads.call(self._rows.hold, group.rows, column)
        )

    async def _scored(self, group: trajectory_pb2.CommittedGroup) -> ScoredGroup:
        """The group with its scores. A paused run asks its scorer without end, for people may be mending it."""
        while True:
            try:
                return await self._scorer.score(group)
            except ScorerUnavailableError:
                if not self._board.paused:
                    raise

    def _note_scored(self, rewards: Sequence[tuple[int, float]]) -> Sequence[None]:
        self._ledger.note_scored(rewards)
        return [None] * len(rewards)

    async def _give_up(self, group: trajectory_pb2.CommittedGroup, error: ScorerError) -> None:
        logger.warning("group %d is dropped because it cannot be scored: %s", group.gid, error)
        await self.drop(group.gid, rows_of(group), "scorer_error", str(error))
        if self._failures.spend(group.gid):
            self._end.call(
                BudgetSpentError(
                    f"more than reward.max_failed_groups = {self._settings.reward.max_failed_groups} of "
                    f"{self._settings.controller.failure_window} groups "
                    f"could not be scored; the last by the scorer's {error}"
                )
            )

    async def _sort(self, group: ScoredGroup) -> None:
        """Keeps the success rate of the group's prompt, then keeps or drops the group."""
        solved_at, filters = self._settings.reward.solved_at, self._settings.algorithm.filters
        judged = judged_by(filters, group.rewards_G, group.components)
        known = self._prompts.visited(group.prompt_uid, group.gid, float((judged >= solved_at).mean()))
        if known is not None:
            await self._threads.call(self._ledger.rate, group.prompt_uid, known)
        reason = reason_to_drop(
            filters,
            group.rewards_G,
            group.components,
            group.truncated_G,
            group.num_response_tokens_G,
            has_signal=group.has_signal,
            solved_at=solved_at,
        )
        if reason is None or group.gid in self._sealed:
            self._assembly.scored(group)
            return
        self._filtered[reason] += 1
        budget = self._settings.algorithm.max_dropped_per_step
        if self._filtered.total() > budget:
            reasons = self._filtered.most_common()
            counts = ", ".join(f"{count} {name}" for name, count in reasons)
            self._end.call(
                BudgetSpentError(
                    f"filters dropped {self._filtered.total()} groups within a step ({counts}), more than "
                    f"algorithm.filters.max_dropped_per_step = {budget}: {REASONS[reasons[0][0]]}"
                )
            )
        await self.drop(group.gid, group.all_rows, reason, "")
