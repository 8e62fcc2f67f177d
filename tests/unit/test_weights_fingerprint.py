"""Fingerprints notice what a weight channel can get wrong, and are the same number everywhere."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall.v1 import tensor_pb2, weights_pb2
from rolecall.weights.fingerprint import BLOCK, digest, fingerprint, fingerprint_on_device, unsigned

_MASK = 2**64 - 1
_GOLDEN = 0x9E3779B97F4A7C15


def _signed(value: int) -> int:
    return value - 2**64 if value >> 63 else value


def _mix(value: int) -> int:
    mixed = value * _GOLDEN & _MASK
    return mixed ^ (_signed(mixed) >> 32) & _MASK


def _multiplier(position: int, salt: int) -> int:
    value = ((position + 1) * _GOLDEN + salt) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return (value ^ (value >> 31)) | 1


def _oracle(data: bytes) -> int:
    """The fingerprint by its definition, one word after another."""
    padded = data + bytes(-len(data) % 8)
    words = [int.from_bytes(padded[i : i + 8], "little", signed=True) for i in range(0, len(padded), 8)]
    blocks = [words[i : i + BLOCK] for i in range(0, len(words), BLOCK)]
    sums = [sum(_mix(word) * _multiplier(i, 0) for i, word in enumerate(block)) & _MASK for block in blocks]
    mixed = [_mix(value ^ (_signed(value) >> 29) & _MASK) for value in sums]
    total = sum(value * _multiplier(i, 1) for i, value in enumerate(mixed)) & _MASK
    return _mix((total + len(data)) & _MASK)


@given(st.binary(max_size=300))
@settings(deadline=None, max_examples=50)
def test_the_fingerprint_is_what_its_definition_says(data: bytes) -> None:
    assert fingerprint(torch.tensor(list(data), dtype=torch.uint8)) == _oracle(data)


def test_the_fingerprint_of_several_blocks_is_what_its_definition_says() -> None:
    tensor = torch.arange(2 * BLOCK + 17) * 11400714819323198
    assert fingerprint(tensor) == _oracle(tensor.numpy().tobytes())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_swap_of_two_elements_changes_the_fingerprint(dtype: torch.dtype) -> None:
    tensor = torch.randn(64, 48, generator=torch.Generator().manual_seed(0)).to(dtype)
    seen = {fingerprint(tensor)}
    for i in range(0, tensor.numel() - 1, 61):
        swapped = tensor.clone().view(-1)
        swapped[[i, i + 1]] = swapped[[i + 1, i]]
        if not torch.equal(swapped[i], swapped[i + 1]):
            seen.add(fingerprint(swapped))
    assert len(seen) > tensor.numel() // 61


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_negating_transposing_or_shifting_a_tensor_changes_the_fingerprint(dtype: torch.dtype) -> None:
    tensor = torch.randn(96, 96, generator=torch.Generator().manual_seed(1)).to(dtype)
    assert (
        len(
            {
                fingerprint(tensor),
                fingerprint(-tensor),
                fingerprint(tensor.T),
                fingerprint(tensor.roll(1)),
                fingerprint(tensor.roll(1, 0)),
            }
        )
        == 5
    )


def test_every_single_bit_and_every_length_counts() -> None:
    zeros = torch.zeros(256, dtype=torch.uint8)
    seen = {fingerprint(zeros[:length]) for length in range(257)}
    for byte in range(256):
        for bit in range(8):
            flipped = zeros.clone()
            flipped[byte] = 1 << bit
            seen.add(fingerprint(flipped))
    assert len(seen) == 257 + 256 * 8


def test_a_swap_of_two_whole_blocks_changes_the_fingerprint() -> None:
    tensor = torch.randn(6 * BLOCK, generator=torch.Generator().manual_seed(2))
    first, second, third = tensor.view(3, 2 * BLOCK)
    assert fingerprint(tensor) != fingerprint(torch.cat([second, first, third]))


def test_views_with_any_layout_and_offset_have_the_fingerprint_of_their_values() -> None:
    base = torch.randn(65, 33)
    view = base[1:, 1:].T
    assert fingerprint(view) == fingerprint(view.contiguous().clone())
    halves = torch.randn(101).to(torch.bfloat16)
    assert fingerprint(halves[1:]) == fingerprint(halves[1:].clone())


def test_many_fingerprints_are_read_from_the_device_at_once() -> None:
    tensors = [torch.full((5,), float(i)) for i in range(4)]
    assert unsigned(torch.cat([fingerprint_on_device(tensor) for tensor in tensors])) == [
        fingerprint(tensor) for tensor in tensors
    ]


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device: compares the GPU's fingerprint with the CPU's"
)
@pytest.mark.parametrize("num_elements", [1, 3, BLOCK, 200 * BLOCK + 5])
def test_a_gpu_computes_the_fingerprint_that_a_cpu_computes(num_elements: int) -> None:
    tensor = torch.randn(num_elements).to(torch.bfloat16)
    assert fingerprint(tensor.cuda()) == fingerprint(tensor)


def _manifest(*names: str, shape: tuple[int, ...] = (2,)) -> weights_pb2.WeightManifest:
    specs = [weights_pb2.ParameterSpec(name=name, dtype=tensor_pb2.DTYPE_FLOAT32, shape=shape) for name in names]
    return weights_pb2.WeightManifest(parameters=specs, bucket_bytes=1024)


def test_the_digest_depends_on_names_order_shapes_and_fingerprints_but_not_on_buckets() -> None:
    base = digest(_manifest("a", "b"), [1, 2])
    rebucketed = _manifest("a", "b")
    rebucketed.bucket_bytes = 4096
    assert digest(rebucketed, [1, 2]) == base
    others = [
        digest(_manifest("b", "a"), [1, 2]),
        digest(_manifest("a", "b"), [2, 1]),
        digest(_manifest("a", "b", shape=(1, 2)), [1, 2]),
    ]
    assert len({base, *others}) == 4


def test_a_digest_over_too_few_fingerprints_is_refused() -> None:
    with pytest.raises(ValueError, match="zip"):
        digest(_manifest("a", "b"), [1])
