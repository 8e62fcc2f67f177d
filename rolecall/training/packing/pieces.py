"""The way from a row to what is computed of it at a time: segments, and pieces of them.

A row has one segment, or several (rolecall/v1 RowRef.segment_starts): sequences of their own, whose positions and
attention begin anew. A piece is what of a row stands in one microbatch: all of it where that fits the budget, so that
what segments begin with alike is computed once and whatever is asked of a trajectory is answered in one place; else
runs of its segments.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rolecall.columns import IMAGES, column
from rolecall.wire import Array


@dataclass(frozen=True)
class Piece:
    """Segments of one row, one after another, that are computed in the same microbatch."""

    row: int
    """The row's number in its batch."""
    start: int
    """Where in the row it begins, in tokens."""
    lengths: tuple[int, ...]
    """Tokens of each segment."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all its segments."""
        return sum(self.lengths)

    def segments(self, row: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
        """Each segment's own columns: per-token ones, which are all that `row` may have beside its images."""
        start = self.start
        for length in self.lengths:
            own = slice(start, start + length)
            yield {name: array if name == IMAGES else array[own] for name, array in row.items()}
            start += length


def whole(num_tokens: Sequence[int]) -> list[Piece]:
    """Rows of one segment each, of these lengths."""
    return [Piece(row, 0, (length,)) for row, length in enumerate(num_tokens)]


def cut(segments: Sequence[Sequence[int]], token_budget: int, *, between_segments: bool) -> list[Piece]:
    """Rows, by the lengths of their segments, in pieces of at most token_budget tokens, or one longer segment; where
    not `between_segments`, in one piece each.
    """
    pieces = []
    for row, lengths in enumerate(segments):
        start, taken = 0, list[int]()
        for length in lengths:
            if between_segments and taken and sum(taken) + length > token_budget:
                pieces.append(Piece(row, start, tuple(taken)))
                start, taken = start + sum(taken), []
            taken.append(length)
        pieces.append(Piece(row, start, tuple(taken)))
    return pieces


def join(segments: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """The columns of a row from those of its segments in order. Of a column that is not per token: the last one's."""
    return {
        name: np.concatenate([segment[name] for segment in segments]) if column(name).per_token else array
        for name, array in segments[-1].items()
    }
