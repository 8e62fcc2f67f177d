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
from rolecall.v1.trajectory_pb2 import Images
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
    first: int = 0
    """The number of its first segment in the row."""

    @property
    def num_tokens(self) -> int:
        """Tokens of all its segments."""
        return sum(self.lengths)

    def segments(self, row: Mapping[str, Array]) -> Iterator[dict[str, Array]]:
        """Each segment's own columns: per-token ones, which are all that `row` may have beside its images."""
        start, images = self.start, self._images(row)
        for number, length in enumerate(self.lengths):
            own = slice(start, start + length)
            shown = {} if images is None else {IMAGES: images[number]}
            yield {**{name: array[own] for name, array in row.items() if name != IMAGES}, **shown}
            start += length

    def _images(self, row: Mapping[str, Array]) -> Sequence[Array] | None:
        """The column IMAGES of each segment; None where `row` has none."""
        if IMAGES not in row:
            return None
        images = Images.FromString(row[IMAGES].tobytes())
        if not images.segments:
            return [row[IMAGES]] * len(self.lengths)
        shown = images.segments[self.first : self.first + len(self.lengths)]
        own = [Images(files=[images.files[index] for index in each.files]) for each in shown]
        return [np.frombuffer(each.SerializeToString(), np.uint8) for each in own]


def whole(num_tokens: Sequence[int]) -> list[Piece]:
    """Rows of one segment each, of these lengths."""
    return [Piece(row, 0, (length,)) for row, length in enumerate(num_tokens)]


def cut(segments: Sequence[Sequence[int]], token_budget: int, *, between_segments: bool) -> list[Piece]:
    """Rows, by the lengths of their segments, in pieces of at most token_budget tokens, or one longer segment; where
    not `between_segments`, in one piece each.
    """
    pieces = []
    for row, lengths in enumerate(segments):
        start, first, taken = 0, 0, list[int]()
        for length in lengths:
            if between_segments and taken and sum(taken) + length > token_budget:
                pieces.append(Piece(row, start, tuple(taken), first))
                start, first, taken = start + sum(taken), first + len(taken), []
            taken.append(length)
        pieces.append(Piece(row, start, tuple(taken), first))
    return pieces


def join(segments: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """The columns of a row from those of its segments in order. Of a column that is not per token: the last one's."""
    return {
        name: np.concatenate([segment[name] for segment in segments]) if column(name).per_token else array
        for name, array in segments[-1].items()
    }
