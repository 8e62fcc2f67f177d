"""Light engines of actor, critic and reference: the protocol's side of a trainer is real (chain, record, checkpoint),
the arithmetic is light_model.py's.

A trainer keeps a journal beside its checkpoints: one line for every step it applies, replays and repeats included,
synced before the step counts. The journal is what the checker believes; nothing in the system reads it.
"""

import json
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from rolecall.checkpoint.manifest import StoredFile, store, verify
from rolecall.checkpoint.storage import open_storage
from rolecall.columns import reference_column
from rolecall.errors import OutOfOrderError, StaleVersionError
from rolecall.settings import RunSettings
from rolecall.store.connection import Connection
from rolecall.store.rows import Rows
from rolecall.telemetry import Metrics
from rolecall.training.serving.applied import FILE, Applied
from rolecall.training.serving.background import in_background
from rolecall.training.serving.hooks import nothing
from rolecall.training.serving.save_chain import Written
from rolecall.training.serving.train_chain import Progress
from rolecall.trajectory import seed_of
from rolecall.v1 import actor_pb2, training_pb2, weights_pb2
from rolecall.v1.trajectory_pb2 import RowRef, TrainBatch, TrajectoryMeta
from rolecall.weights.transferred import encode_fingerprints
from rolecall.wire import Array, decode_tensor, encode_tensor
from tests import attestation
from tests.chaos.light_channel import LightSender
from tests.chaos.light_model import LightModel, bits_of, digest_of, fingerprints_of, numbers_of, token_of
from tests.chaos.wiring import Hook, wire_of

NUM_MICROBATCHES = 4
MICROBATCH_S = 0.005
ACTOR_COLUMNS = ("token_ids", "response_mask", "rollout_logprobs", "loss_mask", "advantages")
CRITIC_COLUMNS = ("token_ids", "response_mask", "loss_mask", "returns", "values")
AMNESIA = "amnesia"
"""A file of this name beside the run directory plants a violation: checkpoints are restored without their weights."""


class LightColumn:
    """front.ColumnEngine: numbers hashed from the weights' digest and the tokens."""

    num_parameters = 1
    world_size = 1
    prefixes = ("",)

    def __init__(self, settings: RunSettings, connection: Connection, hook: Hook, column: str) -> None:
        self.rows = Rows(connection, settings.run.name, settings.store.num_shards)
        self.hook = hook
        self.model = LightModel(settings.run.seed)
        self._column = column

    def compute(self, rows: Sequence[RowRef], prefix: str) -> frozenset[str]:
        """front.ColumnEngine.compute."""
        self.hook.at("compute:start")
        read = self.rows.read(rows, ["token_ids", "response_mask"])
        digest = self.model.digest
        columns = [self._columns(numbers_of(digest, row["token_ids"].tolist()) * row["response_mask"]) for row in read]
        self.hook.at("compute:computed")
        written = [ref.id for ref, column in zip(rows, columns, strict=True) if self.rows.put([ref], [column])]
        self.hook.at("compute:written")
        return frozenset(written)

    def _columns(self, numbers: Array) -> Mapping[str, Array]:
        return {self._column: numbers.astype(np.float32)}

    def keep_alive(self) -> None:
        """One rank: nobody to show."""

    def stop(self) -> None:
        """One rank: nobody to let go."""


class LightReference(LightColumn):
    """A reference instance."""

    def __init__(self, settings: RunSettings, connection: Connection, hook: Hook, instance: str) -> None:
        super().__init__(settings, connection, hook, reference_column(instance))


class Journal:
    """Lines of JSON, each synced before `note` returns."""

    def __init__(self, path: Path, incarnation: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a")
        self._incarnation = incarnation

    def note(self, event: str, **fields: Any) -> None:
        """One line."""
        self._file.write(json.dumps({"event": event, "incarnation": self._incarnation, **fields}) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())


class LightTrainer(LightColumn):
    """front.TrainerEngine."""

    def __init__(
        self,
        settings: RunSettings,
        connection: Connection,
        hook: Hook,
        incarnation: str,
        column: str,
        columns: Sequence[str],
    ) -> None:
        super().__init__(settings, connection, hook, column)
        self.applied = Applied()
        self._columns_read = list(columns)
        self._amnesia = settings.run.dir.parent / AMNESIA
        self.journal = Journal(settings.run.dir / "journal" / f"{hook.worker}.jsonl", incarnation)
        self.journal.note("started", weights=self.model.digest)

    def train(self, batch: TrainBatch, progress: Progress) -> training_pb2.TrainResult:
        """front.TrainerEngine.train."""
        if batch.step != self.applied.step:
            raise OutOfOrderError(
                f"step {batch.step} cannot be applied at step {self.applied.step}", step=str(self.applied.step)
            )
        self.hook.at("train:start")
        rows, metas = self.rows.read_with_meta(list(batch.rows), self._columns_read)
        for index in range(NUM_MICROBATCHES):
            time.sleep(MICROBATCH_S)
            progress.report(index + 1, NUM_MICROBATCHES)
            if index == 1:
                self.hook.at("train:middle")
        coefficients = np.array([batch.coefficients.kl_coef, batch.coefficients.entropy_coef])
        weights = self.model.trained([*rows, {"coefficients": coefficients}])
        self.hook.at("train:computed")
        spans = sorted({(span.policy_version, span.weights_digest) for meta in metas for span in meta.spans})
        self.journal.note(
            "applied",
            step=batch.step,
            digest=batch.digest,
            rows=[ref.id for ref in batch.rows],
            tokens=[ref.token for ref in batch.rows],
            bits=[bits_of(row) for row in rows],
            before=self.model.digest,
            after=digest_of(weights),
            spans=spans,
            violations=self.violations(list(batch.rows), metas),
        )
        self.hook.at("train:noted")
        self.model.weights = weights
        metrics = Metrics()
        metrics.mean("actor/entropy", int(self.model.digest[:4], 16) / 2**16)  # what the next coefficient follows
        result = training_pb2.TrainResult(
            step=batch.step, digest=batch.digest, train_s=NUM_MICROBATCHES * MICROBATCH_S, metrics=metrics.to_proto()
        )
        self.applied = self.applied.after_step(result, 0)
        self.hook.at("train:applied")
        return result

    def violations(self, refs: Sequence[RowRef], metas: Sequence[TrajectoryMeta]) -> list[str]:
        """What is wrong with where the tokens of `refs` come from; the actor looks."""
        return []

    def save(self, path: str) -> Written:
        """front.TrainerEngine.save."""
        self.hook.at("save:start")
        step, record, weights, digest = (
            self.applied.step,
            self.applied.to_json(),
            self.model.weights.tobytes(),
            self.model.digest,
        )

        def write() -> tuple[StoredFile, ...]:
            storage = open_storage(path)
            self.hook.at("save:taken")
            first = store(storage, FILE, lambda file: file.write(record))
            self.hook.at("save:middle")
            second = store(storage, "weights", lambda file: file.write(weights))
            self.journal.note("saved", step=step, weights=digest)
            self.hook.at("save:written")
            return first, second

        return in_background(write, "checkpoint")

    def load(self, path: str, files: Sequence[StoredFile]) -> None:
        """front.TrainerEngine.load."""
        self.hook.at("load:start")
        storage = open_storage(path)
        verify(storage, files, nothing)
        applied = Applied.read(storage)
        if not self._amnesia.exists():
            self.model.weights = np.frombuffer(storage.read("weights"), np.float64)
        self.applied = replace(applied, policy_version=max(applied.policy_version, self.applied.policy_version))
        self.journal.note("loaded", step=self.applied.step, weights=self.model.digest)
        self.hook.at("load:end")

    def move(self, parts: Sequence[training_pb2.StatePart.ValueType], *, to_host: bool) -> None:
        """front.TrainerEngine.move: there is no device."""


class LightCritic(LightTrainer):
    """The critic."""

    def __init__(self, settings: RunSettings, connection: Connection, hook: Hook, incarnation: str) -> None:
        super().__init__(settings, connection, hook, incarnation, "values", CRITIC_COLUMNS)

    def _columns(self, numbers: Array) -> Mapping[str, Array]:
        return {"values": numbers.astype(np.float32), "bootstrap_value": numbers[-1:].astype(np.float32)}


class LightActor(LightTrainer):
    """service.ActorEngine: a trainer that hands its weights out."""

    def __init__(self, settings: RunSettings, connection: Connection, hook: Hook, incarnation: str) -> None:
        columns = [*ACTOR_COLUMNS, *(reference_column(name) for name in settings.references)]
        super().__init__(settings, connection, hook, incarnation, "old_logprobs", columns)
        self._connection = connection
        self._run, self._seed = settings.run.name, settings.run.seed
        self._sender = LightSender(wire_of(settings))

    def violations(self, refs: Sequence[RowRef], metas: Sequence[TrajectoryMeta]) -> list[str]:
        """LightTrainer.violations: every sampled token is that of the attested weights which its span names."""
        rows = self.rows.read(refs, list(attestation.COLUMNS))
        found = [
            attestation.Trajectory(meta, *(row[name] for name in attestation.COLUMNS))
            for meta, row in zip(metas, rows, strict=True)
        ]
        return attestation.violations(found, attestation.read_attested(self._connection, self._run), self._sampled)

    def _sampled(self, meta: TrajectoryMeta, token_ids: Sequence[int], index: int, digest: str) -> int:
        seed, num_prompt_tokens = seed_of(self._seed, meta.gid, meta.index), meta.num_prompt_tokens
        return token_of(token_ids[:num_prompt_tokens], seed, digest, index - num_prompt_tokens)[0]

    def open_channel(self, request: weights_pb2.OpenWeightChannelRequest) -> weights_pb2.OpenWeightChannelResponse:
        """service.ActorEngine.open_channel."""
        self.hook.at("publish:open")
        address = self._sender.open(request.epoch, request.world_size)
        return weights_pb2.OpenWeightChannelResponse(address=address, backend=weights_pb2.WEIGHT_BACKEND_GLOO)

    def publish(self, request: actor_pb2.PublishWeightsRequest) -> actor_pb2.PublishWeightsResponse:
        """service.ActorEngine.publish."""
        if request.step != self.applied.step:
            raise OutOfOrderError(
                f"weights of step {request.step} were asked for at step {self.applied.step}",
                step=str(self.applied.step),
            )
        if request.policy_version <= self.applied.policy_version:
            raise StaleVersionError(
                f"version {request.policy_version} is not higher than {self.applied.policy_version}"
            )
        self.applied = self.applied.after_publish(request.policy_version)
        weights, started = self.model.weights, time.monotonic()
        digest = digest_of(weights)
        self.journal.note("published", version=request.policy_version, step=request.step, weights=digest)
        self._sender.publish(weights, request.epoch, request.policy_version, request.bucket_timeout_s, self.hook.at)
        self.hook.at("publish:sent")
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
        """service.ActorEngine.abort_publish."""
        self._sender.abort(epoch)

    def close(self) -> None:
        """Ends the weight channel; from any thread."""
        self._sender.abort()
