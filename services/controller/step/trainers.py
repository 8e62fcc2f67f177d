"""Calls to actor and critic: Train that survives a broken connection, checkpoints of both, replay of batches they
missed.

Owns no tensor. A Train call may be repeated at will: it is sealed, chained and idempotent (ARCHITECTURE.md, "Exactly
once").
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, TypeAlias

from rolecall.checkpoint.manifest import Committed, StoredFile
from rolecall.columns import Writer, columns_of
from rolecall.errors import DeadlineError, SaveHangsError, UnavailableError, WorkerLostError
from rolecall.settings import ActorSection
from rolecall.v1 import training_pb2, trajectory_pb2
from rolecall.v1.actor_pb2_grpc import ActorServiceStub
from rolecall.v1.critic_pb2_grpc import CriticServiceStub

logger = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.5
"""Pause before a broken Train call is attached again."""

INFO_TIMEOUT_S = 10.0
"""Deadline of GetInfo, which blocks on nothing."""

MOVE_TIMEOUT_S = 600.0
"""Deadline of one move between a shared device and host memory: 600 GB over a bus that does 1 GB/s."""

TrainerStub: TypeAlias = ActorServiceStub | CriticServiceStub


@dataclass(frozen=True)
class Trainer:
    """A trainer as the controller calls it, named "actor" or "critic"."""

    name: str
    stub: TrainerStub
    section: ActorSection
    """The actor's, whose deadlines are those of every trainer."""

    async def info(self) -> training_pb2.GetTrainerInfoResponse:
        """Asks the trainer what it holds."""
        return await self.stub.GetInfo(training_pb2.GetTrainerInfoRequest(), timeout=INFO_TIMEOUT_S)

    async def train(
        self, ctl: int, step: int, digest: str, progress: Callable[[str], None]
    ) -> training_pb2.TrainResult:
        """The record of `step`, applied now or before. While it cannot be reached it is asked again, until
        train_timeout_s or until the fleet calls it lost.
        """
        request = training_pb2.TrainRequest(ctl=ctl, step=step, digest=digest)
        try:
            async with asyncio.timeout(self.section.train_timeout_s):
                while True:
                    try:
                        return await self._attach(request, progress)
                    except WorkerLostError:
                        raise  # it answered, and what it says is that the step was lost
                    except UnavailableError as error:
                        logger.warning("%s is unreachable in step %d, attaching again: %s", self.name, step, error)
                        await asyncio.sleep(RETRY_PAUSE_S)
        except TimeoutError as error:
            raise DeadlineError(
                f"{self.name} did not finish step {step} within actor.train_timeout_s = "
                f"{self.section.train_timeout_s:.0f} s"
            ) from error

    async def _attach(
        self, request: training_pb2.TrainRequest, progress: Callable[[str], None]
    ) -> training_pb2.TrainResult:
        async for event in self.stub.Train(request, timeout=self.section.train_timeout_s):
            if event.HasField("result"):
                return event.result
            progress(f"{self.name}: microbatch {event.progress.num_done} of {event.progress.num_total}")
        raise WorkerLostError(f"{self.name} ended step {request.step} without a result")

    async def save(self, ctl: int, path: str, step: int, taken: Callable[[], None]) -> list[StoredFile]:
        """Writes its share of a checkpoint to the folder `path`, of this trainer's name; `taken` is called when the
        trainer may go on with other work.

        Returns the files by their names in the checkpoint. SaveHangsError when they are not all written by the
        deadline: then the trainer does what it is asked, and its storage does not.
        """
        request = training_pb2.SaveTrainerCheckpointRequest(ctl=ctl, path=path, step=step)
        is_taken = False
        try:
            async for event in self.stub.SaveCheckpoint(request, timeout=self.section.train_timeout_s):
                if event.HasField("saved"):
                    return [
                        StoredFile(f"{self.name}/{file.name}", file.num_bytes, file.checksum)
                        for file in event.saved.files
                    ]
                is_taken = True
                taken()
        except DeadlineError as error:
            if not is_taken:
                raise
            raise SaveHangsError(
                f"{self.name} has not written its checkpoint of step {step} to {path} within actor.train_timeout_s = "
                f"{self.section.train_timeout_s:.0f} s; see to that storage, or raise the deadline"
            ) from error
        raise WorkerLostError(f"{self.name} ended the checkpoint of step {step} without an answer")

    async def offload(self, ctl: int, *parts: training_pb2.StatePart.ValueType) -> None:
        """Has it move `parts` of its state, all where none is named, to host memory."""
        await self.stub.Offload(training_pb2.OffloadRequest(ctl=ctl, parts=parts), timeout=MOVE_TIMEOUT_S)

    async def onload(self, ctl: int, *parts: training_pb2.StatePart.ValueType) -> None:
        """Has it take them back. DeviceFullError where the device has no room for them."""
        await self.stub.Onload(training_pb2.OnloadRequest(ctl=ctl, parts=parts), timeout=MOVE_TIMEOUT_S)

    async def load(self, ctl: int, checkpoint: Committed) -> training_pb2.LoadTrainerCheckpointResponse:
        """Restores its share of a checkpoint."""
        storage, files = checkpoint.share(self.name)
        named = [
            training_pb2.CheckpointFile(name=file.name, num_bytes=file.num_bytes, checksum=file.checksum)
            for file in files
        ]
        request = training_pb2.LoadTrainerCheckpointRequest(ctl=ctl, path=storage.url, files=named)
        return await self.stub.LoadCheckpoint(request, timeout=self.section.train_timeout_s)


@dataclass(frozen=True)
class ActorTrainer(Trainer):
    """The actor, which is also asked for logprobs."""

    stub: ActorServiceStub
    columns: ClassVar[frozenset[str]] = frozenset(columns_of(Writer.ACTOR))

    async def compute(self, ctl: int, rows: list[trajectory_pb2.RowRef], step: int) -> None:
        """Has it write its columns to `rows`, from the weights after `step` steps; OutOfOrderError when it holds
        others.
        """
        await self.stub.ComputeLogprobs(
            training_pb2.ComputeColumnRequest(ctl=ctl, rows=rows, step=step), timeout=self.section.compute_timeout_s
        )


@dataclass(frozen=True)
class CriticTrainer(Trainer):
    """The critic, which is also asked for values."""

    stub: CriticServiceStub
    columns: ClassVar[frozenset[str]] = frozenset(columns_of(Writer.CRITIC))

    async def compute(self, ctl: int, rows: list[trajectory_pb2.RowRef], step: int) -> None:
        """Has the critic compute values, as ActorTrainer.compute does logprobs."""
        await self.stub.ComputeValues(
            training_pb2.ComputeColumnRequest(ctl=ctl, rows=rows, step=step), timeout=self.section.compute_timeout_s
        )
