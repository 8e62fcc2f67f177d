"""The codec of deltas, beside a slow one: what is applied is what was encoded, bit for bit, whatever the bits mean."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rolecall.errors import WeightsMismatchError
from rolecall.weights.deltas.codec import MORE, Bytes, Delta, apply, encode

WORDS = (1, 2, 4, 8)


def slow_places(before: Bytes, after: Bytes, word_bytes: int) -> bytes:
    """The places of a delta, word by word: gaps, or a bit for each word where that is not longer."""
    count = len(after) // word_bytes
    cut = [slice(i * word_bytes, (i + 1) * word_bytes) for i in range(count)]
    changed = [bytes(before[part]) != bytes(after[part]) for part in cut]
    gaps, gap = bytearray(), 0
    for is_changed in changed:
        if not is_changed:
            gap += 1
            continue
        while gap >= MORE:
            gaps.append(MORE)
            gap -= MORE
        gaps.append(gap)
        gap = 0
    bits = "".join(str(int(one)) for one in changed)
    bits += "0" * (-len(bits) % 8)
    as_map = bytes(int(bits[i : i + 8], 2) for i in range(0, len(bits), 8))
    return bytes(gaps) if len(gaps) < len(as_map) else as_map


def round_trip(before: Bytes, after: Bytes, word_bytes: int) -> Delta | None:
    """Encodes and, where there is a delta, applies it and looks at every byte."""
    delta = encode(before, after, word_bytes)
    if delta is not None:
        assert len(delta.data) < len(after)
        held = before.copy()
        apply(held, delta, word_bytes)
        assert bytes(held) == bytes(after)
    return delta


@st.composite
def versions(draw: st.DrawFn) -> tuple[Bytes, Bytes, int]:
    """Two versions of a bucket that differ in a drawn share of their words, none and all included."""
    word_bytes = draw(st.sampled_from(WORDS))
    count = draw(st.integers(1, 3000))
    share = draw(st.sampled_from([0.0, 0.0005, 0.01, 0.1, 0.12, 0.13, 0.5, 0.9, 1.0]))
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    before = random.integers(0, 256, count * word_bytes, dtype=np.uint8)
    after = before.copy()
    after.reshape(count, word_bytes)[random.random(count) < share, draw(st.integers(0, word_bytes - 1))] ^= 1
    return before, after, word_bytes


@settings(deadline=None, max_examples=300)
@given(versions())
def test_what_is_applied_is_what_was_encoded_by_the_shorter_form(case: tuple[Bytes, Bytes, int]) -> None:
    before, after, word_bytes = case
    delta = round_trip(before, after, word_bytes)
    places = slow_places(before, after, word_bytes)
    num_changed = int((before.reshape(-1, word_bytes) != after.reshape(-1, word_bytes)).any(axis=1).sum())
    assert (delta is None) == (len(places) + num_changed * word_bytes >= len(after))
    if delta is not None:
        assert delta.num_changed == num_changed
        assert bytes(delta.data[: len(places)]) == places


@pytest.mark.parametrize("gap", [0, 1, 253, 254, 255, 256, 509, 510, 511, 65534, 65535, 65536, 200_000])
@pytest.mark.parametrize("word_bytes", WORDS)
def test_gaps_of_every_length(gap: int, word_bytes: int) -> None:
    before = np.zeros((2 * gap + 400) * word_bytes, np.uint8)
    after = before.copy()
    for word in (gap, 2 * gap + 1):
        after[word * word_bytes] = 7
    delta = round_trip(before, after, word_bytes)
    assert delta is not None
    assert len(delta.data) == 2 * (gap // MORE + 1) + 2 * word_bytes


@pytest.mark.parametrize(
    ("dtype", "bits", "before", "after"),
    [
        (torch.float32, torch.int32, 0.0, -0.0),
        (torch.bfloat16, torch.int16, 0.0, -0.0),
        (torch.float16, torch.int16, -0.0, 0.0),
        (torch.float32, torch.int32, 0x7FC00000, 0x7FC00001),  # NaNs that differ in their payload
        (torch.bfloat16, torch.int16, 0x7FC0, 0x7FC1),
        (torch.float16, torch.int16, 0x7E00, 0x7E01),
        (torch.int8, torch.int8, 1, -128),
    ],
)
def test_bits_are_compared_and_not_numbers(dtype: torch.dtype, bits: torch.dtype, before: float, after: float) -> None:
    def bucket(value: float) -> Bytes:
        tensor = torch.zeros(1000, dtype=dtype)
        tensor[::97] = torch.tensor([value], dtype=bits).view(dtype) if isinstance(value, int) else value
        found: Bytes = tensor.view(torch.uint8).numpy()
        return found

    delta = round_trip(bucket(before), bucket(after), dtype.itemsize)
    assert delta is not None
    assert delta.num_changed == 11
    same = round_trip(bucket(after), bucket(after), dtype.itemsize)
    assert same is not None
    assert same.num_changed == len(same.data) == 0


@pytest.mark.parametrize(
    ("num_changed", "data"),
    [
        (1, [16, 5, 5]),  # a word past the end
        (2, [0, 5, 5, 6, 6]),  # two values and one place
        (9, [0, 5, 5]),  # more values than there are bytes
    ],
)
def test_a_delta_that_is_not_of_the_bucket_is_refused_and_changes_nothing(num_changed: int, data: list[int]) -> None:
    held = np.arange(32, dtype=np.uint8)
    with pytest.raises(WeightsMismatchError, match="16 words"):
        apply(held, Delta(num_changed, np.array(data, np.uint8)), 2)
    assert bytes(held) == bytes(range(32))
