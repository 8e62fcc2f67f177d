"""The commits of a run's checkpoints, of which one is under way at a time, whatever life of the loop made it.

A storage that hangs in one holds up the steps for a trainer's deadline, and the commits after it for as long as it
hangs. Owns no decision when, and nothing of what is written.
"""

import asyncio
import time
from collections.abc import Sequence

from rolecall.checkpoint.manifest import Attempt, StoredFile
from rolecall.errors import SaveHangsError
from services.controller.durable.run_point import Checkpoints, RunPoint
from services.controller.threads import StoreThreads


class Commits:
    """One per run, used on the event loop."""

    def __init__(self, checkpoints: Checkpoints, threads: StoreThreads, timeout_s: float) -> None:
        """`timeout_s`: actor.train_timeout_s; a commit that takes longer is waited for no more, and goes on."""
        self._checkpoints = checkpoints
        self._threads = threads
        self._timeout_s = timeout_s
        self._last: asyncio.Task[None] | None = None
        self._attempt: Attempt | None = None
        self._begun_at = 0.0

    async def over(self) -> None:
        """Returns when none is under way. SaveHangsError once one has taken longer than the deadline."""
        if self._last is None or self._attempt is None or self._last.done():
            return
        await asyncio.wait({self._last}, timeout=max(0.0, self._begun_at + self._timeout_s - time.monotonic()))
        if not self._last.done():
            raise SaveHangsError(
                f"the manifest of step {self._attempt.step} is still being written beside {self._attempt.storage.url}, "
                f"after more than actor.train_timeout_s = {self._timeout_s:.0f} s; see to that storage, or raise the "
                "deadline"
            )

    async def make(self, attempt: Attempt, files: Sequence[StoredFile], point: RunPoint) -> None:
        """Makes `attempt`, which was begun when the one before was `over`, a checkpoint. It goes on when its caller
        leaves. SaveHangsError as `over`; else what Checkpoints.commit raises.
        """
        self._attempt, self._begun_at = attempt, time.monotonic()
        self._last = task = asyncio.create_task(self._threads.call(self._checkpoints.commit, attempt, files, point))
        task.add_done_callback(_seen)
        await self.over()
        task.result()


def _seen(task: "asyncio.Task[None]") -> None:
    """A commit that failed with nobody waiting is no unhandled error: what it wrote goes with the next."""
    if not task.cancelled():
        task.exception()
