"""The reports of one life of the loop: what a step did goes to the trackers while the next one is under way.

Owns the order: one at a time, each whole before the next begins. What failed in one is raised where the loop meets it
next, and keeps no later one from being made. Of what the numbers say, measures.py.
"""

import asyncio
import logging
from collections.abc import Sequence

from rolecall.errors import DiskFullError, StorageUnavailableError
from rolecall.telemetry import Metrics, export
from services.controller.groups.assembly import ScoredGroup
from services.controller.parts import Parts
from services.controller.samples import samples as samples_of
from services.controller.step import measures

logger = logging.getLogger(__name__)


class Reports:
    """Used from one event loop."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._under_way: asyncio.Task[None] | None = None

    def begin(self, step: int, metrics: Metrics, groups: Sequence[ScoredGroup]) -> None:
        """Reports that `step` steps are applied, of which the last trained `groups`, once the report before is over,
        whatever became of that.
        """
        self._under_way = asyncio.create_task(self._report_after(self._under_way, step, metrics, groups))

    async def over(self) -> None:
        """Returns when none is under way; raises what it failed of, once. A caller that is cancelled leaves it."""
        if self._under_way is not None:
            await asyncio.wait([self._under_way])  # bounded: by measures.INFO_TIMEOUT_S and the store's own deadlines
            ended, self._under_way = self._under_way, None
            ended.result()

    async def settle(self) -> None:
        """Returns when none is under way, whatever became of it: the loop is abandoned, and the step was applied."""
        if self._under_way is not None:
            await asyncio.gather(self._under_way, return_exceptions=True)  # bounded: by what bounds `over`

    async def drain(self) -> None:
        """Moves the ledger's history and dead letters to files, which bounds them in the store."""
        parts, folder = self._parts, self._parts.settings.run.dir
        try:
            await parts.threads.call(parts.ledger.drain, "history", folder / "history.jsonl")
            await parts.threads.call(parts.ledger.drain, "dead", folder / "dead.jsonl")
        except (DiskFullError, StorageUnavailableError) as error:
            logger.warning("the ledger's history stays in the store: %s", error.message)

    async def _report_after(
        self, before: asyncio.Task[None] | None, step: int, metrics: Metrics, groups: Sequence[ScoredGroup]
    ) -> None:
        if before is not None:
            await asyncio.wait([before])  # bounded: as in `over`
        parts = self._parts
        metrics.merge(await measures.of_fleet(parts.fleet))
        samples = samples_of(parts.rows, step, groups, parts.settings.trackers.num_samples_kept)
        await parts.threads.call(parts.trackers.log, step, metrics.values())
        parts.board.told_step = step  # whatever becomes of the store now
        await parts.threads.call(parts.ledger.reported, step)
        await parts.threads.call(parts.trackers.keep_samples, step, samples)
        export(metrics)
        parts.board.applied(step, metrics)
        await self.drain()
