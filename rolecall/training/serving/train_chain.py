"""The chained, idempotent Train (ARCHITECTURE.md, "Exactly once"): which controller may ask, which step may be applied,
what a repeated call gets, and who listens. No torch, no gRPC.

A step lives in a task of its own. A caller only watches it: when the caller leaves, the step goes on; when it comes
back, it attaches.

    step <  applied   the record is answered (BATCH_MISMATCH when it was made of another batch)
    step == applied   the sealed batch is read, its digest compared, and applied; a second call attaches
    step >  applied   OUT_OF_ORDER

A trainer that goes back to a checkpoint lets go of the step in hand: the run may make it of another batch now.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from rolecall.errors import BatchMismatchError, NotFoundError, OutOfOrderError
from rolecall.rpc.fence import Fence
from rolecall.training.serving.device_thread import DeviceThread
from rolecall.training.serving.profiles import Profiles
from rolecall.training.serving.trainer import Progress, StepApplier
from rolecall.v1.training_pb2 import TrainProgress, TrainRequest, TrainResponse, TrainResult
from rolecall.v1.trajectory_pb2 import TrainBatch

PROGRESS_S = 0.25
"""Seconds between two looks at the progress of a step."""
REPLACED_S = 3.0
"""Longest wait for a sealed batch that the store does not show: three of the looks by which a role finds out that its
server was replaced (rolecall/store/clients.py).
"""


@dataclass
class _Running:
    step: int
    digest: str
    task: asyncio.Task[TrainResult]
    progress: Progress
    num_set_back: int


class TrainChain:
    """The steps of one trainer, in order. Used on the event loop only."""

    def __init__(
        self,
        trainer: StepApplier,
        read_sealed: Callable[[int], TrainBatch],
        device_thread: DeviceThread,
        fence: Fence,
    ) -> None:
        """`read_sealed` blocks and is called in a thread of its own."""
        self._trainer = trainer
        self._read_sealed = read_sealed
        self._device_thread = device_thread
        self._fence = fence
        self.profiles = Profiles()
        """Who wants traces of the next steps."""
        self._running: _Running | None = None
        self._num_set_back = 0
        """How often the trainer went back to a checkpoint: a step that was asked for before is not applied after it."""

    def set_back(self) -> None:
        """Lets go of the step in hand, because the trainer is to go back to a checkpoint: what waits is not applied."""
        self._num_set_back += 1

    async def train(self, request: TrainRequest) -> AsyncIterator[TrainResponse]:
        """Yields progress, then the result. FencedError, OutOfOrderError, BatchMismatchError, RowMissingError, and
        NotFoundError when the step was never sealed.
        """
        await self._fence.check(request.ctl)
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
        if (
            running is not None
            and not running.task.done()
            and (running.step, running.num_set_back) == (request.step, self._num_set_back)
        ):
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
        progress = Progress(self._device_thread.progressed)
        num_set_back = self._num_set_back
        task = asyncio.create_task(self._apply(request, progress, num_set_back))
        task.add_done_callback(_seen)
        self._running = _Running(request.step, request.digest, task, progress, num_set_back)
        return self._running

    async def _apply(self, request: TrainRequest, progress: Progress, num_set_back: int) -> TrainResult:
        batch = await self._sealed(request)

        def in_turn() -> TrainResult:
            if num_set_back != self._num_set_back:
                raise OutOfOrderError(
                    f"step {request.step} of batch {request.digest} was asked for before this trainer went back to a "
                    "checkpoint; ask for what the store holds",
                    step=str(self._trainer.applied.step),
                )
            return self._trainer.train(batch, progress)

        progress.profile = self.profiles.begin()
        result = await self._device_thread.run(in_turn, "training")
        self.profiles.applied(progress.profile)
        return result

    async def _sealed(self, request: TrainRequest) -> TrainBatch:
        """The batch that the controller sealed. A server that was just replaced does not have it and may still answer
        this role: asked again for REPLACED_S.
        """
        deadline = time.monotonic() + REPLACED_S
        while True:
            try:
                batch = await asyncio.to_thread(self._read_sealed, request.step)  # bounded: by the store's retry_s
                if batch.digest == request.digest and batch.step == request.step:
                    return batch
                raise BatchMismatchError(
                    f"step {request.step} is sealed as batch {batch.digest}, not {request.digest}; ask for what the "
                    "store holds"
                )
            except (BatchMismatchError, NotFoundError):
                if time.monotonic() > deadline:
                    raise
            await asyncio.sleep(PROGRESS_S)

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
