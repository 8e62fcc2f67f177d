"""The way from rows to microbatches: which rank computes which trajectory, in which mini-batch and microbatch, and the
packed tensors themselves.

Planning reads lengths only (they are in the sealed batch), is the same on every rank, and puts no divisibility rule on
anybody: ranks with less to do get empty microbatches, so that all make the same number of collectives. The loss does
not depend on the plan (see algorithms/aggregation.py).

    lengths = [row.num_tokens for row in batch.rows]
    plans = plan_batch(lengths, num_minibatches=2, token_budget=16384, world_size=2, cost=engine.flops.forward,
                       seed=step)
    mine = plans[rank]                                           # mine.rows: what to read from the store
    for microbatches in mine.minibatches:  # each a tuple of microbatches, each a tuple of row indices
        packed = [pack([rows[i] for i in indices], ["advantages", ...], temperature=1.0, device=engine.device)
                  for indices in microbatches]
        # their losses are divided by local_counts, summed over the ranks

Where rows have several segments, what is planned are pieces of rows (pieces.py), and what is packed are segments.

Shapes: N tokens of one microbatch; S its sequences; T tokens of one sequence.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rolecall.algorithms.aggregation import Counts
from rolecall.columns import OLD_ROUTED_EXPERTS, ROUTED_EXPERTS
from rolecall.errors import InvalidInputError
from rolecall.training.account.flops import CostModel
from rolecall.training.engine import Microbatch
from rolecall.training.model.prefixes import find_prefixes
from rolecall.training.packing.balance import fill, partition
from rolecall.training.packing.pieces import Piece, whole
from rolecall.wire import Array

Row = Mapping[str, Array]
"""The columns of a trajectory, or of one of its segments, by name, as numpy arrays."""


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
    pieces: Sequence[Piece], *, num_minibatches: int, token_budget: int, world_size: int, cost: CostModel, seed: int
) -> list[RankPlan]:
    """One plan per rank for the `pieces` of rows, at least one, a row's one after another, as `plan_batch` makes them.
    A row's pieces are in the same mini-batch on the same rank.
    """
    num_tokens = [piece.num_tokens for piece in pieces]
    costs = np.array([cost.costs(piece.lengths).sum() for piece in pieces])
    of_row: dict[int, list[int]] = {}
    for index, piece in enumerate(pieces):
        of_row.setdefault(piece.row, []).append(index)
    row_costs = np.array([costs[indices].sum() for indices in of_row.values()])
    members = list(of_row.values())
    order = np.random.default_rng(seed).permutation(len(members))
    shares: list[list[tuple[tuple[int, ...], ...]]] = [[] for _ in range(world_size)]
    for rows in np.array_split(order, num_minibatches):
        parts = [
            [index for row in rows[part].tolist() for index in members[row]]
            for part in partition(row_costs[rows], world_size)
        ]
        for share, microbatches in zip(shares, cut_microbatches(parts, num_tokens, costs, token_budget), strict=True):
            share.append(microbatches)
    return [RankPlan(tuple(share)) for share in shares]


def cut_microbatches(
    parts: Sequence[Sequence[int]], num_tokens: Sequence[int], costs: Array, token_budget: int
) -> list[tuple[tuple[int, ...], ...]]:
    """The rows of each rank in microbatches of at most token_budget tokens, equally many on every rank; a longer row
    goes alone.

    They are as few as all ranks need, of nearly equal cost within a rank, and the costliest come first: ranks wait for
    each other in every microbatch.
    """
    sizes = [[num_tokens[row] for row in part] for part in parts]
    num = max(1, *(-(-sum(min(tokens, token_budget) for tokens in size) // token_budget) for size in sizes))
    while True:
        cut = [
            fill(costs[part].tolist(), size, capacity=token_budget, num_bins=num)
            for part, size in zip(parts, sizes, strict=True)
        ]
        most = max(map(len, cut))
        if most == num:
            return [
                tuple(tuple(part[i] for i in members) for members in bins)
                for part, bins in zip(parts, cut, strict=True)
            ]
        num = most


def pack(
    rows: Sequence[Row],
    columns: Sequence[str],
    *,
    temperature: float | Sequence[float],
    device: torch.device,
    score: str = "response_mask",
    trajectories: Sequence[int] | None = None,
) -> Microbatch:
    """Rows one after another as tensors on `device`, a sequence each. `score` names the mask of tokens whose outputs
    are wanted; `trajectories` the trajectory that each row is a segment of, by any number (absent: each is one).

    Masks arrive as bool, other columns as they are. Sequences share a beginning only as far as they were routed alike.

    `temperature` is one number or one per row. No rows make an empty microbatch. InvalidInputError when a column is not
    per-token or too short.
    """
    lengths = [int(row["token_ids"].shape[0]) for row in rows]
    if min(lengths, default=1) < 1:
        raise InvalidInputError("a trajectory without tokens cannot be packed")
    score_mask_N = _joined(rows, score, lengths, np.dtype(np.uint8)) != 0
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    score_mask_N[starts[:-1]] = False
    temperatures = [temperature] * len(rows) if isinstance(temperature, int | float) else list(temperature)
    arrays = {name: _joined(rows, name, lengths, np.dtype(np.float32)) for name in columns}
    masks = {name: array != 0 for name, array in arrays.items() if array.dtype == np.uint8 and array.ndim == 1}
    return Microbatch(
        token_ids_N=torch.from_numpy(_joined(rows, "token_ids", lengths, np.dtype(np.int32)).astype(np.int64)).to(
            device
        ),
        position_ids_N=torch.from_numpy(np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)).to(device),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)).to(device),
        lengths=tuple(lengths),
        trajectories=tuple(range(len(rows)) if trajectories is None else trajectories),
        temperature_N=torch.from_numpy(np.repeat(np.asarray(temperatures, np.float32), lengths)).to(device),
        score_mask_N=torch.from_numpy(score_mask_N).to(device),
        num_scored=int(np.count_nonzero(score_mask_N)),
        prefixes=find_prefixes([_identity(row, columns) for row in rows], device),
        columns={name: torch.from_numpy(array).to(device) for name, array in {**arrays, **masks}.items()},
    )


def unpack(values_N: torch.Tensor, lengths: Sequence[int]) -> list[Array]:
    """One float32 array [T], or [T, k], per sequence of a microbatch, in order: what goes back into the rows. Whole
    numbers stay what they are.
    """
    flat_N = values_N.detach().to("cpu", torch.float32 if values_N.is_floating_point() else values_N.dtype).numpy()
    return [part.copy() for part in np.split(flat_N, np.cumsum(lengths)[:-1])] if lengths else []


def local_counts(rows: Sequence[Row], mask: str = "loss_mask", trajectories: Sequence[int] | None = None) -> Counts:
    """Trained tokens (a sequence's first token is never one) and trajectories that have any. `trajectories` as
    in `pack`.
    """
    per_row = [int(np.count_nonzero(row[mask][1:])) for row in rows]
    of_row = range(len(rows)) if trajectories is None else trajectories
    return Counts(sum(per_row), len({number for number, count in zip(of_row, per_row, strict=True) if count}))


def _identity(row: Row, columns: Sequence[str]) -> Array:
    """All that a token's computation depends on beside the tokens before it, [T] or [T, n]: its id, and the experts
    that it is sent to where they are given.
    """
    routed = [row[name] for name in (ROUTED_EXPERTS, OLD_ROUTED_EXPERTS) if name in columns]
    ids = row["token_ids"]
    return np.hstack([np.ascontiguousarray(ids).view(np.uint8).reshape(len(ids), -1), *routed]) if routed else ids


def _joined(rows: Sequence[Row], name: str, lengths: Sequence[int], empty: np.dtype[np.generic]) -> Array:
    for row, length in zip(rows, lengths, strict=True):
        if row[name].shape[:1] != (length,):
            raise InvalidInputError(
                f"column {name!r} has shape {row[name].shape} beside {length} token_ids; only per-token columns can "
                "be packed"
            )
    return np.concatenate([row[name] for row in rows]) if rows else np.zeros(0, empty)
