"""What the servicers of actor, critic and reference share: fencing, the lane, batched columns and the chained Train, in
terms of proto messages.

Torch-free: it knows an engine by the Protocols below, whose methods block and are called in the lane's thread. It does
not know gRPC either; the servicers own the names of the methods.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Protocol

from rolecall.checkpoint.manifest import StoredFile
from rolecall.errors import InvalidInputError, OutOfOrderError
from rolecall.rpc.fence import Fence
from rolecall.training.serving.applied import Applied
from rolecall.training.serving.column_batcher import ColumnBatcher, Compute
from rolecall.training.serving.device_thread import Lane, T
from rolecall.training.serving.save_chain import SaveChain, Written
from rolecall.training.serving.train_chain import Progress, TrainChain
from rolecall.v1 import training_pb2
from rolecall.v1.trajectory_pb2 import RowRef, TrainBatch

DRAIN_S = 60.0
"""Longest wait for the step under way when the role is asked to stop; a step cut short is applied again after the
restart.
"""


class ColumnEngine(Protocol):
    """Computes the role's column."""

    @property
    def num_parameters(self) -> int:
        """Of the model."""

    @property
    def world_size(self) -> int:
        """Ranks."""

    @property
    def prefixes(self) -> Sequence[str]:
        """Whose columns it computes: "" for the role's own."""

    def compute(self, rows: Sequence[RowRef], prefix: str) -> frozenset[str]:
        """Computes and writes the columns of `rows`, each named once; returns the keys of those that held them before.
        RowMissingError.
        """

    def keep_alive(self) -> None:
        """Shows the other ranks that this one lives."""

    def stop(self) -> None:
        """Lets the other ranks go; the last call."""


class TrainerEngine(ColumnEngine, Protocol):
    """Computes, and has an optimizer. `applied` may be read from any thread."""

    @property
    def applied(self) -> Applied:
        """What was applied."""

    def train(self, batch: TrainBatch, progress: Progress) -> training_pb2.TrainResult:
        """Applies the sealed `batch`. OutOfOrderError, RowMissingError."""

    def save(self, path: str) -> Written:
        """Takes the state, to be written to the folder `path` beside other work. ConfigError."""

    def load(self, path: str, files: Sequence[StoredFile]) -> None:
        """Restores it, after a look at `files`. CheckpointMissingError, CheckpointMismatchError,
        StorageUnavailableError.
        """

    def move(self, parts: Sequence[training_pb2.StatePart.ValueType], *, to_host: bool) -> None:
        """Moves these parts of the state, all where none is named, to host memory or back; idempotent.
        InvalidInputError for a part there is not.
        """


class ColumnFront:
    """Serves one column."""

    def __init__(self, engine: ColumnEngine, lane: Lane, fence: Fence, token_budget: int) -> None:
        self._engine = engine
        self.lane = lane
        self.fence = fence
        self._batchers = {prefix: ColumnBatcher(self._computing(prefix), token_budget) for prefix in engine.prefixes}

    def _computing(self, prefix: str) -> Compute:
        async def in_lane(rows: Sequence[RowRef]) -> frozenset[str]:
            return await self.lane.run(lambda: self._engine.compute(rows, prefix), "computing")

        return in_lane

    def start(self) -> None:
        """Starts serving calls."""
        if self._engine.world_size > 1:
            self.lane.start_keep_alive(self._engine.keep_alive)
        for batcher in self._batchers.values():
            batcher.start()

    async def compute(self, request: training_pb2.ComputeColumnRequest) -> training_pb2.ComputeColumnResponse:
        """Waits until the column is in the rows. FencedError, RowMissingError, ExhaustedError; InvalidInputError for a
        prefix that is not the engine's.
        """
        self.fence.check(request.ctl)
        if request.prefix not in self._batchers:
            raise InvalidInputError(
                f"prefix {request.prefix!r} is not among those this role writes under ({sorted(self._batchers)}); "
                "its settings differ"
            )
        return await self._batchers[request.prefix].compute(request.rows)

    async def drain(self) -> None:
        """Lets what is under way finish; nothing, for a column."""

    async def close(self) -> None:
        """Stops serving and lets the other ranks go."""
        for batcher in self._batchers.values():
            await batcher.close()
        await self.lane.close(self._engine.stop)


class TrainerFront(ColumnFront):
    """Serves a column and the chain of steps."""

    def __init__(
        self,
        engine: TrainerEngine,
        read_sealed: Callable[[int], TrainBatch],
        lane: Lane,
        fence: Fence,
        token_budget: int,
        worker: str,
    ) -> None:
        """`read_sealed(step)` blocks; `worker` is "<worker>.<incarnation>"."""
        super().__init__(engine, lane, fence, token_budget)
        self._trainer = engine
        self._worker = worker
        self._chain = TrainChain(engine, read_sealed, lane)
        self._saves = SaveChain()

    async def compute(self, request: training_pb2.ComputeColumnRequest) -> training_pb2.ComputeColumnResponse:
        """As ColumnFront.compute, with the weights of the step that is named: OutOfOrderError when others are held."""
        applied = self._trainer.applied.step
        if request.HasField("step") and request.step != applied:
            raise OutOfOrderError(
                f"a column was asked for at step {request.step}; the weights held are of step {applied}",
                step=str(applied),
            )
        return await super().compute(request)

    async def train(self, request: training_pb2.TrainRequest) -> AsyncIterator[training_pb2.TrainResponse]:
        """Progress, then the result. FencedError, and TrainChain.train's."""
        self.fence.check(request.ctl)
        async for response in self._chain.train(request):
            yield response

    async def save(
        self, request: training_pb2.SaveTrainerCheckpointRequest
    ) -> AsyncIterator[training_pb2.SaveTrainerCheckpointResponse]:
        """Saves exactly the named step. FencedError, OutOfOrderError, DiskFullError, StorageUnavailableError."""
        self.fence.check(request.ctl)

        async def begin() -> Written:
            return await self._in_turn(request.ctl, lambda: self._save(request.step, request.path), "saving")

        async for response in self._saves.save(request.path, request.step, begin):
            yield response

    async def _in_turn(self, ctl: int, work: Callable[[], T], phase: str) -> T:
        """`work` for the controller `ctl`, which may have been replaced while this waited for the device: FencedError
        then, and nothing is done.
        """

        def fenced() -> T:
            self.fence.check(ctl)
            return work()

        return await self.lane.run(fenced, phase)

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
        """Restores. FencedError, CheckpointMissingError, CheckpointMismatchError, StorageUnavailableError."""
        self.fence.check(request.ctl)
        files = [StoredFile(file.name, file.num_bytes, file.checksum) for file in request.files]
        await self._in_turn(request.ctl, lambda: self._trainer.load(request.path, files), "loading")
        applied = self._trainer.applied
        return training_pb2.LoadTrainerCheckpointResponse(step=applied.step, policy_version=applied.policy_version)

    async def offload(self, request: training_pb2.OffloadRequest) -> training_pb2.OffloadResponse:
        """Moves state to host memory. FencedError, InvalidInputError."""
        self.fence.check(request.ctl)
        await self._in_turn(request.ctl, lambda: self._trainer.move(request.parts, to_host=True), "offloading")
        return training_pb2.OffloadResponse()

    async def onload(self, request: training_pb2.OnloadRequest) -> training_pb2.OnloadResponse:
        """Moves state back. FencedError, InvalidInputError."""
        self.fence.check(request.ctl)
        await self._in_turn(request.ctl, lambda: self._trainer.move(request.parts, to_host=False), "onloading")
        return training_pb2.OnloadResponse()

    def info(self) -> training_pb2.GetTrainerInfoResponse:
        """What the trainer is now."""
        applied, engine = self._trainer.applied, self._trainer
        return training_pb2.GetTrainerInfoResponse(
            worker=self._worker,
            step=applied.step,
            policy_version=applied.policy_version,
            world_size=engine.world_size,
            num_parameters=engine.num_parameters,
            last_result=applied.last_result(),
        )

    async def drain(self) -> None:
        """Lets the step and the save under way finish, at most DRAIN_S."""
        await asyncio.gather(self._chain.finish(DRAIN_S), self._saves.finish(DRAIN_S))
