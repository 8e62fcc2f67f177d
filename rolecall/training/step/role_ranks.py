"""A role on its ranks: the methods that the calls need on rank 0, and the same work on the followers.

`ColumnRanks` computes columns and leaves the device when it is told; `TrainerRanks` also applies steps and keeps
checkpoints. A service says which columns (`RoleColumns`) and what a step is made of (`RoleSteps`). All methods block
and are called by one thread. A method called on rank 0 announces its command first; `follow` does the same work
elsewhere.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Protocol

from rolecall.checkpoint.manifest import StoredFile, verify_pieces
from rolecall.checkpoint.storage import Storage, open_storage
from rolecall.errors import ENDS_ROLE, InvalidInputError, OutOfOrderError, RoleCallError
from rolecall.telemetry import Metrics
from rolecall.training.engine import Microbatch, StatePart, TokenOutputs, ValueOutputs
from rolecall.training.model.logits.logprobs import Wanted
from rolecall.training.ranks.device import require_room
from rolecall.training.ranks.writers import Writers
from rolecall.training.serving.applied import FILE, TORN, Applied
from rolecall.training.serving.hooks import nothing
from rolecall.training.serving.save_chain import Written
from rolecall.training.serving.trainer import Progress
from rolecall.training.state.checkpoint import read_index
from rolecall.training.step.rank_context import StoreRankContext
from rolecall.training.step.share import compute_column
from rolecall.v1 import command_pb2, training_pb2
from rolecall.v1.command_pb2 import TrainerCommand
from rolecall.v1.trajectory_pb2 import RowRef, TrainBatch
from rolecall.wire import Array

logger = logging.getLogger(__name__)

_PARTS: dict[training_pb2.StatePart.ValueType, StatePart] = {
    training_pb2.STATE_PART_PARAMETERS: "parameters",
    training_pb2.STATE_PART_OPTIMIZER: "optimizer",
    training_pb2.STATE_PART_GRADIENTS: "gradients",
}


class RoleColumns(Protocol):
    """The columns that a role computes, and how they follow from the model's outputs."""

    names: tuple[str, ...]
    """The columns' names."""
    wanted: Wanted | None
    """What the columns need beside logprobs or values."""
    reads: Sequence[str]
    """Columns that the pass itself needs beside tokens and masks."""

    def encode(self, microbatch: Microbatch, outputs: TokenOutputs | ValueOutputs) -> list[dict[str, Array]]:
        """The columns of each sequence, in order."""


class RoleSteps(RoleColumns, Protocol):
    """The columns of a role that trains, and how it applies a sealed batch."""

    def apply(
        self, context: StoreRankContext, batch: TrainBatch, applied: Applied, progress: Progress
    ) -> tuple[Metrics, int]:
        """Applies `batch` on all ranks; this rank's metrics and the optimizer steps that were skipped. RowMissingError
        before anything changed.
        """


class ColumnRanks:
    """A ColumnComputer over the ranks of a group."""

    def __init__(self, context: StoreRankContext, columns: Mapping[str, RoleColumns]) -> None:
        """`columns` by the prefix under which they are asked for; "" for the role's own."""
        self.context = context
        self.group = context.group
        self._columns = columns

    @property
    def num_parameters(self) -> int:
        """ColumnComputer.num_parameters."""
        return self.context.engine.num_parameters

    @property
    def world_size(self) -> int:
        """ColumnComputer.world_size."""
        return self.group.world_size

    @property
    def num_slots(self) -> int:
        """ColumnComputer.num_slots."""
        return self.group.num_slots

    @property
    def prefixes(self) -> Sequence[str]:
        """ColumnComputer.prefixes."""
        return list(self._columns)

    def compute(self, rows: Sequence[RowRef], prefix: str) -> frozenset[str]:
        """ColumnComputer.compute."""
        with self.group.leading(TrainerCommand(compute=command_pb2.ComputeColumnCommand(rows=rows, prefix=prefix))):
            return self._compute(rows, prefix)

    def move(self, parts: Sequence[training_pb2.StatePart.ValueType], *, to_host: bool) -> None:
        """ColumnComputer.move."""
        parts = parts or tuple(_PARTS)
        unknown = [part for part in parts if part not in _PARTS]
        if unknown:
            raise InvalidInputError(
                f"parts names {unknown}, which are no parts of a role's state; name parameters, optimizer or "
                "gradients, or none for all"
            )
        command = (
            TrainerCommand(offload=command_pb2.OffloadCommand(parts=parts))
            if to_host
            else TrainerCommand(onload=command_pb2.OnloadCommand(parts=parts))
        )
        with self.group.leading(command):
            self._move(parts, to_host)

    def keep_alive(self) -> None:
        """ColumnComputer.keep_alive."""
        self.group.keep_alive()

    def stop(self, over: bool) -> None:
        """ColumnComputer.stop."""
        self.group.stop(over)

    def _compute(self, rows: Sequence[RowRef], prefix: str) -> frozenset[str]:
        columns = self._columns[prefix]
        return compute_column(self.context, rows, columns.names, columns.encode, columns.wanted, columns.reads)

    def follow(self) -> bool:
        """Does what rank 0 commands, until it stops the group; returns whether the run is over. A RoleCallError is
        rank 0's to tell; anything else, and one of ENDS_ROLE, ends this rank.
        """
        with self.group.watched():
            for command in self.group.commands():
                try:
                    self.obey(command)
                except ENDS_ROLE:
                    raise
                except RoleCallError as error:
                    logger.warning("%s failed on every rank: %s", command.WhichOneof("work"), error.message)
        return self.group.over

    def obey(self, command: TrainerCommand) -> None:
        """One command of rank 0. InvalidInputError for one this role does not know."""
        match command.WhichOneof("work"):
            case "compute":
                self._compute(command.compute.rows, command.compute.prefix)
            case "offload":
                self._move(command.offload.parts, to_host=True)
            case "onload":
                self._move(command.onload.parts, to_host=False)
            case unknown:
                raise InvalidInputError(
                    f"command {unknown} is not this role's; ranks of different roles or releases share a group"
                )

    def _move(self, parts: Sequence[training_pb2.StatePart.ValueType], to_host: bool) -> None:
        named = [_PARTS[part] for part in parts]
        if to_host:
            self.context.state.offload(*named)
        else:
            needed = self.context.state.num_bytes_away(*named)
            self.group.agree(lambda: require_room(self.context.device, needed))
            self.context.state.onload(*named)


class TrainerRanks(ColumnRanks):
    """A Trainer over the ranks of a group."""

    def __init__(self, context: StoreRankContext, steps: RoleSteps) -> None:
        """A collective, as Writers."""
        super().__init__(context, {"": steps})
        self.applied = Applied()
        """What was applied; replaced as a whole."""
        self._steps = steps
        self._writers = Writers(self.group)

    def train(self, batch: TrainBatch, progress: Progress) -> training_pb2.TrainResult:
        """Trainer.train."""
        if batch.step != self.applied.step:
            raise OutOfOrderError(
                f"step {batch.step} cannot be applied at step {self.applied.step}", step=str(self.applied.step)
            )
        command = command_pb2.TrainCommand(batch=batch, profile=progress.profile is not None)
        with self.group.leading(TrainerCommand(train=command)):
            return self._train(batch, progress)

    def save(self, path: str) -> Written:
        """Trainer.save."""
        storage = open_storage(path)
        with self.group.leading(TrainerCommand(save=command_pb2.SaveCommand(path=path))):
            return self._save(storage)

    def load(self, path: str, files: Sequence[StoredFile]) -> None:
        """Trainer.load."""
        storage = open_storage(path)
        sent = [
            training_pb2.CheckpointFile(name=file.name, num_bytes=file.num_bytes, checksum=file.checksum)
            for file in files
        ]
        with self.group.leading(TrainerCommand(load=command_pb2.LoadCommand(path=path, files=sent))):
            self._load(storage, files)

    def obey(self, command: TrainerCommand) -> None:
        """ColumnRanks.obey, and a trainer's own commands."""
        match command.WhichOneof("work"):
            case "train":
                profile = training_pb2.StepProfile() if command.train.profile else None
                self._train(command.train.batch, Progress(nothing, profile=profile))
            case "save":
                self._save(open_storage(command.save.path))
            case "load":
                files = [StoredFile(file.name, file.num_bytes, file.checksum) for file in command.load.files]
                self._load(open_storage(command.load.path), files)
            case _:
                super().obey(command)

    def _train(self, batch: TrainBatch, progress: Progress) -> training_pb2.TrainResult:
        started, recorder = time.perf_counter(), self.context.recorder
        recorder.begin(wanted=progress.profile is not None)
        metrics, skipped = self._steps.apply(self.context, batch, self.applied, progress)
        train_s = time.perf_counter() - started
        merged = self.group.merge(metrics).to_proto()
        result = training_pb2.TrainResult(step=batch.step, digest=batch.digest, metrics=merged, train_s=train_s)
        self.applied = self.applied.after_step(result, skipped)
        logger.info("step %d applied in %.2f s", batch.step, train_s)
        if progress.profile is not None:
            everyone = self.group.gather(recorder.write(batch.step).SerializeToString())
            progress.profile.MergeFrom(
                training_pb2.StepProfile(
                    step=batch.step,
                    num_passes=recorder.num_microbatches,
                    traces=[training_pb2.RankTrace.FromString(trace) for trace in everyone],
                )
            )
        return result

    def _save(self, storage: Storage) -> Written:
        with self.context.memory.phase("checkpoint"):
            snapshot, record = self.context.state.snapshot(), {FILE: self.applied.to_json()}
        return self._writers.begin(lambda writers: snapshot.write(storage, writers, record))

    def _load(self, storage: Storage, files: Sequence[StoredFile]) -> None:
        mine = files[self.group.rank :: self.group.world_size]
        self.group.agree_on_pieces(verify_pieces(storage, mine), self.context.progressed)
        applied = self.group.agree(lambda: Applied.read(storage))
        index = self.group.agree(lambda: read_index(storage))
        # Versions never go back, also when a running actor is set back.
        applied = replace(applied, policy_version=max(applied.policy_version, self.applied.policy_version))
        # Of no step until every rank has all of it: what is half loaded is trained and published by nobody.
        self.applied = Applied(step=TORN, policy_version=applied.policy_version)
        with self.context.memory.phase("checkpoint"):
            self.group.agree(lambda: self.context.state.load(storage, index))
        self.applied = applied
