"""The seam between a role's calls and its ranks: what the event loop asks of the device, as Protocols.

A `ColumnComputer` computes columns, a `Trainer` also has an optimizer. Their methods block and run in the device
thread. rolecall/training/step/role_ranks.py implements both over the ranks of a group. No torch, no gRPC.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from rolecall.checkpoint.manifest import StoredFile
from rolecall.training.serving.applied import Applied
from rolecall.training.serving.save_chain import Written
from rolecall.v1 import training_pb2
from rolecall.v1.trajectory_pb2 import RowRef, TrainBatch


@dataclass
class Progress:
    """The number of a step's microbatches that are done, and the profile that it is to make. The device thread writes
    it and the event loop looks at it: a torn read of the numbers only misreports a moment.
    """

    moved: Callable[[], None]
    """Called in the device thread at every report."""
    num_done: int = 0
    num_total: int = 0
    profile: training_pb2.StepProfile | None = None
    """Filled with the traces of the step, which are to be written; looked at after it. None: none are wanted."""

    def report(self, num_done: int, num_total: int) -> None:
        """Sets how far the step is."""
        self.num_done, self.num_total = num_done, num_total
        self.moved()


class ColumnComputer(Protocol):
    """A role that computes columns of rows."""

    @property
    def num_parameters(self) -> int:
        """The parameters of its model."""

    @property
    def world_size(self) -> int:
        """The number of its ranks."""

    @property
    def num_slots(self) -> int:
        """How many rows, or packed batches of them, its ranks compute at a time."""

    @property
    def prefixes(self) -> Sequence[str]:
        """The prefixes of the columns it computes: "" for the role's own."""

    def compute(self, rows: Sequence[RowRef], prefix: str) -> frozenset[str]:
        """Computes and writes the columns of `rows`, each named once; returns the keys of those that held them before.
        RowMissingError.
        """

    def move(self, parts: Sequence[training_pb2.StatePart.ValueType], *, to_host: bool) -> None:
        """Moves these parts of the state, all where none is named, to host memory or back; idempotent.
        InvalidInputError for a part there is not.
        """

    def keep_alive(self) -> None:
        """Shows the other ranks that this one lives."""

    def stop(self, over: bool) -> None:
        """Lets the other ranks go; the last call. over: whether the run is; else they are to be started again."""


class StepApplier(Protocol):
    """A role that applies steps, as the chain of them knows it."""

    @property
    def applied(self) -> Applied:
        """The record of what it has applied; any thread may ask."""

    def train(self, batch: TrainBatch, progress: Progress) -> training_pb2.TrainResult:
        """Applies the sealed `batch`. OutOfOrderError, RowMissingError."""


class Trainer(ColumnComputer, StepApplier, Protocol):
    """A role that computes columns, trains its model and keeps its state."""

    def save(self, path: str) -> Written:
        """Takes the state, to be written to the folder `path` beside other work. ConfigError."""

    def load(self, path: str, files: Sequence[StoredFile]) -> None:
        """Restores the state, after a look at `files`. CheckpointMissingError, CheckpointMismatchError,
        StorageUnavailableError.
        """
