"""What the servicers of actor, critic and reference share: fencing, the lane, batched columns and the chained Train, in terms of proto messages.

Torch-free: it knows an engine by the Protocols below, whose methods block and are called in the lane's thread. It does not know gRPC either; the
servicers own the names of the methods.
"""

from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Protocol

from rolecall.errors import OutOfOrderError
from rolecall.training.applied import Applied
from rolecall.training.batching import ColumnBatcher
from rolecall.training.chain import Progress, TrainChain
from rolecall.training.fence import Fence
from rolecall.training.lane import Lane
from rolecall.v1 import training_pb2
from rolecall.v1.trajectory_pb2 import RowRef, TrainBatch

DRAIN_S = 60.0
"""Longest wait for the step under way when the role is asked to stop; a step cut short is applied again after the restart."""


class ColumnEngine(Protocol):
    """Computes the role's column."""

    @property
    def num_parameters(self) -> int:
        """Of the model."""

    @property
    def world_size(self) -> int:
        """Ranks."""

    def compute(self, rows: Sequence[RowRef]) -> frozenset[str]:
        """Computes and writes the column of `rows`, each named once; returns the keys of those that held it before. RowMissingError."""

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

    def save(self, path: Path, export_huggingface: bool) -> int:
        """Writes a checkpoint and returns its bytes. DiskFullError."""

    def load(self, path: Path) -> None:
        """Restores one. CheckpointMissingError, CheckpointMismatchError."""

    def move(self, *, to_host: bool) -> None:
        """Moves the state to host memory or back; idempotent."""


class ColumnFront:
    """Serves one column."""

    def __init__(self, engine: ColumnEngine, lane: Lane, fence: Fence, token_budget: int) -> None:
        self._engine = engine
        self.lane = lane
        self.fence = fence
        self._batcher = ColumnBatcher(self._in_lane, token_budget)

    async def _in_lane(self, rows: Sequence[RowRef]) -> frozenset[str]:
        return await self.lane.run(lambda: self._engine.compute(rows), "computing")

    def start(self) -> None:
        """Starts serving calls."""
        if self._engine.world_size > 1:
            self.lane.start_keep_alive(self._engine.keep_alive)
        self._batcher.start()

    async def compute(self, request: training_pb2.ComputeColumnRequest) -> training_pb2.ComputeColumnResponse:
        """Waits until the column is in the rows. FencedError, RowMissingError, ExhaustedError."""
        self.fence.check(request.ctl)
        return await self._batcher.compute(request.rows)

    async def drain(self) -> None:
        """Lets what is under way finish; nothing, for a column."""

    async def close(self) -> None:
        """Stops serving and lets the other ranks go."""
        await self._batcher.close()
        await self.lane.close(self._engine.stop)


class TrainerFront(ColumnFront):
    """Serves a column and the chain of steps."""

    def __init__(self, engine: TrainerEngine, read_sealed: Callable[[int], TrainBatch], lane: Lane, fence: Fence, token_budget: int, worker: str) -> None:
        """`read_sealed(step)` blocks; `worker` is "<worker>.<incarnation>"."""
        super().__init__(engine, lane, fence, token_budget)
        self._trainer = engine
        self._worker = worker
        self._chain = TrainChain(engine, read_sealed, lane)

    async def train(self, request: training_pb2.TrainRequest) -> AsyncIterator[training_pb2.TrainResponse]:
        """Progress, then the result. FencedError, and TrainChain.train's."""
        self.fence.check(request.ctl)
        async for response in self._chain.train(request):
            yield response

    async def save(self, request: training_pb2.SaveTrainerCheckpointRequest) -> training_pb2.SaveTrainerCheckpointResponse:
        """Saves exactly the named step. FencedError, OutOfOrderError, DiskFullError."""
        self.fence.check(request.ctl)
        num_bytes = await self.lane.run(lambda: self._save(request.step, Path(request.path), request.export_huggingface), "saving")
        return training_pb2.SaveTrainerCheckpointResponse(num_bytes=num_bytes)

    def _save(self, step: int, path: Path, export_huggingface: bool) -> int:
        applied = self._trainer.applied.step
        if step != applied:
            raise OutOfOrderError(f"a checkpoint of step {step} was asked for at step {applied}; save when exactly {step} are applied", step=str(applied))
        return self._trainer.save(path, export_huggingface)

    async def load(self, request: training_pb2.LoadTrainerCheckpointRequest) -> training_pb2.LoadTrainerCheckpointResponse:
        """Restores. FencedError, CheckpointMissingError, CheckpointMismatchError."""
        self.fence.check(request.ctl)
        await self.lane.run(lambda: self._trainer.load(Path(request.path)), "loading")
        applied = self._trainer.applied
        return training_pb2.LoadTrainerCheckpointResponse(step=applied.step, policy_version=applied.policy_version)

    async def offload(self, request: training_pb2.OffloadRequest) -> training_pb2.OffloadResponse:
        """Moves the state to host memory. FencedError."""
        self.fence.check(request.ctl)
        await self.lane.run(lambda: self._trainer.move(to_host=True), "offloading")
        return training_pb2.OffloadResponse()

    async def onload(self, request: training_pb2.OnloadRequest) -> training_pb2.OnloadResponse:
        """Moves it back. FencedError."""
        self.fence.check(request.ctl)
        await self.lane.run(lambda: self._trainer.move(to_host=False), "onloading")
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
        """Lets the step under way finish, at most DRAIN_S."""
        await self._chain.finish(DRAIN_S)
