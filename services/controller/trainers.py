"""Calls to actor and critic: Train that survives a broken connection, checkpoints of both, replay of batches they missed.

Owns no tensor. A Train call may be repeated at will: it is sealed, chained and idempotent (protocol, rule 2).
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from rolecall.errors import DeadlineError, UnavailableError, WorkerLostError
from rolecall.settings import TrainerSection
from rolecall.v1 import training_pb2, trajectory_pb2
from rolecall.v1.actor_pb2_grpc import ActorServiceStub
from rolecall.v1.critic_pb2_grpc import CriticServiceStub

logger = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.5
"""Pause before a broken Train call is attached again."""

INFO_TIMEOUT_S = 10.0
"""Deadline of GetInfo, which blocks on nothing."""

TrainerStub: TypeAlias = ActorServiceStub | CriticServiceStub


@dataclass(frozen=True)
class Trainer:
    """One trainer: "actor" or "critic"."""

    name: str
    stub: TrainerStub
    section: TrainerSection

    async def info(self) -> training_pb2.GetTrainerInfoResponse:
        """What it holds."""
        return await self.stub.GetInfo(training_pb2.GetTrainerInfoRequest(), timeout=INFO_TIMEOUT_S)

    async def train(self, ctl: int, step: int, digest: str, progress: Callable[[str], None]) -> training_pb2.TrainResult:
        """The record of `step`, applied now or before. WorkerLostError when it stays unreachable until train_timeout_s."""
        request = training_pb2.TrainRequest(ctl=ctl, step=step, digest=digest)
        try:
            async with asyncio.timeout(self.section.train_timeout_s):
                while True:
                    try:
                        return await self._attach(request, progress)
                    except UnavailableError as error:
                        logger.warning("%s is unreachable in step %d, attaching again: %s", self.name, step, error)
                        await asyncio.sleep(RETRY_PAUSE_S)
        except TimeoutError as error:
            raise DeadlineError(f"{self.name} did not finish step {step} within {self.name}.train_timeout_s = {self.section.train_timeout_s:.0f} s") from error

    async def _attach(self, request: training_pb2.TrainRequest, progress: Callable[[str], None]) -> training_pb2.TrainResult:
        async for event in self.stub.Train(request, timeout=self.section.train_timeout_s):
            if event.HasField("result"):
                return event.result
            progress(f"{self.name}: microbatch {event.progress.num_done} of {event.progress.num_total}")
        raise WorkerLostError(f"{self.name} ended step {request.step} without a result")

    async def save(self, ctl: int, path: Path, step: int, *, export_huggingface: bool) -> None:
        """Writes its share of a checkpoint to `path`."""
        request = training_pb2.SaveTrainerCheckpointRequest(ctl=ctl, path=str(path), step=step, export_huggingface=export_huggingface)
        await self.stub.SaveCheckpoint(request, timeout=self.section.train_timeout_s)

    async def load(self, ctl: int, path: Path) -> training_pb2.LoadTrainerCheckpointResponse:
        """Restores it from `path`."""
        return await self.stub.LoadCheckpoint(training_pb2.LoadTrainerCheckpointRequest(ctl=ctl, path=str(path)), timeout=self.section.train_timeout_s)


@dataclass(frozen=True)
class CriticTrainer(Trainer):
    """The critic, which is also asked for values."""

    stub: CriticServiceStub

    async def compute_values(self, ctl: int, rows: list[trajectory_pb2.RowRef]) -> None:
        """Has it write values and bootstrap_value to `rows`."""
        await self.stub.ComputeValues(training_pb2.ComputeColumnRequest(ctl=ctl, rows=rows), timeout=self.section.compute_timeout_s)
