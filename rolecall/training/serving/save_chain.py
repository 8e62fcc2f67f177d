"""SaveCheckpoint as its callers see it: a snapshot in the device's turn, then the writing beside it. No torch, no gRPC.

One at a time: the next waits until the last is written, and is refused once that has taken longer than any caller
waits. A save lives in a task of its own: when the caller leaves it goes on, and a caller that comes back with the same
folder and step attaches, or gets the answer again.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TypeAlias

from rolecall.checkpoint.manifest import StoredFile
from rolecall.errors import SaveHangsError
from rolecall.v1.training_pb2 import CheckpointFile, CheckpointFiles, CheckpointSnapshot, SaveTrainerCheckpointResponse

Written: TypeAlias = Future[tuple[StoredFile, ...]]
"""What was written, once it is; fails with DiskFullError or StorageUnavailableError."""


@dataclass
class _Save:
    path: str
    step: int
    taken: asyncio.Event = field(default_factory=asyncio.Event)
    """The snapshot is taken."""
    begun_at: float = 0.0
    """When it was this one's turn, on the monotonic clock."""
    task: "asyncio.Task[list[CheckpointFile]]" = field(init=False)


class SaveChain:
    """One per trainer, used on the event loop only."""

    def __init__(self, timeout_s: float) -> None:
        """`timeout_s`: the deadline of callers; a save that has begun and takes longer is waited for no more."""
        self._timeout_s = timeout_s
        self._last: _Save | None = None
        self._begun: _Save | None = None
        """The last whose turn it was."""

    async def save(
        self, path: str, step: int, begin: Callable[[], Awaitable[Written]]
    ) -> AsyncIterator[SaveTrainerCheckpointResponse]:
        """Yields when the snapshot is taken, by `begin`, and when everything is written. Raises what either raises, and
        SaveHangsError while another save does.
        """
        save = self._last
        if (
            save is None
            or (save.path, save.step) != (path, step)
            or (save.task.done() and save.task.exception() is not None)
        ):
            save = _Save(path, step)
            save.task = asyncio.create_task(self._do(save, begin))
            save.task.add_done_callback(_seen)
            self._last = save
        taken = asyncio.ensure_future(save.taken.wait())
        await asyncio.wait({taken, save.task}, return_when=asyncio.FIRST_COMPLETED)  # bounded: by the caller's deadline
        taken.cancel()
        if save.taken.is_set():
            yield SaveTrainerCheckpointResponse(snapshot=CheckpointSnapshot())
        files = await asyncio.shield(save.task)  # bounded: by the caller's deadline
        yield SaveTrainerCheckpointResponse(saved=CheckpointFiles(files=files))

    async def _do(self, save: _Save, begin: Callable[[], Awaitable[Written]]) -> list[CheckpointFile]:
        while (other := self._begun) is not None and not other.task.done():
            left_s = other.begun_at + self._timeout_s - time.monotonic()
            if left_s <= 0:
                raise SaveHangsError(
                    f"the checkpoint of step {other.step} is still being written to {other.path}, after more than "
                    f"actor.train_timeout_s = {self._timeout_s:.0f} s; see to that storage, or raise the deadline"
                )
            await asyncio.wait({other.task}, timeout=left_s)
        self._begun, save.begun_at = save, time.monotonic()
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
