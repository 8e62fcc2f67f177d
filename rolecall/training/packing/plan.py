"""The plan of a batch: which rank computes which trajectory, in which mini-batch and microbatch.

It reads lengths only (they are in the sealed batch), is the same on every rank, and puts no divisibility rule on
anybody: ranks with less to do get empty microbatches, so that all make the same number of collectives. The loss does
not depend on how a mini-batch is spread (see algorithms/aggregation.py), and its rows do not depend on the ranks.

    lengths = [row.num_tokens for row in batch.rows]
    plans = plan_batch(lengths, num_minibatches=2, token_budget=16384, world_size=2, cost=engine.flops.forward,
                       seed=step)
    mine = plans[rank]                                           # mine.rows: what to read from the store
    for microbatches in mine.minibatches:  # each a tuple of microbatches, each a tuple of row indices
        packed = [pack([rows[i] for i in indices], ["advantages", ...], temperature=1.0, device=engine.device)
                  for indices in microbatches]
        # their losses are divided by local_counts, summed over the ranks

Where rows have several segments, what is planned are pieces of rows (pieces.py), and what is packed are segments.

The responses to one prompt begin with it, and in one microbatch it is computed once (model/prefixes.py). So where
prompts are told, a mini-batch takes whole prompts but for those at its ends; and over ranks and microbatches as many
rows of a prompt stay together as leave the ranks in balance (docs/adr/0081-responses-to-a-prompt-stay-together.md).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from rolecall.training.account.flops import CostModel
from rolecall.training.packing.balance import fill, fill_by_group, partition
from rolecall.training.packing.pieces import Piece, whole
from rolecall.wire import Array

SLOWER = 0.02
"""Share of the time that rows spread one by one would take, and of their microbatches, which may be given for keeping
prompts together.
"""

_Microbatches = Sequence[Sequence[Sequence[int]]]
"""[rank][microbatch] -> indices of pieces."""


@dataclass(frozen=True)
class RankPlan:
    """One rank's share of a batch."""

    minibatches: tuple[tuple[tuple[int, ...], ...], ...]
    """[mini-batch][microbatch] -> indices of rows, or of pieces where these were planned; an empty microbatch keeps the
    ranks in step.
    """

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows or pieces that this rank computes, in order; each once."""
        return tuple(row for microbatches in self.minibatches for indices in microbatches for row in indices)

    @property
    def microbatches(self) -> tuple[tuple[int, ...], ...]:
        """All microbatches, mini-batch after mini-batch: for a pass over the whole batch."""
        return tuple(indices for microbatches in self.minibatches for indices in microbatches)


def plan_batch(
    num_tokens: Sequence[int], *, num_minibatches: int, token_budget: int, world_size: int, cost: CostModel, seed: int
) -> list[RankPlan]:
    """One plan per rank for rows of one segment each. Rows are shuffled into mini-batches of nearly equal size by
    `seed`; each mini-batch is balanced over the ranks by cost.
    """
    return plan_pieces(
        whole(num_tokens),
        num_minibatches=num_minibatches,
        token_budget=token_budget,
        world_size=world_size,
        cost=cost,
        seed=seed,
    )


def plan_pieces(
    pieces: Sequence[Piece],
    *,
    num_minibatches: int,
    token_budget: int,
    world_size: int,
    cost: CostModel,
    seed: int,
    prompts: Sequence[str] = (),
) -> list[RankPlan]:
    """One plan per rank for the `pieces` of rows, at least one, a row's one after another, as `plan_batch` makes them.
    A row's pieces are in the same mini-batch on the same rank.

    `prompts` says which prompt each row answers: prompts are shuffled then, and their rows stay together. Without it
    every row is drawn by itself.
    """
    num_tokens = [piece.num_tokens for piece in pieces]
    costs = np.array([cost.costs(piece.lengths).sum() for piece in pieces])
    of_row: dict[int, list[int]] = {}
    for index, piece in enumerate(pieces):
        of_row.setdefault(piece.row, []).append(index)
    prompt_of: Sequence[str | int] = prompts or range(len(of_row))
    answers: dict[str | int, list[int]] = {}
    for row in of_row:
        answers.setdefault(prompt_of[row], []).append(row)
    each_prompts = list(answers.values())
    shuffled = np.random.default_rng(seed).permutation(len(each_prompts)).tolist()
    order = [row for at in shuffled for row in each_prompts[at]]
    shares: list[list[tuple[tuple[int, ...], ...]]] = [[] for _ in range(world_size)]
    for rows in np.array_split(order, num_minibatches):
        runs = [[of_row[row] for row in run] for _, run in groupby(rows.tolist(), prompt_of.__getitem__)]
        for share, microbatches in zip(shares, _spread(runs, num_tokens, costs, token_budget, world_size), strict=True):
            share.append(microbatches)
    return [RankPlan(tuple(share)) for share in shares]


def cut_microbatches(
    parts: Sequence[Sequence[Sequence[int]]],
    num_tokens: Sequence[int],
    costs: Array,
    token_budget: int,
    prompts: Sequence[int] | None = None,
) -> list[tuple[tuple[int, ...], ...]]:
    """Cuts what each rank has, in units that stay together, into microbatches of at most token_budget tokens, equally
    many on every rank; a unit of more tokens goes alone.

    They are as few as all ranks need, of nearly equal cost within a rank, and the costliest come first: ranks wait for
    each other in every microbatch. `prompts`: by index, the prompt that units begin with, which those of a few
    microbatches then do.
    """
    sizes = [[sum(num_tokens[index] for index in unit) for unit in part] for part in parts]
    loads = [[float(costs[list(unit)].sum()) for unit in part] for part in parts]
    num = max(1, *(-(-sum(min(tokens, token_budget) for tokens in size) // token_budget) for size in sizes))
    while True:
        cut = [
            fill(load, size, capacity=token_budget, num_bins=num)
            if prompts is None
            else fill_by_group(load, size, [prompts[u[0]] for u in part], capacity=token_budget, num_bins=num)
            for part, load, size in zip(parts, loads, sizes, strict=True)
        ]
        most = max(map(len, cut))
        if most == num:
            return [
                tuple(tuple(index for i in members for index in part[i]) for members in bins)
                for part, bins in zip(parts, cut, strict=True)
            ]
        num = most


def _spread(
    runs: Sequence[Sequence[Sequence[int]]],
    num_tokens: Sequence[int],
    costs: Array,
    token_budget: int,
    world_size: int,
) -> list[tuple[tuple[int, ...], ...]]:
    """The microbatches of each rank for a mini-batch of `runs` of rows that answer one prompt, each the indices of its
    pieces. Of those that cost the ranks no more than SLOWER against rows one by one, the one in which prompts are
    computed the fewest times.
    """
    prompts = [-1] * len(num_tokens)
    for number, run in enumerate(runs):
        for index in (index for row in run for index in row):
            prompts[index] = number

    def shared(most: int) -> list[list[Sequence[int]]]:
        bundles = [bundle for run in runs for bundle in _bundles(run, most, num_tokens, token_budget)]
        loads = [float(sum(costs[row].sum() for row in bundle)) for bundle in bundles]
        return [[unit for at in part for unit in _units(bundles[at])] for part in partition(loads, world_size)]

    def seconds(microbatches: _Microbatches) -> float:
        """Returns the cost of the costliest rank in every microbatch: the others wait for it."""
        return sum(
            max(float(costs[list(each)].sum()) for each in at_once) for at_once in zip(*microbatches, strict=True)
        )

    def num_computed(microbatches: _Microbatches) -> int:
        """Counts the prompts of every microbatch, on the rank that has most of them there."""
        return sum(
            max(len({prompts[index] for index in each}) for each in at_once)
            for at_once in zip(*microbatches, strict=True)
        )

    one_by_one = cut_microbatches(shared(1), num_tokens, costs, token_budget)
    found = [one_by_one]
    most, cut_apart = max(map(len, runs), default=1), list[list[list[tuple[int]]]]()
    while most > 1:
        parts = shared(most)
        found.append(cut_microbatches(parts, num_tokens, costs, token_budget))
        apart = [[(index,) for unit in part for index in unit] for part in parts]
        if apart not in cut_apart:  # on one rank it is the same each time
            cut_apart.append(apart)
            found.append(cut_microbatches(apart, num_tokens, costs, token_budget, prompts))
        most //= 2
    num, most_s = (1 + SLOWER) * len(one_by_one[0]), (1 + SLOWER) * seconds(one_by_one)
    able = [each for each in found if len(each[0]) <= num and seconds(each) <= most_s]
    return min(able, key=num_computed)


def _bundles(
    run: Sequence[Sequence[int]], most: int, num_tokens: Sequence[int], token_budget: int
) -> Iterator[list[list[int]]]:
    """Up to `most` rows of `run` at a time, of at most token_budget tokens, or one row."""
    bundle, taken = list[list[int]](), 0
    for row in run:
        size = sum(num_tokens[index] for index in row)
        if bundle and (len(bundle) == most or taken + size > token_budget):
            yield bundle
            bundle, taken = [], 0
        bundle.append(list(row))
        taken += size
    if bundle:
        yield bundle


def _units(bundle: Sequence[Sequence[int]]) -> Iterator[Sequence[int]]:
    """Yields what of a bundle stays in one microbatch. A row of several pieces is above the budget: each by itself."""
    if len(bundle) == 1:
        for index in bundle[0]:
            yield (index,)
    else:
        yield [index for row in bundle for index in row]
