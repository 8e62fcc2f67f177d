"""The ranks of one trainer: rank 0 leads, the rest follow commands that arrive as serialized protobuf over a Gloo group
of their own.

Owns the command group and what crosses it: commands, agreement on errors, small sums and gathered bytes. Not the
collectives of the model, which belong to the engine's group. A follower never waits without a deadline: while idle,
rank 0 sends a keep-alive every device_thread.KEEP_ALIVE_S.

Errors: work that touches no collective, or fails after its last one or on all ranks alike, as the loading of a
checkpoint, runs under `agree`. When it fails on any rank with a RoleCallError, every rank
raises one and the group goes on. Any other error ends its process; the other ranks see it go (watch.py) and end, and
the role restarts from its checkpoint.
"""

import json
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

import numpy as np
import torch
import torch.distributed as dist

from rolecall import errors
from rolecall.errors import RoleCallError, WorkerLostError
from rolecall.settings import LayoutSection
from rolecall.telemetry import Metrics
from rolecall.training.ranks.watch import RankWatch
from rolecall.v1.command_pb2 import KeepAliveCommand, StopCommand, TrainerCommand
from rolecall.v1.training_pb2 import TrainResult
from rolecall.wire import Array

T = TypeVar("T")

COMMAND_TIMEOUT_S = 3600.0
"""Deadline of every wait on a command group: the longest that living ranks may be apart, as when one reads its model
from a slow disk, or rank 0 waits for those who receive its weights. A rank that died or was stopped ends the wait
within watch.LOST_S, and in a run's roles one that lives without getting on within the section's hang_s.
"""
_PIECES_S = 5.0
"""Seconds after which ranks that work through pieces hear of each other."""


class CommandGroup:
    """Rank 0's orders and what the ranks tell each other about them. With one rank every method is local. One thread at
    a time.

    A *slot* is a set of ranks that read the same rows and compute the same numbers together (LayoutSection.slot_of).
    """

    def __init__(
        self,
        rank: int,
        world_size: int,
        group: dist.ProcessGroup | None,
        watch: RankWatch | None = None,
        parallel: LayoutSection = LayoutSection(),
    ) -> None:
        """`group` is a Gloo group of all ranks with a timeout of COMMAND_TIMEOUT_S, `watch` over the same ranks; None
        with one rank.
        """
        self.rank = rank
        self.world_size = world_size
        self.slot, self.num_slots = parallel.slot_of(rank, world_size), world_size // parallel.slot_size
        self.is_slot_leader = parallel.leads_slot(rank, world_size)
        """Whether this rank counts for its slot, in sums over slots, in what is written to rows, and in metrics."""
        self.over = False
        """Whether rank 0 stopped the group because the run is over; said by its last command."""
        self._group = group
        self._watch = watch

    @classmethod
    def of_default(cls, watch: RankWatch | None = None, parallel: LayoutSection = LayoutSection()) -> "CommandGroup":
        """A command group over the ranks of torch's default group, or of this process alone when there is none. A
        collective.
        """
        if not dist.is_initialized() or dist.get_world_size() == 1:
            return cls(0, 1, None, None)
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=COMMAND_TIMEOUT_S))
        return cls(dist.get_rank(), dist.get_world_size(), group, watch, parallel)

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @contextmanager
    def leading(self, command: TrainerCommand) -> Iterator[None]:
        """Rank 0: has all ranks do `command`; rank 0 does its part inside."""
        with self.watched():
            self.announce(command)
            yield

    def announce(self, command: TrainerCommand) -> None:
        """Rank 0: hands `command` to the followers, who will do the same as rank 0 does next."""
        self._tell_phase(command)
        if self.world_size > 1:
            self._broadcast_bytes(command.SerializeToString(), 0)

    def keep_alive(self) -> None:
        """Rank 0: shows the followers that it lives."""
        self.announce(TrainerCommand(keep_alive=KeepAliveCommand()))

    def stop(self, over: bool) -> None:
        """Rank 0: the last command; from here on every rank may go. over: whether the run is; else this rank was
        stopped before.
        """
        self.announce(TrainerCommand(stop=StopCommand(over=over)))
        self.leave()

    def commands(self) -> Iterator[TrainerCommand]:
        """A follower's commands, keep-alives left out, until rank 0 stops the group. WorkerLostError when rank 0 is
        silent or gone.
        """
        while True:
            self._tell_phase(TrainerCommand(keep_alive=KeepAliveCommand()))
            try:
                with self.watched():
                    command = TrainerCommand.FromString(self._broadcast_bytes(b"", 0))
            except RuntimeError as error:
                raise WorkerLostError(
                    f"rank 0 sent nothing for {COMMAND_TIMEOUT_S:.0f} s or is gone ({error}); this rank ends"
                ) from error
            work = command.WhichOneof("work")
            if work == "stop":
                self.over = command.stop.over
                self.leave()
                return
            self._tell_phase(command)
            if work != "keep_alive":
                yield command

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Watches the collectives inside. One that a lost rank has left says only that a connection was closed: the
        watch, which knows the rank, goes first.
        """
        try:
            yield
        except RuntimeError:
            if self._watch is not None:
                self._watch.explain()
            raise

    def agree(self, work: Callable[[], T]) -> T:
        """Returns what `work` does here. When it raised a RoleCallError on any rank, raises one on every rank: its own
        where it has one.
        """
        if self.world_size == 1:
            return work()
        own: RoleCallError | None = None
        result: list[T] = []
        try:
            result.append(work())
        except RoleCallError as error:
            own = error
        culprit = int(self._reduce(np.array([self.rank + 1 if own else 0], np.int64), dist.ReduceOp.MAX)[0]) - 1
        if culprit < 0:
            return result[0]
        encoded = self._broadcast_bytes(_encode(own) if self.rank == culprit and own is not None else b"", culprit)
        raise own if own is not None else _decode(encoded, culprit)

    def agree_on_pieces(self, pieces: Iterable[None], progressed: Callable[[], None]) -> None:
        """`agree` on work of which the ranks have more or fewer pieces: a rank without any waits for the others and
        says that they get on.
        """
        left = iter(pieces)

        def some() -> bool:
            """Works for a while; whether there may be more."""
            until = time.monotonic() + _PIECES_S
            for _ in left:
                progressed()
                if time.monotonic() > until:
                    return True
            return False

        while self.sum(np.array([self.agree(some)]))[0]:
            progressed()

    def sum(self, numbers: Array) -> Array:
        """The elementwise sum over ranks of `numbers`, float64 of the same shape on every rank."""
        numbers = np.asarray(numbers, np.float64)
        return numbers if self.world_size == 1 else self._reduce(numbers, dist.ReduceOp.SUM)

    def sum_over_slots(self, numbers: Array) -> Array:
        """`sum`, counting each slot once."""
        numbers = np.asarray(numbers, np.float64)
        return self.sum(numbers if self.is_slot_leader else np.zeros_like(numbers))

    def gather(self, data: bytes) -> list[bytes]:
        """Every rank's `data` in order of ranks, on every rank."""
        if self.world_size == 1:
            return [data]
        sizes = np.zeros(self.world_size, np.int64)
        sizes[self.rank] = len(data)
        sizes = self._reduce(sizes, dist.ReduceOp.SUM)
        own = torch.zeros(max(int(sizes.max()), 1), dtype=torch.uint8)
        own[: len(data)] = _bytes_tensor(data)
        everyone = [torch.empty_like(own) for _ in range(self.world_size)]
        dist.all_gather(everyone, own, group=self._group)
        return [tensor.numpy()[:size].tobytes() for tensor, size in zip(everyone, sizes, strict=True)]

    def merge(self, metrics: Metrics) -> Metrics:
        """All ranks' metrics, each slot counted once."""
        mine = TrainResult(
            metrics=(metrics if self.is_slot_leader else metrics.extremes()).to_proto()
        ).SerializeToString()
        return Metrics.from_proto(
            metric for data in self.gather(mine) for metric in TrainResult.FromString(data).metrics
        )

    def _tell_phase(self, command: TrainerCommand) -> None:
        if self._watch is not None:
            work = command.WhichOneof("work")
            self._watch.phase = "idle" if work is None or work == "keep_alive" else f"at {work}"

    def leave(self) -> None:
        """Tells the watch that this rank may go from here on, and so may every other."""
        if self._watch is not None:
            self._watch.leave()

    def _reduce(self, numbers: Array, op: dist.ReduceOp.RedOpType) -> Array:
        tensor = torch.from_numpy(numbers.copy())
        dist.all_reduce(tensor, op=op, group=self._group)
        return tensor.numpy()

    def _broadcast_bytes(self, data: bytes, source: int) -> bytes:
        size = torch.tensor([len(data)], dtype=torch.int64)
        dist.broadcast(size, source, group=self._group)
        payload = _bytes_tensor(data) if self.rank == source else torch.empty(int(size), dtype=torch.uint8)
        if int(size):
            dist.broadcast(payload, source, group=self._group)
        return payload.numpy().tobytes()


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)


def _encode(error: RoleCallError) -> bytes:
    return json.dumps([type(error).__name__, error.message, error.details]).encode()


def _decode(data: bytes, culprit: int) -> RoleCallError:
    name, message, details = json.loads(data)
    kinds: Sequence[type[RoleCallError]] = [
        kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, RoleCallError)
    ]
    kind = next((kind for kind in kinds if kind.__name__ == name), RoleCallError)
    return kind(f"rank {culprit}: {message}", **details)
