"""Parts of an engine's state while they wait in host memory: their device memory is given back, and later filled again
in place.

A tensor keeps its identity: its storage shrinks to nothing and grows back, so that parameters, DTensors, views that
FSDP holds and the optimizer's state stay the same objects. In between nobody may read one: the engine brings back what
a call needs first. The same on CPUs, where it moves memory but frees none. Only storages that were once seen as numpy
arrays, as by a publish, cannot shrink there, and stay where they are.
"""

from collections.abc import Callable, Iterable, Mapping

import torch

from rolecall.training.engine import StatePart
from rolecall.training.serving.hooks import nothing


class HostCopies:
    """The parts of the state that are in host memory now. Used by one thread at a time."""

    def __init__(self, progressed: Callable[[], None] = nothing) -> None:
        """`progressed` is called after each tensor's copy: all together may take as long as a pass."""
        self._progressed = progressed
        self._copies: dict[StatePart, dict[str, tuple[torch.UntypedStorage, torch.Tensor]]] = {}

    def take(self, part: StatePart, tensors: Mapping[str, torch.Tensor]) -> None:
        """Copies `tensors` of the part (local ones, by name) to the host and frees their memory, but for those that are
        there already.
        """
        copies = self._copies.setdefault(part, {})
        for name, tensor in tensors.items():
            storage = tensor.untyped_storage()
            if storage.nbytes() and (storage.resizable() or storage.device.type != "cpu"):
                copies[name] = (storage, _to_host(storage))
                storage.resize_(0)
                self._progressed()

    def give_back(self, part: StatePart, names: Iterable[str] | None = None) -> None:
        """Brings those of the part back that are on the host, all where none is named."""
        copies = self._copies.get(part, {})
        for name in list(copies) if names is None else names:
            if name in copies:
                storage, copy = copies.pop(name)
                storage.resize_(copy.numel())
                _bytes_of(storage).copy_(copy)
                self._progressed()

    def drop(self, part: StatePart) -> None:
        """Forgets what is on the host of a part whose tensors nobody has any more."""
        self._copies.pop(part, None)

    def lying(self, part: StatePart, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Returns `tensor`, or, while it is on the host, what lies there of it: what is changed in that comes back."""
        if name not in self._copies.get(part, {}):
            return tensor
        _, copy = self._copies[part][name]
        there = torch.empty(0, dtype=tensor.dtype)
        return there.set_(copy.untyped_storage(), tensor.storage_offset(), tensor.shape, tensor.stride())

    def num_bytes(self, parts: Iterable[StatePart]) -> int:
        """Bytes that giving `parts` back takes on the device."""
        return sum(copy.numel() for part in parts for _, copy in self._copies.get(part, {}).values())


def _to_host(storage: torch.UntypedStorage) -> torch.Tensor:
    """Pinned where the device is not the host itself: copies to and from pinned memory take the full width of the
    bus.
    """
    host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type != "cpu")
    return host.copy_(_bytes_of(storage))


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of it, padding included."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
