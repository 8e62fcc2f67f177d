"""The part of a full tensor that a rank keeps, as a start and a shape: what loading, publishing and checkpoints know of
layouts.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch.distributed.tensor import DTensor


def local_part(tensor: torch.Tensor) -> torch.Tensor:
    """Returns the part of `tensor` that this rank keeps, in the same memory: itself where it is no DTensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Gathers all parts of `tensor`, a collective of those that keep one; itself where it is no DTensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


@dataclass(frozen=True)
class Box:
    """A part of a full tensor: `shape` elements from `start`, per dimension. May be empty."""

    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Self:
        """Returns the part of `tensor` that this rank keeps, in local_part(): of a DTensor cut by tensor parallelism
        first, what is left by FSDP, so from the innermost mesh dimension; of any other tensor all of it.
        """
        start, shape = [0] * tensor.ndim, list(tensor.shape)
        if not isinstance(tensor, DTensor):
            return cls(tuple(start), tuple(shape))
        coordinate = tensor.device_mesh.get_coordinate()
        assert coordinate is not None
        for mesh_dim in reversed(range(tensor.device_mesh.ndim)):
            placement = tensor.placements[mesh_dim]
            if placement.is_replicate():
                continue
            dim = placement.dim  # type: ignore[attr-defined]  # Shard and its strided kind; parameters are never partial
            chunk = -(-shape[dim] // tensor.device_mesh.size(mesh_dim))
            before = min(chunk * coordinate[mesh_dim], shape[dim])
            start[dim] += before
            shape[dim] = min(chunk, shape[dim] - before)
        return cls(tuple(start), tuple(shape))

    @property
    def empty(self) -> bool:
        """Whether there is nothing in it."""
        return 0 in self.shape

    @property
    def slices(self) -> tuple[slice, ...]:
        """The slices that cut the part from the full tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.start, self.shape, strict=True))

    def within(self, other: "Box") -> "Box | None":
        """Returns the part that both hold, in coordinates of the full tensor; None when there is none."""
        start = [max(a, b) for a, b in zip(self.start, other.start, strict=True)]
        ends = zip(self.start, self.shape, other.start, other.shape, strict=True)
        shape = [min(a + size_a, b + size_b) - low for low, (a, size_a, b, size_b) in zip(start, ends, strict=True)]
        return Box(tuple(start), tuple(shape)) if min(shape, default=1) > 0 else None

    def relative_to(self, outer: Sequence[int]) -> "Box":
        """The same part counted from `outer`, the start of a box that holds it."""
        return Box(tuple(own - base for own, base in zip(self.start, outer, strict=True)), self.shape)
