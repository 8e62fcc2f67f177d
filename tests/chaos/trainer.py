"""The trainers and references of a chaos run: twins with weights (tests/twins/weights.py), which the actor sends over
sockets.

A trainer keeps a journal beside its checkpoints: one line for every step it applies, replays and repeats included,
synced before the step counts. The journal is what the checker believes; nothing in the system reads it.
"""

import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rolecall.columns import reference_column
from rolecall.settings import RunSettings
from rolecall.store.connection import Connection
from rolecall.store.rows import Rows
from rolecall.telemetry import Metrics
from rolecall.training.serving.trainer import Progress
from rolecall.trajectory import seed_of
from rolecall.v1 import actor_pb2, training_pb2, weights_pb2
from rolecall.v1.trajectory_pb2 import RowRef, TrainBatch, TrajectoryMeta
from rolecall.weights.transferred import encode_fingerprints
from rolecall.wire import decode_tensor, encode_tensor
from tests import attestation
from tests.chaos.channel import SocketSender
from tests.chaos.wiring import Hook, checker_connection, wire_of
from tests.twins.device import ReferenceMemory, TrainerState, device_of
from tests.twins.trainer import ActorTwin, ColumnTwin, Row, TrainerTwin
from tests.twins.weights import bits_of, digest_of, fingerprints_of, initial, numbers_of, token_of, trained

NUM_MICROBATCHES = 4
MICROBATCH_S = 0.005
AMNESIA = "amnesia"
"""A file of this name beside the run directory plants a violation: checkpoints are restored without their weights."""


class WeightedColumn(ColumnTwin):
    """A column hashed from the weights' digest and the tokens."""

    reads = ("token_ids", "response_mask")
    column = ""

    def __init__(self, settings: RunSettings, connection: Connection, hook: Hook) -> None:
        super().__init__(Rows(connection, settings.run.name, settings.store.num_shards), hook.at)
        self.weights = initial(settings.run.seed)

    def columns_of(self, row: Row) -> Row:
        numbers = numbers_of(digest_of(self.weights), row["token_ids"].tolist()) * row["response_mask"]
        return {self.column: numbers.astype(np.float32)}


class ChaosReference(WeightedColumn):
    """A reference instance."""

    def __init__(self, settings: RunSettings, connection: Connection, hook: Hook, instance: str) -> None:
        super().__init__(settings, connection, hook)
        self.column = reference_column(instance)
        self._memory = ReferenceMemory(settings, instance)

    def compute(self, rows: Sequence[RowRef], prefix: str) -> frozenset[str]:
        self._memory.need()
        return super().compute(rows, prefix)

    def move(self, parts: Sequence[training_pb2.StatePart.ValueType], *, to_host: bool) -> None:
        self.at("move:offload")
        self._memory.leave()
        self.at("move:offloaded")


class Journal:
    """A file of JSON lines, each synced before `note` returns."""

    def __init__(self, path: Path, incarnation: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")
        self._incarnation = incarnation

    def note(self, event: str, **fields: Any) -> None:
        """Writes one line."""
        self._file.write(json.dumps({"event": event, "incarnation": self._incarnation, **fields}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


class WeightedTrainer(WeightedColumn, TrainerTwin):
    """A trainer whose weights are numbers, and which keeps a journal."""

    def __init__(self, settings: RunSettings, connection: Connection, hook: Hook, incarnation: str) -> None:
        super().__init__(settings, connection, hook)
        self.state = TrainerState(device_of(settings, hook.worker))
        self._amnesia = settings.run.dir.parent / AMNESIA
        self.journal = Journal(settings.run.dir / "journal" / f"{hook.worker}.jsonl", incarnation)
        self.journal.note("started", weights=digest_of(self.weights))

    def learn(
        self, batch: TrainBatch, rows: Sequence[Row], metas: Sequence[TrajectoryMeta], progress: Progress
    ) -> None:
        for index in range(NUM_MICROBATCHES):
            time.sleep(MICROBATCH_S)
            progress.report(index + 1, NUM_MICROBATCHES)
            if index == 1:
                self.at("train:middle")
        coefficients = np.array([batch.coefficients.kl_coef, batch.coefficients.entropy_coef])
        weights = trained(self.weights, [*rows, {"coefficients": coefficients}])
        self.at("train:computed")
        self.journal.note(
            "applied",
            step=batch.step,
            digest=batch.digest,
            rows=[ref.id for ref in batch.rows],
            tokens=[ref.token for ref in batch.rows],
            bits=[bits_of(row) for row in rows],
            before=digest_of(self.weights),
            after=digest_of(weights),
            spans=sorted({(span.policy_version, span.weights_digest) for meta in metas for span in meta.spans}),
            violations=self.violations(list(batch.rows), metas),
        )
        self.at("train:noted")
        self.weights = weights

    def metrics_of(self, batch: TrainBatch) -> Metrics:
        """Returns an entropy of the new weights, which the next coefficient follows."""
        metrics = Metrics()
        metrics.mean("actor/entropy", int(digest_of(self.weights)[:4], 16) / 2**16)
        return metrics

    def violations(self, refs: Sequence[RowRef], metas: Sequence[TrajectoryMeta]) -> list[str]:
        """Returns what is wrong with where the tokens of `refs` come from; only the actor looks."""
        return []

    def weights_bytes(self) -> bytes:
        return self.weights.tobytes()

    def restore_weights(self, data: bytes) -> None:
        if not self._amnesia.exists():
            self.weights = np.frombuffer(data, np.float64)

    def noted(self, event: str, step: int, weights: bytes) -> None:
        self.journal.note(event, step=step, weights=digest_of(np.frombuffer(weights)))


class ChaosCritic(WeightedTrainer):
    """The critic of a chaos run."""

    trains_on = ("token_ids", "response_mask", "loss_mask", "returns", "values")
    column = "values"

    def columns_of(self, row: Row) -> Row:
        values = super().columns_of(row)["values"]
        return {"values": values, "bootstrap_value": values[-1:]}


class ChaosActor(WeightedTrainer, ActorTwin):
    """The actor of a chaos run, which hands its weights out over sockets."""

    column = "old_logprobs"

    def __init__(self, settings: RunSettings, connection: Connection, hook: Hook, incarnation: str) -> None:
        super().__init__(settings, connection, hook, incarnation)
        references = (reference_column(name) for name in settings.references)
        self.trains_on = (
            "token_ids",
            "response_mask",
            "rollout_logprobs",
            "loss_mask",
            "advantages",
            *references,
        )
        self._checks = checker_connection(settings)
        self._run, self._seed = settings.run.name, settings.run.seed
        self._sender = SocketSender(wire_of(settings))

    def violations(self, refs: Sequence[RowRef], metas: Sequence[TrajectoryMeta]) -> list[str]:
        """Returns every sampled token that is not that of the attested weights which its span names."""
        rows = self.rows.read(refs, list(attestation.COLUMNS))
        found = [
            attestation.Trajectory(meta, *(row[name] for name in attestation.COLUMNS))
            for meta, row in zip(metas, rows, strict=True)
        ]
        return attestation.violations(found, attestation.read_attested(self._checks, self._run), self._sampled)

    def _sampled(self, meta: TrajectoryMeta, token_ids: Sequence[int], index: int, digest: str) -> int:
        seed, num_prompt_tokens = seed_of(self._seed, meta.gid, meta.index), meta.num_prompt_tokens
        return token_of(token_ids[:num_prompt_tokens], seed, digest, index - num_prompt_tokens)[0]

    def open_channel(self, request: weights_pb2.OpenWeightChannelRequest) -> weights_pb2.OpenWeightChannelResponse:
        self.at("publish:open")
        address = self._sender.open(request.epoch, request.world_size)
        return weights_pb2.OpenWeightChannelResponse(address=address, backend=weights_pb2.WEIGHT_BACKEND_GLOO)

    def send(self, request: actor_pb2.PublishWeightsRequest) -> actor_pb2.PublishWeightsResponse:
        weights, started = self.weights, time.monotonic()
        digest = digest_of(weights)
        self.journal.note("published", version=request.policy_version, step=request.step, weights=digest)
        self._sender.publish(weights, request.epoch, request.policy_version, request.bucket_timeout_s, self.at)
        self.at("publish:sent")
        token_ids = decode_tensor(request.probe.token_ids, "probe.token_ids")
        return actor_pb2.PublishWeightsResponse(
            fingerprints=encode_fingerprints(fingerprints_of(weights)),
            digest=digest,
            probe=weights_pb2.Probe(
                token_ids=request.probe.token_ids, logprobs=encode_tensor(numbers_of(digest, token_ids.tolist()))
            ),
            num_bytes=weights.nbytes,
            transfer_s=time.monotonic() - started,
        )

    def abort_publish(self, epoch: int, reason: str) -> None:
        self._sender.abort(epoch)

    def close(self) -> None:
        """Ends the weight channel; any thread may call."""
        self._sender.abort()
