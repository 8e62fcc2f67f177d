"""One rank's share of a batch: its rows read from the store, packed, with the counts of the whole mini-batches.

Owns the way from row references to microbatches and back into columns. Every public function is a collective of the
command group. The services decide what is computed from the microbatches.

Temperature belongs to the trajectory: it is read from each row's meta.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol

import numpy as np
import torch

from rolecall.algorithms.aggregation import Counts
from rolecall.columns import IMAGES
from rolecall.errors import InvalidInputError
from rolecall.training.engine import Microbatch, TokenOutputs, ValueOutputs
from rolecall.training.model.logits.logprobs import Wanted
from rolecall.training.packing.images import ReadImages
from rolecall.training.packing.pack import Row, local_counts, pack
from rolecall.training.packing.pieces import Piece, cut, join
from rolecall.training.packing.plan import RankPlan
from rolecall.training.serving.column_batcher import row_key
from rolecall.training.step.rank_context import StoreRankContext
from rolecall.trajectory import segment_lengths
from rolecall.v1.trajectory_pb2 import RowRef, TrainBatch
from rolecall.wire import Array


@dataclass
class Minibatch:
    """The microbatches of one optimizer step on this rank."""

    microbatches: list[Microbatch]
    counts: Counts
    """Counts of the whole mini-batch, all ranks."""

    def has(self, name: str) -> bool:
        """Whether its microbatches hold the column `name`."""
        return all(name in each.columns for each in self.microbatches)

    def add_column(self, name: str, columns_N: Sequence[torch.Tensor]) -> None:
        """Gives its microbatches one more column; `columns_N` are of those that are not empty, in order."""
        source = iter(columns_N)
        empty = torch.zeros(0)
        self.microbatches = [
            replace(each, columns={**each.columns, name: next(source) if each.lengths else empty})
            for each in self.microbatches
        ]


@dataclass
class TrainShare:
    """A rank's share of a sealed batch."""

    rows: list[dict[str, Array]]
    """Rows in the order of the plan; a trajectory's number in `Microbatch.trajectories` is its place here."""
    minibatches: list[Minibatch]
    num_tokens: int
    """Tokens of the whole batch."""
    refs: Sequence[RowRef] = ()
    """The references of `rows`."""

    @property
    def microbatches(self) -> list[Microbatch]:
        """All of them, mini-batch after mini-batch."""
        return [microbatch for minibatch in self.minibatches for microbatch in minibatch.microbatches]


class Derive(Protocol):
    """Adds columns of the role's own to a row before it is packed."""

    def __call__(self, row: dict[str, Array], ref: RowRef) -> Mapping[str, Array]:
        """The new per-token columns of `row`, which is that of `ref`."""


def read_share(
    context: StoreRankContext,
    batch: TrainBatch,
    columns: Sequence[str],
    num_minibatches: int,
    seed: int,
    *,
    optional: Sequence[str] = (),
    derive: Derive | None = None,
    between_segments: bool = True,
    by_prompt: bool = True,
) -> TrainShare:
    """This rank's share of `batch` with `columns` (beside token_ids and response_mask) packed, and what `derive` adds
    to them.

    The columns `optional` are packed, on all ranks, when every row of the batch holds all of them. A row above the
    token budget is cut `between_segments`; else it has a microbatch of its own. `by_prompt`: responses to one prompt
    stay together; else rows are drawn freely. RowMissingError on every rank when a row or column is gone.
    """
    pieces = cut([segment_lengths(ref) for ref in batch.rows], context.token_budget, between_segments=between_segments)
    plan = context.plan(pieces, num_minibatches, seed, _prompts_of(batch.rows) if by_prompt else ())
    mine = _rows_of(plan, pieces)
    refs = [batch.rows[index] for index in mine]
    wanted = list(dict.fromkeys(["token_ids", "response_mask", *columns, *_shown(context)]))
    read, temperatures = _read(context, refs, wanted, optional)
    num_lacking = context.group.sum(np.array([sum(not row.keys() >= set(optional) for row in read)]))[0]
    derived = [derive(row, ref) for row, ref in zip(read, refs, strict=True)] if derive is not None else []
    for row, more in zip(read, derived, strict=False):
        row.update(more)
    packed_columns = [*columns, *(derived[0] if derived else ()), *(() if num_lacking else optional)]
    rows = _RowsRead(pieces, mine, read, temperatures)
    own = [rows.counts([i for indices in microbatches for i in indices]) for microbatches in plan.minibatches]
    totals = context.group.sum_over_slots(np.array([[counts.num_tokens, counts.num_sequences] for counts in own]))
    packed = iter(rows.packed(context, plan.microbatches, packed_columns))
    minibatches = [
        Minibatch(list(islice(packed, len(microbatches))), Counts(int(num_tokens), int(num_sequences)))
        for microbatches, (num_tokens, num_sequences) in zip(plan.minibatches, totals, strict=True)
    ]
    for row in read:
        row.pop(IMAGES, None)  # they are in the microbatches
    return TrainShare(read, minibatches, sum(row.num_tokens for row in batch.rows), refs)


def compute_column(
    context: StoreRankContext,
    refs: Sequence[RowRef],
    names: Sequence[str],
    encode: Callable[[Microbatch, TokenOutputs | ValueOutputs], list[dict[str, Array]]],
    wanted: Wanted | None = None,
    reads: Sequence[str] = (),
) -> frozenset[str]:
    """Computes and writes the columns `names` of `refs`; the keys of the rows that held them before, on every rank.

    `encode` turns a microbatch's outputs into the columns of its rows, in order; `wanted` is what of them it needs
    beside logprobs. The engine gets the columns `reads`, too. Rows that hold the columns are left out of the
    computation.
    """
    pieces = cut([segment_lengths(ref) for ref in refs], context.token_budget, between_segments=True)
    plan = context.plan(pieces, 1, 0, _prompts_of(refs))
    mine = _rows_of(plan, pieces)
    wanted_columns = ["token_ids", "response_mask", *reads, *_shown(context)]
    read, temperatures = _read(context, [refs[index] for index in mine], wanted_columns, names)
    rows = _RowsRead(pieces, mine, read, temperatures)
    keys = {index: row_key(refs[index]) for index in mine}
    seen = "\n".join(keys[i] for i, row in zip(mine, read, strict=True) if all(name in row for name in names))
    # agreed: a slot computes the same rows
    held = frozenset(key for part in context.group.gather(seen.encode()) for key in part.decode().split("\n") if key)
    todo = [tuple(i for i in indices if keys[pieces[i].row] not in held) for indices in plan.microbatches]
    packed = rows.packed(context, todo, reads)
    outputs = context.engine.forward(packed, wanted=wanted)
    computed = [each for pair in zip(packed, outputs, strict=True) for each in encode(*pair)]
    written = rows.joined([i for indices in todo for i in indices], computed)
    writing = context.rows.put_by_calls([refs[index] for index in written], list(written.values()))
    calls = (None for _ in writing) if context.group.is_slot_leader else ()
    context.group.agree_on_pieces(calls, context.progressed)
    return held


@dataclass(frozen=True)
class _RowsRead:
    """The rows that a rank read, as the pieces that it packs."""

    pieces: Sequence[Piece]
    """The pieces of the whole batch."""
    numbers: Sequence[int]
    """The rows' numbers in the batch."""
    rows: Sequence[Row]
    temperatures: Sequence[float]

    def packed(
        self, context: StoreRankContext, microbatches: Sequence[Sequence[int]], columns: Sequence[str]
    ) -> list[Microbatch]:
        """The pieces of each of `microbatches`, packed; a collective, for an image may be unreadable on one rank. Each
        distinct image is read once.
        """
        images = None if context.images is None else ReadImages(context.images)
        packed: list[Microbatch] = []

        def pieces() -> Iterator[None]:
            if images is not None:
                for row in self.rows:
                    images.check(row)
            for indices in microbatches:
                segments, places = self._segments(indices)
                if images is not None:
                    yield from images.read(segments)
                packed.append(
                    pack(
                        segments,
                        columns,
                        temperature=[self.temperatures[place] for place in places],
                        device=context.device,
                        trajectories=places,
                        images=images,
                    )
                )
                yield

        context.group.agree_on_pieces(pieces(), context.progressed)
        return packed

    def counts(self, indices: Sequence[int]) -> Counts:
        """Counts what is trained of the pieces `indices`."""
        # without images: segments that show unlike ones have copies of the files, here those of a whole mini-batch
        text = [{name: array for name, array in row.items() if name != IMAGES} for row in self.rows]
        segments, places = replace(self, rows=text)._segments(indices)
        return local_counts(segments, trajectories=places)

    def joined(self, indices: Sequence[int], computed: Sequence[Row]) -> dict[int, dict[str, Array]]:
        """Columns of rows, by number, from those `computed` of every segment of the pieces `indices`, in order."""
        found: dict[int, dict[int, Row]] = {}
        source = iter(computed)
        for piece in (self.pieces[index] for index in indices):
            starts = np.cumsum([piece.start, *piece.lengths[:-1]]).tolist()
            found.setdefault(piece.row, {}).update((start, next(source)) for start in starts)
        return {row: join([parts[start] for start in sorted(parts)]) for row, parts in found.items()}

    def _segments(self, indices: Sequence[int]) -> tuple[list[Row], list[int]]:
        """The segments of the pieces `indices`, each with the place of its row."""
        place_of = {number: place for place, number in enumerate(self.numbers)}
        segments, places = list[Row](), list[int]()
        for piece in (self.pieces[index] for index in indices):
            place = place_of[piece.row]
            segments += piece.segments(self.rows[place])
            places += [place] * len(piece.lengths)
        return segments, places


def _shown(context: StoreRankContext) -> tuple[str, ...]:
    """Names of the columns by which prompts show images in this run."""
    return () if context.images is None else (IMAGES,)


def _prompts_of(refs: Sequence[RowRef]) -> list[str]:
    """The group of each row: its id is "<gid>/<i>"."""
    return [ref.id.rpartition("/")[0] for ref in refs]


def _rows_of(plan: RankPlan, pieces: Sequence[Piece]) -> list[int]:
    """Numbers of the rows that this rank computes, in the order of their first pieces."""
    return list(dict.fromkeys(pieces[index].row for index in plan.rows))


def _read(
    context: StoreRankContext, refs: Sequence[RowRef], columns: Sequence[str], optional: Sequence[str]
) -> tuple[list[dict[str, Array]], list[float]]:
    rows, temperatures = list[dict[str, Array]](), list[float]()

    def pieces() -> Iterator[None]:
        for found in context.rows.read_by_calls(refs, columns, optional):
            for row, meta in found:
                if meta.sampling.temperature == 0:
                    raise InvalidInputError(
                        f"row {refs[len(rows)].id} was sampled at temperature 0: a greedy response is a baseline, and "
                        "nothing is trained on it"
                    )
                rows.append(row)
                temperatures.append(meta.sampling.temperature)
            yield

    context.group.agree_on_pieces(pieces(), context.progressed)
    return rows, temperatures
