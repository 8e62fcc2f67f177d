"""The torch side of a role, on every rank: what the front calls on rank 0 and what the followers do with rank 0's commands.

`ColumnRanks` computes a column; `TrainerRanks` also applies steps and keeps checkpoints. What a step is made of is the service's `Recipe`.
All methods block and are called by one thread. A method called on rank 0 announces its command first; `follow` does the same work elsewhere.
"""

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Protocol

from rolecall.errors import InvalidInputError, OutOfOrderError, RoleCallError
from rolecall.telemetry import Metrics
from rolecall.training.applied import Applied
from rolecall.training.chain import Progress
from rolecall.training.checkpoint_dir import CheckpointDir
from rolecall.training.engine import EngineState, Microbatch, TokenOutputs, ValueOutputs
from rolecall.training.share import Bench, compute_column
from rolecall.v1 import command_pb2, training_pb2
from rolecall.v1.command_pb2 import TrainerCommand
from rolecall.v1.trajectory_pb2 import RowRef, TrainBatch
from rolecall.wire import Array

log = logging.getLogger(__name__)


class ColumnRecipe(Protocol):
    """Which columns a role computes."""

    columns: tuple[str, ...]
    """Their names."""

    def encode(self, microbatch: Microbatch, outputs: TokenOutputs | ValueOutputs) -> list[dict[str, Array]]:
        """The columns of each sequence, in order."""


class StepRecipe(ColumnRecipe, Protocol):
    """What a step of a role is made of."""

    def apply(self, bench: Bench, batch: TrainBatch, applied: Applied, progress: Progress) -> tuple[Metrics, int]:
        """Applies `batch` on all ranks; this rank's metrics and the optimizer steps that were skipped. RowMissingError before anything changed."""


class ColumnRanks:
    """front.ColumnEngine over the ranks of a group."""

    def __init__(self, bench: Bench, recipe: ColumnRecipe, num_parameters: int) -> None:
        self.bench = bench
        self.group = bench.group
        self.num_parameters = num_parameters
        self._recipe = recipe

    @property
    def world_size(self) -> int:
        """Ranks."""
        return self.group.world_size

    def compute(self, rows: Sequence[RowRef]) -> frozenset[str]:
        """front.ColumnEngine.compute."""
        self.group.announce(TrainerCommand(compute=command_pb2.ComputeColumnCommand(rows=rows)))
        return self._compute(rows)

    def keep_alive(self) -> None:
        """front.ColumnEngine.keep_alive."""
        self.group.keep_alive()

    def stop(self) -> None:
        """front.ColumnEngine.stop."""
        self.group.stop()

    def _compute(self, rows: Sequence[RowRef]) -> frozenset[str]:
        return compute_column(self.bench, rows, self._recipe.columns, self._recipe.encode)

    def follow(self) -> None:
        """Does what rank 0 commands, until it stops the group. A RoleCallError is rank 0's to tell; anything else ends this rank."""
        for command in self.group.commands():
            try:
                self.obey(command)
            except RoleCallError as error:
                log.warning("%s failed on every rank: %s", command.WhichOneof("work"), error.message)

    def obey(self, command: TrainerCommand) -> None:
        """One command of rank 0. InvalidInputError for one this role does not know."""
        if command.WhichOneof("work") != "compute":
            raise InvalidInputError(f"command {command.WhichOneof('work')} is not this role's; ranks of different roles or releases share a group")
        self._compute(command.compute.rows)


class TrainerRanks(ColumnRanks):
    """front.TrainerEngine over the ranks of a group."""

    def __init__(self, bench: Bench, recipe: StepRecipe, state: EngineState, num_parameters: int) -> None:
        super().__init__(bench, recipe, num_parameters)
        self.applied = Applied()
        """What was applied; replaced as a whole."""
        self._steps = recipe
        self._state = state

    def train(self, batch: TrainBatch, progress: Progress) -> training_pb2.TrainResult:
        """front.TrainerEngine.train."""
        if batch.step != self.applied.step:
            raise OutOfOrderError(f"step {batch.step} cannot be applied at step {self.applied.step}", step=str(self.applied.step))
        self.group.announce(TrainerCommand(train=command_pb2.TrainCommand(batch=batch)))
        return self._train(batch, progress)

    def save(self, path: Path, export_huggingface: bool) -> int:
        """front.TrainerEngine.save."""
        self.group.announce(TrainerCommand(save=command_pb2.SaveCommand(path=str(path), export_huggingface=export_huggingface)))
        return self._save(path, export_huggingface)

    def load(self, path: Path) -> None:
        """front.TrainerEngine.load."""
        self.group.announce(TrainerCommand(load=command_pb2.LoadCommand(path=str(path))))
        self._load(path)

    def move(self, *, to_host: bool) -> None:
        """front.TrainerEngine.move."""
        command = TrainerCommand(offload=command_pb2.OffloadCommand()) if to_host else TrainerCommand(onload=command_pb2.OnloadCommand())
        self.group.announce(command)
        self._move(to_host)

    def obey(self, command: TrainerCommand) -> None:
        """ColumnRanks.obey, and a trainer's own commands."""
        match command.WhichOneof("work"):
            case "train":
                self._train(command.train.batch, Progress(_nobody))
            case "save":
                self._save(Path(command.save.path), command.save.export_huggingface)
            case "load":
                self._load(Path(command.load.path))
            case "offload" | "onload" as direction:
                self._move(direction == "offload")
            case _:
                super().obey(command)

    def _train(self, batch: TrainBatch, progress: Progress) -> training_pb2.TrainResult:
        started = time.perf_counter()
        metrics, skipped = self._steps.apply(self.bench, batch, self.applied, progress)
        train_s = time.perf_counter() - started
        mine = training_pb2.TrainResult(metrics=metrics.to_proto()).SerializeToString()
        everyone = [training_pb2.TrainResult.FromString(data) for data in self.group.gather(mine)]
        merged = Metrics.from_proto(metric for result in everyone for metric in result.metrics)
        result = training_pb2.TrainResult(step=batch.step, digest=batch.digest, metrics=merged.to_proto(), train_s=train_s)
        self.applied = self.applied.after_step(result, skipped)
        log.info("step %d applied in %.2f s", batch.step, train_s)
        return result

    def _save(self, path: Path, export_huggingface: bool) -> int:
        directory = CheckpointDir(path, self.group)
        if directory.holds(self.applied.step, export_huggingface):
            return directory.num_bytes()
        with directory.replaced() as partial:
            self.group.agree(lambda: self._state.save(partial, export_huggingface=export_huggingface))
            if self.group.leads:
                self.applied.write(partial)
        return directory.num_bytes()

    def _load(self, path: Path) -> None:
        applied = self.group.agree(lambda: Applied.read(path))
        self._state.load(path)
        # Versions never go back, also when a running actor is set back.
        self.applied = replace(applied, policy_version=max(applied.policy_version, self.applied.policy_version))

    def _move(self, to_host: bool) -> None:
        if to_host:
            self._state.offload()
        else:
            self._state.onload()


def _nobody() -> None:
    """Followers' progress is watched by nobody."""
