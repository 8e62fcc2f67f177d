"""The manifest and the bucket plan that both sides derive from it."""

from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolecall.errors import InvalidInputError, WeightsMismatchError
from rolecall.v1 import weights_pb2
from rolecall.weights.manifest import ALIGNMENT, build_manifest, plan_buckets, validate_manifest

_DTYPES = [torch.bfloat16, torch.float32, torch.float16, torch.uint8, torch.float64]
_TENSORS = st.lists(
    st.tuples(st.sampled_from(_DTYPES), st.lists(st.integers(0, 9), max_size=3)), min_size=1, max_size=30
)


@given(_TENSORS, st.integers(1, 600))
def test_buckets_hold_every_tensor_once_in_order_aligned_and_within_the_bound(
    tensors: list[tuple[torch.dtype, list[int]]], bucket_bytes: int
) -> None:
    manifest = build_manifest(
        ((f"w{i}", torch.empty(shape, dtype=dtype, device="meta")) for i, (dtype, shape) in enumerate(tensors)),
        bucket_bytes,
    )
    buckets = plan_buckets(manifest)
    slots = [slot for bucket in buckets for slot in bucket.slots]
    assert [(slot.name, slot.dtype, list(slot.shape)) for slot in slots] == [
        (f"w{i}", dtype, shape) for i, (dtype, shape) in enumerate(tensors)
    ]
    for bucket in buckets:
        end = 0
        for slot in bucket.slots:
            assert slot.offset % ALIGNMENT == 0
            assert slot.offset >= end
            assert slot.num_bytes == prod(slot.shape) * slot.dtype.itemsize
            end = slot.offset + slot.num_bytes
        assert end <= bucket.num_bytes < end + ALIGNMENT
        assert end <= bucket_bytes or len([slot for slot in bucket.slots if slot.num_bytes]) == 1


def test_a_slot_is_a_view_of_its_bucket() -> None:
    manifest = build_manifest([("a", torch.empty(3, dtype=torch.bfloat16)), ("b", torch.empty(2, 2))], 1024)
    (bucket,) = plan_buckets(manifest)
    memory = torch.zeros(bucket.num_bytes, dtype=torch.uint8)
    bucket.slots[1].view(memory).copy_(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    assert bucket.slots[1].view(memory).tolist() == [[1.0, 2.0], [3.0, 4.0]]
    assert bucket.slots[0].view(memory).tolist() == [0.0, 0.0, 0.0]


def test_a_tensor_that_is_not_what_the_manifest_says_is_refused() -> None:
    (bucket,) = plan_buckets(build_manifest([("a", torch.empty(2, 3))], 1024))
    slot = bucket.slots[0]
    slot.check("a", torch.empty(2, 3))
    for name, tensor in [
        ("b", torch.empty(2, 3)),
        ("a", torch.empty(3, 2)),
        ("a", torch.empty(2, 3, dtype=torch.float16)),
    ]:
        with pytest.raises(WeightsMismatchError, match="the manifest has a"):
            slot.check(name, tensor)


def test_a_name_that_comes_twice_and_a_dtype_outside_the_contract_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="twice"):
        build_manifest([("a", torch.empty(1)), ("a", torch.empty(1))], 1024)
    with pytest.raises(InvalidInputError, match="complex64"):
        build_manifest([("a", torch.empty(1, dtype=torch.complex64))], 1024)


def test_an_empty_or_unreadable_manifest_is_refused() -> None:
    with pytest.raises(InvalidInputError, match="empty"):
        validate_manifest(weights_pb2.WeightManifest(bucket_bytes=1024))
    unknown = weights_pb2.ParameterSpec(name="a", dtype=99, shape=[1])  # type: ignore[arg-type]
    with pytest.raises(InvalidInputError, match="same release"):
        validate_manifest(weights_pb2.WeightManifest(parameters=[unknown], bucket_bytes=1024))
