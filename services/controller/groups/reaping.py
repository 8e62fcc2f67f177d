"""The return of abandoned groups: what its worker no longer renews goes to another one, and what no worker ever
finishes becomes a dead letter.

Owns how often a group may be given away and how many dead letters a run may have. Whether a lease has expired is
leases.py's.
"""

import asyncio
import logging
from collections.abc import Iterable

from rolecall.errors import BudgetSpentError
from rolecall.settings import ControllerSection
from rolecall.store.ledger import Ledger
from rolecall.store.position import Overdelivered
from services.controller.groups.collection import Collection
from services.controller.groups.failures import FailureBudget, RunEnd
from services.controller.groups.leases import LOOKS_PER_LEASE, Leases
from services.controller.threads import StoreThreads

logger = logging.getLogger(__name__)


class Reaper:
    """The return of abandoned groups in one life of the loop. Used from one event loop."""

    def __init__(
        self,
        settings: ControllerSection,
        ledger: Ledger,
        threads: StoreThreads,
        collection: Collection,
        end: RunEnd,
        failed: Iterable[int] = (),
    ) -> None:
        """`end` is called when there are too many dead letters; `failed`: the gids of those before."""
        self._settings = settings
        self._ledger = ledger
        self._threads = threads
        self._collection = collection
        self._end = end
        self._dead_letters = FailureBudget(settings.max_dead_letters, settings.failure_window, failed)
        """Groups that no worker ever finished."""

    async def run(self) -> None:
        """Gives unrenewed groups to others, and drops those that were delivered too often. Runs until cancelled."""
        lease_s = self._settings.lease_s
        leases, error = Leases(lease_s, asyncio.get_running_loop().time), f"not renewed for {lease_s:g} s"
        while True:
            expired = leases.expired(await self._threads.call(self._ledger.pending))
            for entry in expired:
                logger.warning(
                    "entry %s of %s was %s; another rollout gets its group", entry.entry_id, entry.consumer, error
                )
            for group in await self._threads.call(self._ledger.reap, expired, self._settings.max_deliveries, error):
                await self._bury(group)
            await asyncio.sleep(lease_s / LOOKS_PER_LEASE)

    async def _bury(self, group: Overdelivered) -> None:
        logger.error(
            "group %d failed or lost its rollout too often and is dropped; the last: %s", group.gid, group.error
        )
        error = (
            f"given to a rollout too often (controller.max_deliveries {self._settings.max_deliveries}) and "
            f"never committed; the last: {group.error}"
        )
        await self._collection.drop(group.gid, (), "over_delivered", error)
        if self._dead_letters.spend(group.gid):
            self._end.call(
                BudgetSpentError(
                    f"more than controller.max_dead_letters = {self._settings.max_dead_letters} of "
                    f"{self._settings.failure_window} groups "
                    "killed or failed every rollout they were given to; the last is "
                    f"group {group.gid}: {group.error}"
                )
            )
