"""Actor and critic for the machine of steps: the real front, chain and record around weights that are a hash of
everything they were trained on.

Two weights are equal exactly when the same inputs were applied in the same order. A trainer lives in a
`TrainerProcess`, which can be killed at an arrow; controllers reach it through `ProcessStub`, on which an answer can be
lost. Arrows are the instants between two effects at which something may fail.
"""

import hashlib
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

from rolecall.errors import OutOfOrderError, UnavailableError, WorkerLostError
from rolecall.rpc.fence import Fence
from rolecall.store.connection import Connection
from rolecall.store.rows import Rows
from rolecall.store.sealed import read_ctl
from rolecall.telemetry import Metrics
from rolecall.training.serving.calls import TrainerCalls
from rolecall.training.serving.trainer import Progress
from rolecall.v1 import actor_pb2, rollout_pb2, weights_pb2
from rolecall.v1 import training_pb2 as pb
from rolecall.v1.trajectory_pb2 import RowRef, TrainBatch, TrajectoryMeta
from rolecall.wire import encode_tensor
from tests.fixtures_store import DIGEST
from tests.twins.calls import trainer_calls
from tests.twins.trainer import Row, TrainerTwin

T = TypeVar("T", bound=Any)

TRAINED_COLUMNS = (
    "token_ids",
    "response_mask",
    "rollout_logprobs",
    "reward",
    "values",
    "bootstrap_value",
    "loss_mask",
    "advantages",
    "returns",
)
NOTHING = encode_tensor(np.zeros(0, np.float32))
PROBE = weights_pb2.Probe(
    logprobs=encode_tensor(np.zeros(4, np.float32)), decoded_logprobs=NOTHING, prefilled_logprobs=NOTHING
)
"""The same on both sides."""
BASE = "base"
"""Weights before the first step."""


def digest_of_inputs(refs: Sequence[RowRef], rows: Sequence[Row]) -> str:
    """Over the identity, order and bits of what a step reads."""
    state = hashlib.blake2b(digest_size=16)
    for ref, row in zip(refs, rows, strict=True):
        state.update(f"{ref.id}:{ref.token}".encode())
        for name in TRAINED_COLUMNS:
            state.update(row[name].tobytes())
    return state.hexdigest()


def next_weights(weights: str, inputs: str) -> str:
    """Weights one step later."""
    return hashlib.blake2b(f"{weights}/{inputs}".encode(), digest_size=16).hexdigest()


class Arrows:
    """Where something may fail. At most one fault is armed; it strikes once, when its arrow is passed."""

    def __init__(self) -> None:
        self.armed: str | None = None
        self.num_spared = 0
        self.strike: Callable[[], None] = _nothing
        self.passed: list[str] = []

    def arm(self, arrow: str, strike: Callable[[], None], num_spared: int = 0) -> None:
        """`num_spared`: so many times the arrow is passed before the fault strikes."""
        self.armed, self.strike, self.num_spared = arrow, strike, num_spared

    def at(self, arrow: str) -> None:
        """The instant `arrow`: the armed fault strikes here, which may raise."""
        self.passed.append(arrow)
        if arrow != self.armed:
            return
        if self.num_spared:
            self.num_spared -= 1
            return
        self.armed = None
        self.strike()


def _nothing() -> None:
    """Nothing is armed."""


class Killed(Exception):
    """The process that runs this line is gone."""


@dataclass(frozen=True)
class Entry:
    """One applied step."""

    step: int
    digest: str
    inputs: str


class HashTrainer(TrainerTwin):
    """Trainer whose weights are a hash."""

    trains_on = TRAINED_COLUMNS

    def __init__(self, name: str, rows: Rows, arrows: Arrows) -> None:
        super().__init__(rows, self._pass)
        self._name, self._arrows = name, arrows
        self.weights = BASE
        self.log: tuple[Entry, ...] = ()
        """Every step these weights are made of, in the order applied."""
        self.threads: set[threading.Thread] = set()
        """Where it works; gone with its process."""

    def _pass(self, phase: str) -> None:
        self.threads.add(threading.current_thread())
        self._arrows.at(f"{self._name} {phase}")

    def learn(
        self, batch: TrainBatch, rows: Sequence[Row], metas: Sequence[TrajectoryMeta], progress: Progress
    ) -> None:
        super().learn(batch, rows, metas, progress)
        inputs = digest_of_inputs(list(batch.rows), rows)
        self.weights = next_weights(self.weights, inputs)
        self.log = (*self.log, Entry(batch.step, batch.digest, inputs))

    def metrics_of(self, batch: TrainBatch) -> Metrics:
        """What coefficients follow; another number for other weights."""
        metrics = Metrics()
        metrics.mean("actor/reference_kl", int(self.weights[:4], 16) / 2**16, 7)
        metrics.mean("actor/entropy", int(self.weights[4:8], 16) / 2**16, 7)
        return metrics

    def columns_of(self, row: Row) -> Row:
        """The critic's values, which depend on its weights."""
        scale = np.float32(int(self.weights.encode().hex()[:4], 16) / 2**16)
        values = row["response_mask"].astype(np.float32) * scale
        return {"values": values, "bootstrap_value": np.full(1, scale, np.float32)}

    def weights_bytes(self) -> bytes:
        return json.dumps([self.weights, [[entry.step, entry.digest, entry.inputs] for entry in self.log]]).encode()

    def restore_weights(self, data: bytes) -> None:
        self.weights, log = json.loads(data)
        self.log = tuple(Entry(*entry) for entry in log)


@dataclass
class TrainerProcess:
    """A role that ends when killed and comes back as it was before its first step, as the launcher starts it."""

    name: str
    connection: Connection
    run: str
    rows: Rows
    arrows: Arrows
    checkpoints: str
    make_calls: Callable[..., TrainerCalls] = TrainerCalls
    incarnation: int = 0
    all_calls: list[TrainerCalls] = field(default_factory=list)

    def start(self) -> None:
        """A new incarnation; call it on the event loop."""
        self.engine = HashTrainer(self.name, self.rows, self.arrows)
        self.calls = trainer_calls(
            self.engine,
            self.connection,
            self.run,
            Fence(lambda: read_ctl(self.connection, self.run)),
            self.checkpoints,
            worker=f"{self.name}.{self.incarnation}",
            make=self.make_calls,
        )
        self.calls.start()
        self.all_calls.append(self.calls)
        self.incarnation += 1

    def raise_own_fault(self) -> None:
        """An error of this file in a device thread, which no role would survive."""
        failed = self.calls.device_thread.failed
        if failed.done() and not isinstance(failed.exception(), Killed):
            failed.result()

    async def close(self) -> None:
        """Ends every incarnation's threads."""
        for calls in self.all_calls:
            await calls.close()


class ProcessStub:
    """What a controller holds of a `TrainerProcess`: calls break when the process is replaced under them."""

    def __init__(self, process: TrainerProcess) -> None:
        self._process = process

    async def _unary(self, call: Callable[[TrainerCalls], Awaitable[T]], what: str) -> T:
        process, incarnation = self._process, self._process.incarnation
        process.arrows.at(f"{what} sent to {process.name}")
        try:
            answer = await call(process.calls)
        except Exception as error:
            self._raise_lost(incarnation, error)
            raise
        self._raise_lost(incarnation, None)
        process.arrows.at(f"{what} answered by {process.name}")
        return answer

    def _raise_lost(self, incarnation: int, error: Exception | None) -> None:
        if self._process.incarnation != incarnation or isinstance(error, Killed):
            raise WorkerLostError(f"{self._process.name} was killed") from error

    async def GetInfo(self, request: pb.GetTrainerInfoRequest, timeout: float) -> pb.GetTrainerInfoResponse:
        return self._process.calls.info()

    async def _stream(self, call: Callable[[TrainerCalls], AsyncIterator[T]], what: str, last: str) -> AsyncIterator[T]:
        process, incarnation = self._process, self._process.incarnation
        process.arrows.at(f"{what} sent to {process.name}")
        try:
            async for event in call(process.calls):
                self._raise_lost(incarnation, None)
                if event.HasField(last):
                    process.arrows.at(f"{what} answered by {process.name}")
                yield event
        except (Killed, WorkerLostError) as error:
            raise WorkerLostError(f"{process.name} was killed") from error

    def Train(self, request: pb.TrainRequest, timeout: float) -> AsyncIterator[pb.TrainResponse]:
        return self._stream(lambda calls: calls.chain.train(request), "Train", "result")

    async def ComputeValues(self, request: pb.ComputeColumnRequest, timeout: float) -> pb.ComputeColumnResponse:
        return await self._unary(lambda calls: calls.compute(request), "ComputeValues")

    def SaveCheckpoint(
        self, request: pb.SaveTrainerCheckpointRequest, timeout: float
    ) -> AsyncIterator[pb.SaveTrainerCheckpointResponse]:
        return self._stream(lambda calls: calls.save(request), "SaveCheckpoint", "saved")

    async def LoadCheckpoint(
        self, request: pb.LoadTrainerCheckpointRequest, timeout: float
    ) -> pb.LoadTrainerCheckpointResponse:
        return await self._unary(lambda calls: calls.load(request), "LoadCheckpoint")


class ActorStub(ProcessStub):
    """The actor's, which is asked to publish, too. Nothing is sent: the rollout's twin takes any weights."""

    async def OpenWeightChannel(
        self, request: weights_pb2.OpenWeightChannelRequest, timeout: float
    ) -> weights_pb2.OpenWeightChannelResponse:
        return weights_pb2.OpenWeightChannelResponse()

    async def PublishWeights(
        self, request: actor_pb2.PublishWeightsRequest, timeout: float
    ) -> actor_pb2.PublishWeightsResponse:
        self._process.arrows.at("publish is begun")
        applied = self._process.engine.applied.step
        if applied != request.step:
            raise OutOfOrderError(f"the actor stands at step {applied}, not {request.step}")
        return actor_pb2.PublishWeightsResponse(digest=DIGEST, probe=PROBE)


class RolloutStub:
    """What a controller holds of a rollout that takes any weights and serves them."""

    async def JoinWeightChannel(
        self, request: weights_pb2.JoinWeightChannelRequest, timeout: float
    ) -> weights_pb2.JoinWeightChannelResponse:
        return weights_pb2.JoinWeightChannelResponse()

    async def ReceiveWeights(
        self, request: rollout_pb2.ReceiveWeightsRequest, timeout: float
    ) -> rollout_pb2.ReceiveWeightsResponse:
        return rollout_pb2.ReceiveWeightsResponse(digest=DIGEST, probe=PROBE)

    async def Resume(self, request: rollout_pb2.ResumeRequest, timeout: float) -> rollout_pb2.ResumeResponse:
        return rollout_pb2.ResumeResponse()

    async def GetInfo(
        self, request: rollout_pb2.GetRolloutInfoRequest, timeout: float
    ) -> rollout_pb2.GetRolloutInfoResponse:
        return rollout_pb2.GetRolloutInfoResponse()


def cut_connection() -> None:
    """A fault: the call's answer is lost, its process goes on."""
    raise UnavailableError("the connection was cut")
