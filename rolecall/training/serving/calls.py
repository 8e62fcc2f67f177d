"""The calls that the servicers of actor, critic and reference share, in terms of proto messages: fencing, batched
columns, the chained Train and checkpoints.

Torch-free: it knows a role on its ranks by the Protocols of trainer.py, whose methods block and are called in the
device thread. It does not know gRPC either; the servicers own the names of the methods.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from functools import partial

from rolecall.checkpoint.manifest import StoredFile
from rolecall.checkpoint.storage import require_inside
from rolecall.errors import InvalidInputError, OutOfOrderError
from rolecall.rpc.fence import Fence
from rolecall.training.serving.column_batcher import ColumnBatcher, Compute
from rolecall.training.serving.device_thread import DeviceThread, T
from rolecall.training.serving.save_chain import SaveChain, Written
from rolecall.training.serving.train_chain import TrainChain
from rolecall.training.serving.trainer import ColumnComputer, Trainer
from rolecall.v1 import training_pb2
from rolecall.v1.trajectory_pb2 import RowRef, TrainBatch

DRAIN_S = 60.0
"""Longest wait for the step under way when the role is asked to stop; a step cut short is applied again after the
restart.
"""


class ColumnCalls:
    """The calls of a role that computes columns."""

    def __init__(self, role: ColumnComputer, device_thread: DeviceThread, fence: Fence, token_budget: int) -> None:
        """`token_budget`: tokens that a rank computes at a time; calls are gathered until each has so many."""
        self._role = role
        self.device_thread = device_thread
        self.fence = fence
        budget = token_budget * role.num_slots
        self._batchers = {prefix: ColumnBatcher(self._computing(prefix), budget) for prefix in role.prefixes}

    def _computing(self, prefix: str) -> Compute:
        async def on_device(rows: Sequence[RowRef]) -> frozenset[str]:
            return await self.device_thread.run(lambda: self._role.compute(rows, prefix), "computing")

        return on_device

    def start(self) -> None:
        """Starts serving calls."""
        if self._role.world_size > 1:
            self.device_thread.start_keep_alive(self._role.keep_alive)
        for batcher in self._batchers.values():
            batcher.start()

    async def compute(self, request: training_pb2.ComputeColumnRequest) -> training_pb2.ComputeColumnResponse:
        """Waits until the column is in the rows. FencedError, RowMissingError, ExhaustedError; InvalidInputError for a
        prefix that is not the role's.
        """
        await self.fence.check(request.ctl)
        if request.prefix not in self._batchers:
            raise InvalidInputError(
                f"prefix {request.prefix!r} is not among those this role writes under ({sorted(self._batchers)}); "
                "its settings differ"
            )
        return await self._batchers[request.prefix].compute(request.rows)

    async def offload(self, request: training_pb2.OffloadRequest) -> training_pb2.OffloadResponse:
        """Moves state to host memory. FencedError, InvalidInputError."""
        await self.fence.check(request.ctl)
        await self._in_turn(request.ctl, lambda: self._role.move(request.parts, to_host=True), "offloading")
        return training_pb2.OffloadResponse()

    async def _in_turn(self, ctl: int, work: Callable[[], T], phase: str) -> T:
        """`work` for the controller `ctl`, which may have been replaced while this waited for the device: FencedError
        then, and nothing is done.
        """

        def fenced() -> T:
            self.fence.require(ctl)
            return work()

        return await self.device_thread.run(fenced, phase)

    async def drain(self) -> None:
        """Lets what is under way finish; nothing, for a column."""

    async def close(self, over: bool | None = True) -> None:
        """Stops serving and lets the other ranks go: the run is `over`, or this rank was stopped before. None: it
        failed, and ends with a code that says more than theirs; they see it go.
        """
        for batcher in self._batchers.values():
            await batcher.close()
        await self.device_thread.close(None if over is None else partial(self._role.stop, over))


class TrainerCalls(ColumnCalls):
    """The calls of a role that computes columns and trains."""

    def __init__(
        self,
        trainer: Trainer,
        read_sealed: Callable[[int], TrainBatch],
        device_thread: DeviceThread,
        fence: Fence,
        token_budget: int,
        worker: str,
        checkpoints: str,
        save_timeout_s: float,
    ) -> None:
        """`read_sealed(step)` blocks; `worker` is "<worker>.<incarnation>"; `checkpoints` is the folder or URL below
        which alone checkpoints are written and read; `save_timeout_s` the deadline of those who ask for one.
        """
        super().__init__(trainer, device_thread, fence, token_budget)
        self._trainer = trainer
        self._worker = worker
        self._checkpoints = checkpoints
        self.chain = TrainChain(trainer, read_sealed, device_thread, fence)
        """Serves Train."""
        self._saves = SaveChain(save_timeout_s)

    async def compute(self, request: training_pb2.ComputeColumnRequest) -> training_pb2.ComputeColumnResponse:
        """Computes as ColumnCalls.compute does, with the weights of the step that is named: OutOfOrderError when others
        are held.
        """
        applied = self._trainer.applied.step
        if request.HasField("step") and request.step != applied:
            raise OutOfOrderError(
                f"a column was asked for at step {request.step}; the weights held are of step {applied}",
                step=str(applied),
            )
        return await super().compute(request)

    async def save(
        self, request: training_pb2.SaveTrainerCheckpointRequest
    ) -> AsyncIterator[training_pb2.SaveTrainerCheckpointResponse]:
        """Saves exactly the named step: yields when the snapshot is taken, and when it is written. FencedError,
        InvalidInputError for a path elsewhere, OutOfOrderError, DiskFullError, StorageUnavailableError.
        """
        await self.fence.check(request.ctl)
        await asyncio.to_thread(require_inside, request.path, self._checkpoints, "path")

        async def begin() -> Written:
            return await self._in_turn(request.ctl, lambda: self._save(request.step, request.path), "saving")

        async for response in self._saves.save(request.path, request.step, begin):
            yield response

    def _save(self, step: int, path: str) -> Written:
        applied = self._trainer.applied.step
        if step != applied:
            raise OutOfOrderError(
                f"a checkpoint of step {step} was asked for at step {applied}; save when exactly {step} are applied",
                step=str(applied),
            )
        return self._trainer.save(path)

    async def load(
        self, request: training_pb2.LoadTrainerCheckpointRequest
    ) -> training_pb2.LoadTrainerCheckpointResponse:
        """Restores. FencedError, InvalidInputError for a path elsewhere, CheckpointMissingError,
        CheckpointMismatchError, StorageUnavailableError.
        """
        await self.fence.check(request.ctl)
        await asyncio.to_thread(self._require_inside, request)
        files = [StoredFile(file.name, file.num_bytes, file.checksum) for file in request.files]
        self.chain.set_back()
        await self._in_turn(request.ctl, lambda: self._trainer.load(request.path, files), "loading")
        applied = self._trainer.applied
        return training_pb2.LoadTrainerCheckpointResponse(step=applied.step, policy_version=applied.policy_version)

    def _require_inside(self, request: training_pb2.LoadTrainerCheckpointRequest) -> None:
        require_inside(request.path, self._checkpoints, "path")
        for file in request.files:
            require_inside(f"{request.path.rstrip('/')}/{file.name}", request.path, "files.name")

    async def onload(self, request: training_pb2.OnloadRequest) -> training_pb2.OnloadResponse:
        """Moves state back. FencedError, InvalidInputError."""
        await self.fence.check(request.ctl)
        await self._in_turn(request.ctl, lambda: self._trainer.move(request.parts, to_host=False), "onloading")
        return training_pb2.OnloadResponse()

    async def profile(self, request: training_pb2.ProfileRequest) -> AsyncIterator[training_pb2.ProfileResponse]:
        """Records the next steps and yields each. FencedError, InvalidInputError, ConflictError, UnavailableError."""
        await self.fence.check(request.ctl)
        async for response in self.chain.profiles.record(request):
            yield response

    def info(self) -> training_pb2.GetTrainerInfoResponse:
        """Answers with what the trainer is and has applied."""
        applied = self._trainer.applied
        return training_pb2.GetTrainerInfoResponse(
            worker=self._worker,
            step=applied.step,
            policy_version=applied.policy_version,
            world_size=self._trainer.world_size,
            num_parameters=self._trainer.num_parameters,
            last_result=applied.last_result(),
        )

    async def drain(self) -> None:
        """Lets the step and the save under way finish, at most DRAIN_S; whoever waits for the profile of another step
        is told that none begins.
        """
        await asyncio.gather(self.chain.finish(DRAIN_S), self._saves.finish(DRAIN_S))
        self.chain.profiles.end()
