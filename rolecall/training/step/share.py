"""One rank's share of a batch: its rows read from the store in one go, packed, with the counts of the whole
mini-batches.

Owns the way from row references to microbatches and back into columns. Every public function is a collective of the
command group. What is computed from the microbatches is the services' affair.

Temperature belongs to the trajectory: it is read from each row's meta.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch

from rolecall.algorithms.aggregation import Counts
from rolecall.errors import InvalidInputError
from rolecall.store.rows import Rows
from rolecall.training.account.flops import ModelFlops
from rolecall.training.account.memory import PhaseMemory
from rolecall.training.engine import Microbatch, TokenOutputs, TrainingEngine, ValueOutputs
from rolecall.training.model.logprobs import Wanted
from rolecall.training.packing.pack import RankPlan, Row, local_counts, pack, plan_batch
from rolecall.training.ranks.command_group import CommandGroup
from rolecall.training.serving.column_batcher import row_key
from rolecall.training.serving.hooks import nothing
from rolecall.v1.trajectory_pb2 import RowRef, TrainBatch
from rolecall.wire import Array

READ_TOKENS = 2**20
"""Tokens whose rows are read from the store in one go, about 30 MB: between two of them the rank shows that it moves.
"""


@dataclass(frozen=True)
class Workplace:
    """What a rank computes with, fixed at start."""

    engine: TrainingEngine
    group: CommandGroup
    flops: ModelFlops
    device: torch.device
    token_budget: int
    memory: PhaseMemory
    peak_flops: float | None = None
    """FLOP/s that the device could do at most; None: not known."""
    progressed: Callable[[], None] = nothing
    """Called for every READ_TOKENS read."""

    def plan(self, lengths: Sequence[int], num_minibatches: int, seed: int) -> RankPlan:
        """This rank's part of rows of `lengths` tokens, which is its slot's; every rank comes to the same partition."""
        cost, world_size = self.flops.forward, self.group.num_slots
        plans = plan_batch(
            lengths,
            num_minibatches=num_minibatches,
            token_budget=self.token_budget,
            world_size=world_size,
            cost=cost,
            seed=seed,
        )
        return plans[self.group.slot]


@dataclass(frozen=True, kw_only=True)
class Bench(Workplace):
    """And what it works on."""

    rows: Rows


@dataclass
class Minibatch:
    """What one optimizer step is computed from, on this rank."""

    microbatches: list[Microbatch]
    counts: Counts
    """Of the whole mini-batch, all ranks."""

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
    """In the order of the plan."""
    minibatches: list[Minibatch]
    num_tokens: int
    """Of the whole batch."""

    @property
    def microbatches(self) -> list[Microbatch]:
        """All of them, mini-batch after mini-batch."""
        return [microbatch for minibatch in self.minibatches for microbatch in minibatch.microbatches]


class Derive(Protocol):
    """Adds columns of the role's own to a row before it is packed."""

    def __call__(self, row: dict[str, Array], ref: RowRef) -> Mapping[str, Array]:
        """The new per-token columns of `row`, which is that of `ref`."""


def read_share(
    bench: Bench,
    batch: TrainBatch,
    columns: Sequence[str],
    num_minibatches: int,
    seed: int,
    *,
    optional: str | None = None,
    derive: Derive | None = None,
) -> TrainShare:
    """This rank's share of `batch` with `columns` (beside token_ids and response_mask) packed, and what `derive` adds
    to them.

    The column `optional` is packed, on all ranks, when every row of the batch holds it. RowMissingError on every rank
    when a row or column is gone.
    """
    plan = bench.plan([row.num_tokens for row in batch.rows], num_minibatches, seed)
    refs = [batch.rows[index] for index in plan.rows]
    wanted = list(dict.fromkeys(["token_ids", "response_mask", *columns]))
    read, temperatures = _read(bench, refs, wanted, [optional] if optional else [])
    num_lacking = bench.group.sum(np.array([sum(optional not in row for row in read)]))[0]
    derived = [derive(row, ref) for row, ref in zip(read, refs, strict=True)] if derive is not None else []
    for row, more in zip(read, derived, strict=False):
        row.update(more)
    packed_columns = [*columns, *(derived[0] if derived else ()), *([optional] if optional and not num_lacking else [])]
    by_index = dict(zip(plan.rows, zip(read, temperatures, strict=True), strict=True))
    own = [
        local_counts([by_index[i][0] for indices in microbatches for i in indices]) for microbatches in plan.minibatches
    ]
    totals = bench.group.sum_over_slots(np.array([[counts.num_tokens, counts.num_sequences] for counts in own]))
    minibatches = []
    for microbatches, (num_tokens, num_sequences) in zip(plan.minibatches, totals, strict=True):
        packed = [_pack(bench, [by_index[i] for i in indices], packed_columns) for indices in microbatches]
        minibatches.append(Minibatch(packed, Counts(int(num_tokens), int(num_sequences))))
    return TrainShare(read, minibatches, sum(row.num_tokens for row in batch.rows))


def compute_column(
    bench: Bench,
    refs: Sequence[RowRef],
    names: Sequence[str],
    encode: Callable[[Microbatch, TokenOutputs | ValueOutputs], list[dict[str, Array]]],
    wanted: Wanted | None = None,
) -> frozenset[str]:
    """Computes and writes the columns `names` of `refs`; the keys of the rows that held them before, on every rank.

    `encode` turns a microbatch's outputs into the columns of its rows, in order; `wanted` is what of them it needs
    beside logprobs. Rows that hold the columns are left out of the computation.
    """
    plan = bench.plan([ref.num_tokens for ref in refs], 1, 0)
    mine = [refs[index] for index in plan.rows]
    read, temperatures = _read(bench, mine, ["token_ids", "response_mask"], names)
    by_index = dict(zip(plan.rows, zip(read, temperatures, strict=True), strict=True))
    seen = "\n".join(row_key(refs[index]) for index, (row, _) in by_index.items() if all(name in row for name in names))
    # agreed: a slot computes the same rows
    held = frozenset(key for part in bench.group.gather(seen.encode()) for key in part.decode().split("\n") if key)
    todo = [tuple(index for index in indices if row_key(refs[index]) not in held) for indices in plan.microbatches]
    packed = [_pack(bench, [by_index[i] for i in indices], ()) for indices in todo]
    outputs = bench.engine.forward(packed, wanted=wanted)
    encoded = [
        columns for microbatch, output in zip(packed, outputs, strict=True) for columns in encode(microbatch, output)
    ]
    written = [refs[index] for indices in todo for index in indices]
    bench.group.agree(lambda: bench.rows.put(written, encoded) if bench.group.speaks else None)
    return held


def _pack(bench: Bench, rows: Sequence[tuple[Row, float]], columns: Sequence[str]) -> Microbatch:
    return pack(
        [row for row, _ in rows], columns, temperature=[temperature for _, temperature in rows], device=bench.device
    )


def _read(
    bench: Bench, refs: Sequence[RowRef], columns: Sequence[str], optional: Sequence[str]
) -> tuple[list[dict[str, Array]], list[float]]:
    return bench.group.agree(lambda: _read_own(bench, refs, columns, optional))


def _read_own(
    bench: Bench, refs: Sequence[RowRef], columns: Sequence[str], optional: Sequence[str]
) -> tuple[list[dict[str, Array]], list[float]]:
    rows: list[dict[str, Array]] = []
    temperatures: list[float] = []
    for part in _parts(refs):
        read, metas = bench.rows.read_with_meta(part, columns, optional)
        rows += read
        for ref, meta in zip(part, metas, strict=True):
            if meta.sampling.temperature == 0:
                raise InvalidInputError(
                    f"row {ref.id} was sampled at temperature 0: a greedy response is a baseline, and nothing is "
                    "trained on it"
                )
            temperatures.append(meta.sampling.temperature)
        bench.progressed()
    return rows, temperatures


def _parts(refs: Sequence[RowRef]) -> Iterator[Sequence[RowRef]]:
    """`refs` in order, cut into parts of at most READ_TOKENS, or one row."""
    start = num_tokens = 0
    for index, ref in enumerate(refs):
        if index > start and num_tokens + ref.num_tokens > READ_TOKENS:
            yield refs[start:index]
            start, num_tokens = index, 0
        num_tokens += ref.num_tokens
    if start < len(refs):
        yield refs[start:]
