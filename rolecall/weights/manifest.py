"""The manifest: what one transfer carries, and how it is cut into buckets.

Owns the mapping between torch dtypes and the contract's, and the bucket plan, which both sides derive from the manifest
alone.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch

from rolecall.errors import InvalidInputError, WeightsMismatchError
from rolecall.v1 import tensor_pb2, weights_pb2

ALIGNMENT = 16
"""Every tensor starts at a multiple of this in its bucket: enough for any dtype's view and for vectorised copies."""
_DTYPES: dict[int, torch.dtype] = {
    tensor_pb2.DTYPE_UINT8: torch.uint8,
    tensor_pb2.DTYPE_INT16: torch.int16,
    tensor_pb2.DTYPE_INT32: torch.int32,
    tensor_pb2.DTYPE_INT64: torch.int64,
    tensor_pb2.DTYPE_FLOAT16: torch.float16,
    tensor_pb2.DTYPE_BFLOAT16: torch.bfloat16,
    tensor_pb2.DTYPE_FLOAT32: torch.float32,
    tensor_pb2.DTYPE_FLOAT64: torch.float64,
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Slot:
    """The place of one tensor in its bucket."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int
    """Byte of the bucket that it starts at."""
    num_bytes: int

    def view(self, bucket: torch.Tensor) -> torch.Tensor:
        """The tensor as a view of `bucket` (uint8 [bucket bytes])."""
        return bucket[self.offset : self.offset + self.num_bytes].view(self.dtype).view(self.shape)

    def check(self, name: str, tensor: torch.Tensor) -> None:
        """WeightsMismatchError unless (name, tensor) is what the manifest says comes here."""
        if (name, tensor.dtype, tuple(tensor.shape)) != (self.name, self.dtype, self.shape):
            raise WeightsMismatchError(
                f"the model yields {name} {tensor.dtype} {list(tensor.shape)} where the manifest has {self.name} "
                f"{self.dtype} {list(self.shape)}; "
                "named_weights must keep its order, names and shapes"
            )


@dataclass(frozen=True)
class Bucket:
    """Tensors that travel in one broadcast."""

    slots: tuple[Slot, ...]
    num_bytes: int


def build_manifest(
    weights: Iterable[tuple[str, torch.Tensor]],
    bucket_bytes: int,
    adapter: weights_pb2.LoraAdapter | None = None,
    *,
    deltas: bool = False,
) -> weights_pb2.WeightManifest:
    """The manifest of `weights` in their order, consuming the iterator; meta tensors will do. With `adapter` they are
    LoRA tensors by peft's names. `deltas`: where there is a wire, what did not change stays at home.

    InvalidInputError for a name that comes twice (a tied tensor is sent once) or a dtype outside the contract.
    """
    manifest = weights_pb2.WeightManifest(bucket_bytes=bucket_bytes, adapter=adapter, deltas=deltas)
    for name, tensor in weights:
        if tensor.dtype not in _CODES:
            raise InvalidInputError(
                f"{name}: dtype {tensor.dtype} does not travel on the weight channel; publish in one of "
                f"{sorted(map(str, _CODES))}"
            )
        manifest.parameters.add(name=name, dtype=_CODES[tensor.dtype], shape=tensor.shape)
    validate_manifest(manifest)
    return manifest


def validate_manifest(manifest: weights_pb2.WeightManifest) -> None:
    """InvalidInputError unless every parameter has a name of its own, a known dtype and a shape, and the bucket size is
    positive.
    """
    seen: set[str] = set()
    for spec in manifest.parameters:
        if not spec.name or spec.name in seen:
            raise InvalidInputError(
                f"the weight manifest names {spec.name!r} twice or not at all; each tensor is sent once, tied ones too"
            )
        if spec.dtype not in _DTYPES or min(spec.shape, default=0) < 0:
            raise InvalidInputError(
                f"the weight manifest gives {spec.name} dtype {spec.dtype} and shape {list(spec.shape)}; both sides "
                "must run the same release"
            )
        seen.add(spec.name)
    if not seen or manifest.bucket_bytes <= 0:
        raise InvalidInputError("the weight manifest is empty or has no bucket size")
    if manifest.HasField("adapter") and (manifest.adapter.rank <= 0 or not manifest.adapter.alpha > 0):
        raise InvalidInputError(
            f"the weight manifest's adapter has rank {manifest.adapter.rank} and alpha {manifest.adapter.alpha}; "
            "both are positive"
        )


def plan_buckets(manifest: weights_pb2.WeightManifest) -> list[Bucket]:
    """Consecutive tensors share a bucket while they fit in bucket_bytes; a larger tensor has a bucket of its own."""
    return list(_cut(manifest))


def _cut(manifest: weights_pb2.WeightManifest) -> Iterator[Bucket]:
    slots: list[Slot] = []
    end = 0
    for spec in manifest.parameters:
        dtype, shape = _DTYPES[spec.dtype], tuple(spec.shape)
        num_bytes = prod(shape) * dtype.itemsize
        if slots and end + num_bytes > manifest.bucket_bytes:
            yield Bucket(tuple(slots), end)
            slots, end = [], 0
        slots.append(Slot(spec.name, dtype, shape, end, num_bytes))
        end += -(-num_bytes // ALIGNMENT) * ALIGNMENT
    yield Bucket(tuple(slots), end)
