"""The chained, idempotent Train (ARCHITECTURE.md, "Exactly once"): which step may be applied, what a repeated call
gets, and who listens. No torch, no gRPC.

A step lives in a task of its own. A caller only watches it: when the caller leaves, the step goes on; when it comes
back, it attaches.

    step <  applied   the record is answered (BATCH_MISMATCH when it was made of another batch)
    step == applied   the sealed batch is read, its digest compared, and applied; a second call attaches
    step >  applied   OUT_OF_ORDER
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from rolecall.errors import BatchMismatchError, OutOfOrderError
from rolecall.training.serving.applied import Applied
from rolecall.training.serving.device_thread import Lane
from rolecall.v1.training_pb2 import TrainProgress, TrainRequest, TrainResponse, TrainResult
from rolecall.v1.trajectory_pb2 import TrainBatch

PROGRESS_S = 0.25
"""Seconds between two looks at the progress of a step."""


class Trainer(Protocol):
    """What the chain needs of an engine. `train` blocks and runs in the device thread."""

    @property
    def applied(self) -> Applied:
        """What it has applied; any thread may ask."""

    def train(self, batch: TrainBatch, progress: "Progress") -> TrainResult:
        """Applies `batch`."""


@dataclass
class Progress:
    """Microbatches done of a step: written by the device thread, looked at by the event loop. Torn reads only misreport
    a moment.
    """

    moved: Callable[[], None]
    """Called in the device thread at every report."""
    num_done: int = 0
    num_total: int = 0

    def report(self, num_done: int, num_total: int) -> None:
        """Says how far the step is."""
        self.num_done, self.num_total = num_done, num_total
        self.moved()


@dataclass
class _Running:
    step: int
    digest: str
    task: asyncio.Task[TrainResult]
    progress: Progress


class TrainChain:
    """One per trainer, used on the event loop only."""

    def __init__(self, trainer: Trainer, read_sealed: Callable[[int], TrainBatch], lane: Lane) -> None:
        """`read_sealed` blocks and is called in a thread of its own."""
        self._trainer = trainer
        self._read_sealed = read_sealed
        self._lane = lane
        self._running: _Running | None = None

    async def train(self, request: TrainRequest) -> AsyncIterator[TrainResponse]:
        """Progress, then the result. OutOfOrderError, BatchMismatchError, RowMissingError, NotFoundError when the step
        was never sealed.
        """
        record = self._record(request)
        if record is not None:
            yield TrainResponse(result=record)
            return
        running = self._attach(request)
        while True:
            done, _ = await asyncio.wait({running.task}, timeout=PROGRESS_S)
            if done:
                break
            yield TrainResponse(
                progress=TrainProgress(num_done=running.progress.num_done, num_total=running.progress.num_total)
            )
        yield TrainResponse(result=running.task.result())

    def _record(self, request: TrainRequest) -> TrainResult | None:
        applied = self._trainer.applied
        if request.step >= applied.step:
            return None
        record = applied.records.get(request.step)
        if record is None:
            raise OutOfOrderError(
                f"step {request.step} was applied long ago and its record is gone; the next is {applied.step}",
                step=str(applied.step),
            )
        if record.digest != request.digest:
            raise BatchMismatchError(
                f"step {request.step} was made of batch {record.digest}, not {request.digest}; the ledger and this "
                "trainer differ"
            )
        return record

    def _attach(self, request: TrainRequest) -> _Running:
        applied = self._trainer.applied
        running = self._running
        if running is not None and not running.task.done() and running.step == request.step:
            if running.digest != request.digest:
                raise BatchMismatchError(
                    f"step {request.step} is being made of batch {running.digest}, not {request.digest}; seal a "
                    "step once"
                )
            return running
        if request.step > applied.step:
            raise OutOfOrderError(
                f"step {request.step} cannot be applied at step {applied.step}; train the steps between first",
                step=str(applied.step),
            )
        progress = Progress(self._lane.progressed)
        task = asyncio.create_task(self._apply(request, progress))
        task.add_done_callback(_seen)
        self._running = _Running(request.step, request.digest, task, progress)
        return self._running

    async def _apply(self, request: TrainRequest, progress: Progress) -> TrainResult:
        batch = await asyncio.to_thread(self._read_sealed, request.step)  # bounded: by the store's retry_s
        if batch.digest != request.digest or batch.step != request.step:
            raise BatchMismatchError(
                f"step {request.step} is sealed as batch {batch.digest}, not {request.digest}; ask for what the "
                "store holds"
            )
        return await self._lane.run(lambda: self._trainer.train(batch, progress), "training")

    async def finish(self, timeout_s: float) -> bool:
        """Waits for the step under way, at most `timeout_s`; whether none is left."""
        if self._running is None:
            return True
        _, pending = await asyncio.wait({self._running.task}, timeout=timeout_s)
        return not pending


def _seen(task: "asyncio.Task[TrainResult]") -> None:
    """A step that failed with nobody listening is no unhandled error: the retry gets it again."""
    if not task.cancelled():
        task.exception()
