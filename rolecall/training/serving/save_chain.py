"""SaveCheckpoint as its callers see it: a snapshot in the device's turn, then the writing beside it. No torch, no gRPC.

One at a time: the next waits until the last is written. A save lives in a task of its own: when the caller leaves it
goes on, and a caller that comes back with the same folder and step attaches, or gets the answer again.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

from rolecall.checkpoint.manifest import StoredFile
from rolecall.v1.training_pb2 import CheckpointFile, CheckpointFiles, CheckpointSnapshot, SaveTrainerCheckpointResponse

Written: TypeAlias = Future[tuple[StoredFile, ...]]
"""What was written, once it is; fails with DiskFullError or StorageUnavailableError."""


@dataclass
class _Save:
    path: str
    step: int
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    """The snapshot is taken."""
    task: "asyncio.Task[list[CheckpointFile]]" = field(init=False)


class SaveChain:
    """One per trainer, used on the event loop only."""

    def __init__(self) -> None:
        self._last: _Save | None = None

    async def save(
        self, path: str, step: int, begin: Callable[[], Awaitable[Written]]
    ) -> AsyncIterator[SaveTrainerCheckpointResponse]:
        """Yields when the snapshot is taken, by `begin`, and when everything is written. Raises what either raises."""
        save = self._last
        if (
            save is None
            or (save.path, save.step) != (path, step)
            or (save.task.done() and save.task.exception() is not None)
        ):
            previous, save = save, _Save(path, step)
            save.task = asyncio.create_task(self._do(save, begin, previous))
            save.task.add_done_callback(_seen)
            self._last = save
        taken = asyncio.ensure_future(save.taken.wait())
        await asyncio.wait({taken, save.task}, return_when=asyncio.FIRST_COMPLETED)  # bounded: by the caller's deadline
        taken.cancel()
        if save.taken.is_set():
            yield SaveTrainerCheckpointResponse(snapshot=CheckpointSnapshot())
        files = await asyncio.shield(save.task)  # bounded: by the caller's deadline
        yield SaveTrainerCheckpointResponse(saved=CheckpointFiles(files=files))

    async def _do(
        self, save: _Save, begin: Callable[[], Awaitable[Written]], previous: _Save | None
    ) -> list[CheckpointFile]:
        if previous is not None:
            await asyncio.wait({previous.task})  # bounded: by its own writing
        written = await begin()
        save.taken.set()
        files = await asyncio.wrap_future(
            written
        )  # bounded: by the caller's deadline, after which the run goes on without this checkpoint
        return [CheckpointFile(name=file.name, num_bytes=file.num_bytes, checksum=file.checksum) for file in files]

    async def finish(self, timeout_s: float) -> bool:
        """Waits for the save under way, at most `timeout_s`; whether none is left."""
        if self._last is None:
            return True
        _, pending = await asyncio.wait({self._last.task}, timeout=timeout_s)
        return not pending


def _seen(task: "asyncio.Task[list[CheckpointFile]]") -> None:
    """A save that failed with nobody listening is no unhandled error: nobody commits what it wrote."""
    if not task.cancelled():
        task.exception()
