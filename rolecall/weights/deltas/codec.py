"""The codec of deltas: the words of a bucket whose bits changed, by their places and their values.

Owns the encoding and nothing of who holds what (base.py). It compares bits and computes nothing, so what is applied
equals what was sent whatever the words mean: NaNs keep their payload, and -0.0 is not 0.0. In numpy on host memory, in
the calling thread alone: torch's threads, which meet after every operation, stand still on a busy machine.

A delta is the places, then the values as they are. The places come in the shorter of two forms, told apart by length:

    gaps    for each changed word the number of unchanged words before it, in bytes: MORE stands for MORE words and says
            that the gap goes on, any other byte ends it
    map     a bit for each word of the bucket, the first in the highest bit; gaps are used only where they are shorter
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from rolecall.errors import WeightsMismatchError

MORE = 255
"""Byte of a gap that goes on."""
Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.unsignedinteger]
Where = npt.NDArray[np.bool_] | npt.NDArray[np.int64]


@dataclass(frozen=True)
class Delta:
    """The words that changed between two versions of one bucket."""

    num_changed: int
    data: Bytes
    """Places, then values."""


def encode(before: Bytes, after: Bytes, word_bytes: int) -> Delta | None:
    """Returns what leads from `before` to `after` (uint8 [n] both, n a multiple of `word_bytes`); None where that is
    not shorter than `after`.
    """
    old, new = _words(before, word_bytes), _words(after, word_bytes)
    changed = old != new
    num_changed = int(np.count_nonzero(changed))
    map_bytes = _map_bytes(new)
    if num_changed * word_bytes + min(num_changed, map_bytes) >= len(after):
        return None
    where: Where = changed
    places = np.packbits(changed)
    if num_changed < map_bytes:  # else gaps are no shorter, and positions take much memory
        where = np.flatnonzero(changed)
        gaps = _gaps(where)
        places = gaps if len(gaps) < map_bytes else places
    if num_changed * word_bytes + len(places) >= len(after):
        return None
    return Delta(num_changed, np.concatenate([places, new[where].view(np.uint8)]))


def apply(bucket: Bytes, delta: Delta, word_bytes: int) -> None:
    """Writes the words of `delta` into `bucket`. WeightsMismatchError, with the bucket as it was, when the delta is not
    of such a bucket.
    """
    words = _words(bucket, word_bytes)
    places, values = np.split(delta.data, [max(0, len(delta.data) - delta.num_changed * word_bytes)])
    where: Where
    if len(places) == _map_bytes(words):
        where = np.unpackbits(places, count=len(words)).view(np.bool_)
        num_places, fits = int(np.count_nonzero(where)), True
    else:
        where = _positions(places)
        num_places, fits = len(where), not len(where) or bool(where[-1] < len(words))
    if num_places != delta.num_changed or not fits:
        raise WeightsMismatchError(
            f"a delta names {num_places} places for {delta.num_changed} values in a bucket of {len(words)} words; "
            "both sides must run the same release"
        )
    words[where] = _words(values, word_bytes)


def _words(data: Bytes, word_bytes: int) -> Words:
    words: Words = data.view(f"u{word_bytes}")
    return words


def _map_bytes(words: Words) -> int:
    return -(-len(words) // 8)


def _gaps(positions: npt.NDArray[np.int64]) -> Bytes:
    gaps = np.diff(positions, prepend=-1) - 1
    ends = np.cumsum(gaps // MORE + 1)
    encoded = np.full(ends[-1] if len(ends) else 0, MORE, np.uint8)
    encoded[ends - 1] = gaps % MORE
    return encoded


def _positions(gaps: Bytes) -> npt.NDArray[np.int64]:
    """Every gap counts its own words, and each word before it stands for one more."""
    ends = np.flatnonzero(gaps != MORE)
    return np.cumsum(gaps, dtype=np.int64)[ends] + np.arange(len(ends))
