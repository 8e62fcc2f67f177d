"""Parts of an engine's state while they wait in host memory: their device memory is given back, and later filled again
in place.

A tensor keeps its identity: its storage shrinks to nothing and grows back, so that parameters, DTensors, views that
FSDP holds and the optimizer's state stay the same objects. In between nobody may read one: the engine brings back what
a call needs first. The same on CPUs, where it moves memory but frees none. Only storages that were once seen as numpy
arrays, as by a publish, cannot shrink there, and stay where they are.
"""

from collections.abc import Callable, Iterable

import torch

from rolecall.training.engine import StatePart
from rolecall.training.serving.hooks import nothing


class HostCopies:
    """The parts of the state that are in host memory now. Used by one thread at a time."""

    def __init__(self, progressed: Callable[[], None] = nothing) -> None:
        """`progressed` is called after each tensor's copy: all together may take as long as a pass."""
        self._progressed = progressed
        self._copies: dict[StatePart, list[tuple[torch.UntypedStorage, torch.Tensor]]] = {}

    def take(self, part: StatePart, tensors: Iterable[torch.Tensor]) -> None:
        """Copies `tensors` (local ones) to the host and frees their memory; nothing when the part is there already."""
        if part in self._copies:
            return
        storages = {
            storage.data_ptr(): storage
            for storage in (tensor.untyped_storage() for tensor in tensors)
            if storage.nbytes() and (storage.resizable() or storage.device.type != "cpu")
        }
        copies = self._copies[part] = []
        for storage in storages.values():
            copies.append((storage, _to_host(storage)))
            storage.resize_(0)
            self._progressed()

    def give_back(self, part: StatePart) -> None:
        """Brings the part back; nothing when it is not on the host."""
        for storage, copy in self._copies.pop(part, ()):
            storage.resize_(copy.numel())
            _bytes_of(storage).copy_(copy)
            self._progressed()

    def num_bytes(self, parts: Iterable[StatePart]) -> int:
        """Bytes that giving `parts` back takes on the device."""
        return sum(copy.numel() for part in parts for _, copy in self._copies.get(part, ()))


def _to_host(storage: torch.UntypedStorage) -> torch.Tensor:
    """Pinned where the device is not the host itself: copies to and from pinned memory take the full width of the
    bus.
    """
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type != "cpu")
    return host.copy_(_bytes_of(storage))


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of it, padding included."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
