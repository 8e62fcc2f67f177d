"""Checkpoints made beside the steps: the trainers' snapshots and the ledger at a step boundary, then files, then the
manifest, then rows are freed.

The steps wait for the snapshots alone. One checkpoint is in flight at a time: the next waits until it is committed or
given up. Owns no decision when.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable, Sequence

from rolecall.checkpoint.manifest import Attempt, StoredFile
from rolecall.errors import DiskFullError, RoleCallError, SaveHangsError, StorageUnavailableError
from services.controller.durable.commits import Commits
from services.controller.durable.run_point import Checkpoints, RunPoint
from services.controller.step.trainers import Trainer
from services.controller.tasks import at_once
from services.controller.threads import StoreThreads

logger = logging.getLogger(__name__)

NO_ROOM = (DiskFullError, StorageUnavailableError)
"""What costs a checkpoint and not the run."""


class CheckpointSaver:
    """Saves checkpoints beside the steps of one loop."""

    def __init__(
        self,
        trainers: Sequence[Trainer],
        checkpoints: Checkpoints,
        commits: Commits,
        threads: StoreThreads,
        saved_step: int,
    ) -> None:
        self._trainers = trainers
        self._checkpoints = checkpoints
        self._commits = commits
        self._threads = threads
        self.saved_step = saved_step
        """Steps that the newest committed checkpoint covers; 0 when there is none."""
        self.step = saved_step
        """Steps that it, or the one in flight, covers."""
        self._task: asyncio.Task[None] | None = None

    @property
    def is_in_flight(self) -> bool:
        """Whether one is being written."""
        return self._task is not None and not self._task.done()

    async def begin(
        self,
        ctl: int,
        step: int,
        point: Callable[[], Awaitable[RunPoint]],
        committed: Callable[[str], Awaitable[None]],
        given_up: Callable[[], None],
    ) -> None:
        """Returns when every trainer's state of `step` is taken and so is the `point`. Once all is written and the
        manifest with it, `committed` is called with its folder; `given_up`, when that failed. Raises what finish
        raises, of the one before, and what the trainers raise.
        """
        await self.finish()
        started = time.monotonic()
        try:
            await self._commits.over()  # of an earlier life: it deletes what other attempts at its step have written
            attempt = self._checkpoints.begin(step)
        except BaseException:
            given_up()
            raise
        taken = [asyncio.Event() for _ in self._trainers]
        shares = asyncio.create_task(self._shares(ctl, attempt, taken))
        try:
            await self._taken(taken, shares)
            state = await point()
        except BaseException as error:
            given_up()
            await self._give_up(attempt, shares, error)
            raise
        logger.info("checkpoint of step %d: state taken in %.1f s", step, time.monotonic() - started)
        self.step = step
        self._task = asyncio.create_task(self._commit(attempt, shares, state, committed, given_up))

    async def finish(self) -> None:
        """Waits for the one in flight. Raises what it failed with: NO_ROOM, or the error of a role."""
        if self._task is not None:
            task = self._task
            await asyncio.wait({task})  # bounded: by the deadlines of the trainers' calls and of the commit
            self._task = None
            task.result()

    async def raise_if_failed(self) -> None:
        """Raises what `finish` would raise, without waiting."""
        if not self.is_in_flight:
            await self.finish()

    async def cancel(self) -> None:
        """Gives up the one in flight, if any: the loop is abandoned. A commit that a thread has begun goes on and makes
        it a checkpoint; else what it has written goes with the next commit.
        """
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})  # bounded: it is cancelled
            self._task = None

    async def _shares(self, ctl: int, attempt: Attempt, taken: Sequence[asyncio.Event]) -> list[StoredFile]:
        saved = await at_once(
            [
                trainer.save(ctl, attempt.storage.at(trainer.name).url, attempt.step, event.set)
                for trainer, event in zip(self._trainers, taken, strict=True)
            ]
        )
        return [file for files in saved for file in files]

    async def _taken(self, taken: Sequence[asyncio.Event], shares: "asyncio.Task[list[StoredFile]]") -> None:
        for event in taken:
            state_taken = asyncio.ensure_future(event.wait())
            try:
                await asyncio.wait(
                    [state_taken, shares], return_when=asyncio.FIRST_COMPLETED
                )  # bounded: by the deadlines of the trainers' calls
            finally:
                state_taken.cancel()
            if shares.done():
                shares.result()

    async def _commit(
        self,
        attempt: Attempt,
        shares: "asyncio.Task[list[StoredFile]]",
        point: RunPoint,
        committed: Callable[[str], Awaitable[None]],
        given_up: Callable[[], None],
    ) -> None:
        started = time.monotonic()
        try:
            files = await shares  # bounded: by the deadlines of the trainers' calls
            await self._commits.make(attempt, files, point)
        except BaseException as error:
            self.step = self.saved_step
            given_up()
            # else the commit may still go on in its thread, and needs the files
            if not isinstance(error, asyncio.CancelledError):
                await self._give_up(attempt, shares, error)
            raise
        self.saved_step = attempt.step
        size = sum(file.num_bytes for file in files)
        logger.info(
            "checkpoint of step %d: %.1f MB written beside the steps in %.1f s",
            attempt.step,
            size / 1e6,
            time.monotonic() - started,
        )
        await committed(attempt.storage.url.rpartition("/")[0])

    async def _give_up(self, attempt: Attempt, shares: "asyncio.Task[list[StoredFile]]", error: BaseException) -> None:
        """Frees the space that was taken, where that is possible. A storage in which a save hangs is left alone, for it
        would not delete either: what is there goes with the next commit.
        """
        shares.cancel()
        await asyncio.wait({shares})  # bounded: it is cancelled
        if isinstance(error, SaveHangsError):
            return
        with contextlib.suppress(RoleCallError, OSError):
            await self._threads.call(self._checkpoints.discard, attempt)
