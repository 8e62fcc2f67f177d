"""Trainers and references without torch: engines for the real servicers, calls and chain, whose weights are a few
numbers or none.

`ColumnTwin` computes a column, `TrainerTwin` also applies whatever steps it is given, and `ActorTwin` also publishes.
What they read, write, learn and send are methods and attributes that a twin with real weights replaces
(tests/chaos/trainer.py, tests/step_rig.py). A test makes them fail by their public attributes.
"""

import json
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from rolecall.checkpoint.manifest import StoredFile, store, verify
from rolecall.checkpoint.storage import Storage, open_storage
from rolecall.errors import DiskFullError, OutOfOrderError, RoleCallError, StaleVersionError
from rolecall.store.rows import Rows
from rolecall.telemetry import Metrics
from rolecall.training.serving.applied import FILE, Applied
from rolecall.training.serving.background import in_background
from rolecall.training.serving.hooks import nothing
from rolecall.training.serving.save_chain import Written
from rolecall.training.serving.trainer import Progress
from rolecall.v1 import actor_pb2, training_pb2, weights_pb2
from rolecall.v1.trajectory_pb2 import RowRef, TrainBatch, TrajectoryMeta
from rolecall.wire import Array, encode_tensor
from services.rollout.scripted import digest_of
from tests.twins.device import TrainerState

Row = Mapping[str, Array]


class ColumnTwin:
    """A ColumnComputer that computes its columns from a row's own."""

    num_parameters = 1
    world_size = 1
    num_slots = 1
    prefixes = ("",)
    reads: tuple[str, ...] = ("response_mask",)
    """The columns that `columns_of` needs."""

    def __init__(self, rows: Rows, at: Callable[[str], None] = lambda phase: None) -> None:
        """`at` is called at every instant at which a fault may strike."""
        self.rows = rows
        self.at = at
        self.columns_asked: list[tuple[int, int]] = []
        """(step, rows) of each computation."""
        self.column_failures: deque[RoleCallError] = deque()
        """Errors that the next computations end with, one each, when their columns are written."""

    def step_held(self) -> int:
        """Returns the step of the weights held."""
        return 0

    def columns_of(self, row: Row) -> Row:
        """Returns what the role writes beside `row`: values of 0.5 at every sampled token."""
        return {"values": row["response_mask"].astype(np.float32) / 2, "bootstrap_value": np.full(1, 0.5, np.float32)}

    def compute(self, rows: Sequence[RowRef], prefix: str) -> frozenset[str]:
        self.columns_asked.append((self.step_held(), len(rows)))
        self.at("compute:start")
        columns = [self.columns_of(row) for row in self.rows.read(rows, self.reads)]
        self.at("compute:computed")
        written = [ref.id for ref, column in zip(rows, columns, strict=True) if self.rows.put([ref], [column])]
        self.at("compute:written")
        if self.column_failures:
            raise self.column_failures.popleft()
        return frozenset(written)

    def move(self, parts: Sequence[training_pb2.StatePart.ValueType], *, to_host: bool) -> None:
        """Has no device to leave."""

    def keep_alive(self) -> None:
        """Does nothing: it has no other rank."""

    def stop(self, over: bool) -> None:
        """Does nothing: it has no other rank."""


class TrainerTwin(ColumnTwin):
    """A Trainer that keeps a record of every applied step, as in a checkpoint."""

    trains_on: tuple[str, ...] = ("token_ids", "advantages", "loss_mask")
    """The columns that a step reads."""

    def __init__(self, rows: Rows, at: Callable[[str], None] = lambda phase: None) -> None:
        super().__init__(rows, at)
        self.state = TrainerState(None)
        """Its place on a device that it shares, if any."""
        self.applied = Applied()
        self.trained: list[str] = []
        """Row ids in the order trained."""
        self.failures: deque[RoleCallError] = deque()
        """Errors that the next steps end with, one each, before they are applied."""
        self.disk_is_full = self.cannot_write = False
        self.may_write = threading.Event()
        """While it is clear, every checkpoint waits between its snapshot and its files."""
        self.may_write.set()

    @property
    def records(self) -> list[training_pb2.TrainResult]:
        """Results of all applied steps, in order."""
        return list(self.applied.records.values())

    def step_held(self) -> int:
        return self.applied.step

    def learn(
        self, batch: TrainBatch, rows: Sequence[Row], metas: Sequence[TrajectoryMeta], progress: Progress
    ) -> None:
        """Changes the weights; there are none."""
        progress.report(1, 1)

    def metrics_of(self, batch: TrainBatch) -> Metrics:
        """Returns what the step says of itself."""
        return Metrics()

    def train(self, batch: TrainBatch, progress: Progress) -> training_pb2.TrainResult:
        if self.failures:
            raise self.failures.popleft()
        self.at("train:start")
        self.state.need()
        rows, metas = self.rows.read_with_meta(list(batch.rows), self.trains_on)
        self.learn(batch, rows, metas, progress)
        self.trained += [ref.id for ref in batch.rows]
        metrics = self.metrics_of(batch).to_proto()
        result = training_pb2.TrainResult(step=batch.step, digest=batch.digest, train_s=0.001, metrics=metrics)
        self.applied = self.applied.after_step(result, 0)
        if progress.profile is not None:
            nothing_to_see = training_pb2.RankTrace(failure="a twin has no operators")
            progress.profile.MergeFrom(training_pb2.StepProfile(step=batch.step, traces=[nothing_to_see]))
        self.at("train:applied")
        return result

    def weights_bytes(self) -> bytes:
        """Returns the weights as a checkpoint holds them."""
        return b""

    def restore_weights(self, data: bytes) -> None:
        """Takes the weights of a checkpoint on."""

    def noted(self, event: str, step: int, weights: bytes) -> None:
        """Called when `weights` of `step` were "saved" to a checkpoint or "loaded" from one."""

    def save(self, path: str) -> Written:
        self.at("save:start")
        if self.disk_is_full:
            raise DiskFullError("no space for a checkpoint")
        self.state.need(training_pb2.STATE_PART_PARAMETERS, training_pb2.STATE_PART_OPTIMIZER)
        step = self.applied.step
        files = {FILE: self.applied.to_json(), "rows.json": json.dumps(self.trained).encode()}
        weights = self.weights_bytes()

        def write() -> tuple[StoredFile, ...]:
            storage = open_storage(path)
            self.at("save:taken")
            self.may_write.wait(60.0)
            if self.cannot_write:
                raise DiskFullError("no space for the files of a checkpoint")
            first = [_store(storage, name, data) for name, data in files.items()]
            self.at("save:middle")
            last = _store(storage, "weights", weights)
            self.noted("saved", step, weights)
            self.at("save:written")
            return *first, last

        return in_background(write, "checkpoint")

    def load(self, path: str, files: Sequence[StoredFile]) -> None:
        self.at("load:start")
        self.state.need()
        storage = open_storage(path)
        verify(storage, files, nothing)
        applied = Applied.read(storage)
        self.trained = json.loads(storage.read("rows.json"))
        self.restore_weights(bytes(storage.read("weights")))
        self.applied = replace(applied, policy_version=max(applied.policy_version, self.applied.policy_version))
        self.noted("loaded", self.applied.step, self.weights_bytes())
        self.at("load:end")

    def move(self, parts: Sequence[training_pb2.StatePart.ValueType], *, to_host: bool) -> None:
        self.at(f"move:{'offload' if to_host else 'onload'}")
        self.state.move(parts, to_host=to_host)
        self.at(f"move:{'offloaded' if to_host else 'onloaded'}")

    def compute(self, rows: Sequence[RowRef], prefix: str) -> frozenset[str]:
        self.state.need(training_pb2.STATE_PART_PARAMETERS)
        return super().compute(rows, prefix)


class ActorTwin(TrainerTwin):
    """A WeightPublishingTrainer whose weights are known by their version, as those of the scripted rollout engine."""

    reads = ("rollout_logprobs", "response_mask")

    lies = False
    """While true, the digest it names is another than the one it sent."""
    all_ranks_send = False

    @property
    def publishes(self) -> list[tuple[int, int]]:
        """(step, version) of each publish, in order."""
        return [(step, version) for version, step in self.applied.published.items()]

    def columns_of(self, row: Row) -> Row:
        """Returns the rollout's logprobs as its own."""
        sum_squared_probs = row["response_mask"].astype(np.float32) / 2
        return {"old_logprobs": row["rollout_logprobs"], "sum_squared_probs": sum_squared_probs}

    def end_before(self, epoch: int) -> None:
        pass

    def open_channel(self, request: weights_pb2.OpenWeightChannelRequest) -> weights_pb2.OpenWeightChannelResponse:
        return weights_pb2.OpenWeightChannelResponse(address="127.0.0.1:1", backend=weights_pb2.WEIGHT_BACKEND_GLOO)

    def publish(self, request: actor_pb2.PublishWeightsRequest) -> actor_pb2.PublishWeightsResponse:
        step = self.applied.step
        if request.step != step:
            raise OutOfOrderError(f"weights of step {request.step} were asked for at step {step}", step=str(step))
        if not self.applied.may_publish(request.policy_version):
            raise StaleVersionError(f"version {request.policy_version} may not be published any more")
        self.state.need(training_pb2.STATE_PART_PARAMETERS)
        self.applied = self.applied.after_publish(request.policy_version)
        return self.send(request)

    def send(self, request: actor_pb2.PublishWeightsRequest) -> actor_pb2.PublishWeightsResponse:
        """Sends nothing; returns what the scripted rollout engine will say of this version."""
        version = request.policy_version
        logprobs = np.full(request.probe.token_ids.shape[0], -(version + 1) / 8, np.float32)
        logprobs[0] = 0
        return actor_pb2.PublishWeightsResponse(
            fingerprints=[weights_pb2.Fingerprint(name="model.weight", value=version)],
            digest="another" if self.lies else digest_of(version),
            probe=weights_pb2.Probe(logprobs=encode_tensor(logprobs), again=encode_tensor(logprobs)),
            num_bytes=8,
            transfer_s=0.001,
        )

    def abort_publish(self, epoch: int, reason: str) -> None:
        """Does nothing: a publish ends at once."""

    def close(self) -> None:
        """Does nothing: there is no channel."""


def _store(storage: Storage, name: str, data: bytes) -> StoredFile:
    return store(storage, name, lambda file: file.write(data))


class CheckingActor(ActorTwin):
    """An actor that compares the rewards it is given with what the responses are worth."""

    trains_on = (*ActorTwin.trains_on, "reward")

    def __init__(self, rows: Rows, worth_of: Callable[[Row, TrajectoryMeta], float]) -> None:
        super().__init__(rows)
        self._worth_of = worth_of
        self.wrong: list[str] = []
        """Ids of responses whose reward was another."""

    def learn(
        self, batch: TrainBatch, rows: Sequence[Row], metas: Sequence[TrajectoryMeta], progress: Progress
    ) -> None:
        for row, meta in zip(rows, metas, strict=True):
            if float(row["reward"][0]) != self._worth_of(row, meta):
                self.wrong.append(meta.id)
        super().learn(batch, rows, metas, progress)
