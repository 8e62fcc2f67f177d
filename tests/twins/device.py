"""A device of host memory that processes share: who holds how much, a capacity, and real bytes behind it.

What somebody holds is an allocation of that size, filled, so that it shows in the process's resident set and is gone
from there once it is freed; beside it a file says so to the others, locked for as long as its process lives. More than
the capacity at any instant is a MemoryError, as on a GPU.
"""

import fcntl
import mmap
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rolecall.errors import ConflictError, DeviceFullError
from rolecall.settings import RunSettings
from rolecall.shifts import Post
from rolecall.v1 import training_pb2

MIB = 2**20
PARTS = {
    training_pb2.STATE_PART_PARAMETERS: 8 * MIB,
    training_pb2.STATE_PART_OPTIMIZER: 24 * MIB,
    training_pb2.STATE_PART_GRADIENTS: 0,
}
"""Bytes of a trainer's state; between steps there are no gradients."""
WEIGHTS, CACHE = 4 * MIB, 16 * MIB
"""Bytes of a rollout."""
REFERENCE = 24 * MIB
"""Bytes of a reference: too many beside the rollouts, or beside trainers that hold all their state."""
OVERFLOW = ".overflow"
"""A file on the device that says what was once too much for it."""


def device_of(settings: RunSettings, who: str) -> "TwinDevice | None":
    """The device that the roles of a run share, as `who` sees it: it has room for each shift, and for no rollout or
    reference that takes shifts beside trainers that hold all their state. None where they share none.
    """
    if not settings.takes_shifts:
        return None
    trainers, rollouts = 1 + (settings.critic is not None), settings.rollout.num_replicas
    scoring = REFERENCE * len(settings.references_in_shifts)
    resident = REFERENCE * len(settings.references) - scoring
    publishing = rollouts * (WEIGHTS + CACHE) + PARTS[training_pb2.STATE_PART_PARAMETERS]
    capacity = resident + max(trainers * sum(PARTS.values()), publishing, scoring)
    assert resident + trainers * sum(PARTS.values()) + WEIGHTS + CACHE > capacity
    return TwinDevice(settings.run.dir.parent / "device", who, capacity)


class EngineMemory:
    """A rollout's weights and cache on a device, as vLLM has them: awake as a whole at first."""

    def __init__(self, device: "TwinDevice | None") -> None:
        self._device = device
        self._hold(weights=WEIGHTS, cache=CACHE)

    def sleep(self) -> None:
        """Gives all of it back."""
        self._hold(weights=0, cache=0)

    def wake_up(self) -> None:
        """Has the weights again, if there is room for all. DeviceFullError."""
        self._hold(checked=True, weights=WEIGHTS + CACHE)
        self._hold(weights=WEIGHTS)

    def take_cache(self) -> None:
        """Has the cache again, too: for whatever it computes."""
        self._hold(cache=CACHE)

    def _hold(self, *, checked: bool = False, **parts: int) -> None:
        if self._device is not None:
            for what, num_bytes in parts.items():
                self._device.hold(what, num_bytes, checked=checked)


class TrainerState:
    """A trainer's state on a device, moved as an engine's: what a call needs comes back by itself."""

    def __init__(self, device: "TwinDevice | None") -> None:
        self._device = device
        self.need(training_pb2.STATE_PART_PARAMETERS)

    def need(self, *parts: training_pb2.StatePart.ValueType) -> None:
        """Has `parts`, all where none is named, on the device."""
        self._hold(parts, to_host=False, checked=False)

    def move(self, parts: Sequence[training_pb2.StatePart.ValueType], *, to_host: bool) -> None:
        """As Trainer.move."""
        self._hold(parts, to_host=to_host, checked=not to_host)

    def _hold(self, parts: Sequence[training_pb2.StatePart.ValueType], *, to_host: bool, checked: bool) -> None:
        if self._device is not None:
            for part in parts or PARTS:
                self._device.hold(training_pb2.StatePart.Name(part), 0 if to_host else PARTS[part], checked=checked)


class ReferenceMemory:
    """A reference's weights on a device, as services/reference/ranks.py has them: gone once they are loaded where it
    takes shifts, and there from the next column on.
    """

    def __init__(self, settings: RunSettings, who: str) -> None:
        self._device = device_of(settings, who)
        self._post = Post(settings.run.dir, "references") if settings.references[who].offload else None
        self._hold(REFERENCE, checked=False)
        if self._post is not None:
            self._hold(0)

    def need(self) -> None:
        """Has them. ConflictError in the shift of others; DeviceFullError."""
        if self._post is not None and not self._post.take():
            raise ConflictError("the device is not the references' now")
        self._hold(REFERENCE)

    def leave(self) -> None:
        """Has them in host memory."""
        self._hold(0)
        if self._post is not None:
            self._post.leave()

    def _hold(self, num_bytes: int, *, checked: bool = True) -> None:
        if self._device is not None:
            self._device.hold("weights", num_bytes, checked=checked)


class TwinDevice:
    """The device in `folder`, as one holder sees it."""

    def __init__(self, folder: Path, who: str, capacity: int) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._capacity = folder, capacity
        self._file = os.open(folder / f"{who}-{os.getpid()}-{id(self)}", os.O_RDWR | os.O_CREAT)
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._held: dict[str, mmap.mmap] = {}

    @property
    def num_bytes(self) -> int:
        """Bytes that this holder has on the device."""
        return sum(map(len, self._held.values()))

    def hold(self, what: str, num_bytes: int, *, checked: bool = False) -> None:
        """Has exactly `num_bytes` for `what` from now on. MemoryError, or DeviceFullError where the room is `checked`
        first, when the device lacks them.
        """
        with self._mutex():
            missing = self._in_use() - len(self._held.get(what, b"")) + num_bytes - self._capacity
            if missing > 0 and checked:
                raise DeviceFullError(f"the device lacks {missing} bytes for {what}")
            if missing > 0:
                found = f"{what} takes {num_bytes} bytes, {missing} more than the device has: {held_by(self._folder)}"
                (self._folder / OVERFLOW).write_text(found)
                raise MemoryError(found)
            if what in self._held:
                self._held.pop(what).close()
            if num_bytes:
                self._held[what] = memory = mmap.mmap(-1, num_bytes)
                memory.write(b"\x01" * num_bytes)
            os.pwrite(self._file, b"%20d" % self.num_bytes, 0)

    def close(self) -> None:
        """Gives everything back, as a process does that ends."""
        for what in list(self._held):
            self.hold(what, 0)
        os.close(self._file)

    def _in_use(self) -> int:
        return sum(held_by(self._folder).values())

    @contextmanager
    def _mutex(self) -> Iterator[None]:
        with (self._folder / ".mutex").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def held_by(folder: Path) -> dict[str, int]:
    """Bytes by holder, of those that live."""
    found: dict[str, int] = {}
    for path in folder.glob("[!.]*"):
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                who = path.name.split("-")[0] if not path.name.startswith("rollout") else path.name[:9]
                found[who] = found.get(who, 0) + int(file.read() or b"0")
    return found
