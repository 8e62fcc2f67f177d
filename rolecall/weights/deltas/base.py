"""The base of deltas: the weights that one end of an epoch held after its last whole transfer, in host memory.

Owns that copy, the header that says how a bucket travels, and the rule which copy may be built upon. Each end has one
for each epoch, and it goes with the epoch: a new one begins with whole buckets for everybody, as newcomers need them.
The engine never sees the copy, only buckets of their own memory, so that nothing it keeps or overwrites can spoil it.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from rolecall.errors import WeightsMismatchError
from rolecall.weights.deltas.codec import Bytes, Delta, apply, encode
from rolecall.weights.manifest import Bucket

_NOTHING = 0
"""Mark of a copy that is not whole."""


@dataclass(frozen=True)
class Header:
    """The way of one bucket: three numbers that travel ahead of it."""

    NUM_BYTES: ClassVar[int] = 24
    base: int
    """Mark of the weights that a delta builds upon; 0: the bucket comes whole."""
    num_bytes: int
    """Bytes that follow."""
    num_changed: int
    """Words of the delta."""

    def packed(self) -> torch.Tensor:
        """Returns it as uint8 [NUM_BYTES]."""
        return torch.tensor([self.base, self.num_bytes, self.num_changed]).view(torch.uint8)

    @classmethod
    def of(cls, memory: torch.Tensor) -> "Header":
        """Reads what `packed` wrote."""
        return cls(*memory.view(torch.int64).tolist())


class Base:
    """One end's copy. A transfer calls `begin`, then `delta_of` or `bucket_of` for each bucket in order, then `end`.

    Whoever does not reach `end` has half of two versions, which nothing is built upon.
    """

    def __init__(self) -> None:
        self._buckets: list[Bytes] = []
        self._whole = self._under = _NOTHING

    def begin(self) -> None:
        """Begins a transfer upon what the last one left whole."""
        self._under, self._whole = self._whole, _NOTHING

    def end(self, digest: str) -> None:
        """Ends the transfer: the copy is now of the weights of this digest, which both ends know."""
        self._whole = 1 + int(digest[:15], 16)  # 60 bits: positive, and not _NOTHING

    def delta_of(self, number: int, bucket: Bucket, memory: torch.Tensor) -> tuple[Header, torch.Tensor]:
        """Returns what the root sends of bucket `number`, whose bytes are `memory`: a delta, or `memory` itself where a
        delta is not shorter or there is no base.
        """
        after = memory.numpy()
        delta = encode(self._buckets[number], after, _word_bytes(bucket)) if self._under != _NOTHING else None
        self._keep(number, after)
        if delta is None:
            return Header(_NOTHING, bucket.num_bytes, 0), memory
        return Header(self._under, len(delta.data), delta.num_changed), torch.from_numpy(delta.data)

    def bucket_of(self, number: int, bucket: Bucket, header: Header, memory: torch.Tensor) -> torch.Tensor:
        """Returns the whole bucket `number` to a receiver, in memory of its own, from `memory`, which travelled.
        WeightsMismatchError when that is a delta upon other weights than this end holds.
        """
        if header.base == _NOTHING:
            self._keep(number, memory.numpy())
            return memory
        if header.base != self._under:
            raise WeightsMismatchError(
                "the actor sends what changed since weights that this receiver does not hold; open a new epoch, which "
                "begins with whole weights"
            )
        apply(self._buckets[number], Delta(header.num_changed, memory.numpy()), _word_bytes(bucket))
        return torch.from_numpy(self._buckets[number].copy())

    def _keep(self, number: int, whole: Bytes) -> None:
        if number == len(self._buckets):
            self._buckets.append(np.empty_like(whole))
        self._buckets[number][:] = whole


def _word_bytes(bucket: Bucket) -> int:
    """Bytes of the smallest element in the bucket: a larger one is several words."""
    return min(slot.dtype.itemsize for slot in bucket.slots)
