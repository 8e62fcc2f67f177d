"""From rows to microbatches: who computes which trajectory, in which mini-batch and microbatch, and the packed tensors themselves.

Planning reads lengths only (they are in the sealed batch), is the same on every rank, and puts no divisibility rule on anybody: ranks with less to do get
empty microbatches, so that all make the same number of collectives. The loss does not depend on the plan (see algorithms/aggregation.py).

    plans = plan_batch([row.num_tokens for row in batch.rows], num_minibatches=2, token_budget=16384, world_size=2, cost=cost_model(config), seed=step)
    mine = plans[rank]                                           # mine.rows: what to read from the store
    for microbatches in mine.minibatches:                        # each a tuple of microbatches, each a tuple of row indices
        packed = [pack([rows[i] for i in indices], ["advantages", ...], temperature=1.0, device=engine.device) for indices in microbatches]
        counts = global_counts([rows[i] for indices in microbatches for i in indices], group)

Shapes: N tokens of one microbatch; S its sequences; T tokens of one trajectory.
"""

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from transformers import PretrainedConfig

from rolecall.algorithms.aggregation import Counts
from rolecall.errors import InvalidInputError
from rolecall.training.engine import Microbatch
from rolecall.wire import Array

Row = Mapping[str, Array]
"""A trajectory's columns by name, as numpy arrays."""


@dataclass(frozen=True)
class CostModel:
    """FLOPs of a sequence of T tokens, up to a factor: linear_per_token * T + attention_per_pair * T^2."""

    linear_per_token: float
    attention_per_pair: float

    def cost(self, num_tokens: int) -> float:
        """Of one sequence."""
        return self.linear_per_token * num_tokens + self.attention_per_pair * num_tokens**2


def cost_model(config: PretrainedConfig) -> CostModel:
    """From the model's own configuration: matrix multiplications of the layers and the head, and causal attention."""
    text = config.get_text_config()
    head_dim = _optional_int(text, "head_dim") or text.hidden_size // text.num_attention_heads
    queries, keys = head_dim * text.num_attention_heads, head_dim * (_optional_int(text, "num_key_value_heads") or text.num_attention_heads)
    experts = _optional_int(text, "num_experts_per_tok")
    mlp = experts * (_optional_int(text, "moe_intermediate_size") or text.intermediate_size) if experts else text.intermediate_size
    layer = text.hidden_size * (2 * queries + 2 * keys + 3 * mlp)
    return CostModel(2.0 * (text.num_hidden_layers * layer + text.hidden_size * text.vocab_size), 2.0 * text.num_hidden_layers * queries)


@dataclass(frozen=True)
class RankPlan:
    """One rank's share of a batch."""

    minibatches: tuple[tuple[tuple[int, ...], ...], ...]
    """[mini-batch][microbatch] -> row indices into the batch; an empty microbatch keeps the ranks in step."""

    @property
    def rows(self) -> tuple[int, ...]:
        """The rows this rank reads, in the order it computes them; each once."""
        return tuple(row for microbatches in self.minibatches for indices in microbatches for row in indices)

    @property
    def microbatches(self) -> tuple[tuple[int, ...], ...]:
        """All microbatches, mini-batch after mini-batch: for a pass over the whole batch."""
        return tuple(indices for microbatches in self.minibatches for indices in microbatches)


def plan_batch(num_tokens: Sequence[int], *, num_minibatches: int, token_budget: int, world_size: int, cost: CostModel, seed: int) -> list[RankPlan]:
    """One plan per rank. Rows are shuffled into mini-batches of nearly equal size by `seed`; each mini-batch is balanced over the ranks by cost."""
    order = np.random.default_rng(seed).permutation(len(num_tokens))
    shares: list[list[tuple[tuple[int, ...], ...]]] = [[] for _ in range(world_size)]
    for members in np.array_split(order, num_minibatches):
        rows = [int(row) for row in members]
        parts = partition([cost.cost(num_tokens[row]) for row in rows], world_size)
        cut = [cut_microbatches([rows[i] for i in part], num_tokens, token_budget) for part in parts]
        most = max(map(len, cut))
        for share, microbatches in zip(shares, cut, strict=True):
            share.append(tuple(microbatches) + ((),) * (most - len(microbatches)))
    return [RankPlan(tuple(share)) for share in shares]


def partition(costs: Sequence[float], num_parts: int) -> list[list[int]]:
    """Indices in num_parts parts of nearly equal total cost: the longest first, each to the lightest part (a heap; LPT is within 4/3 of the best)."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    heap = [(0.0, part) for part in range(num_parts)]
    for index in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        load, part = heapq.heappop(heap)
        parts[part].append(index)
        heapq.heappush(heap, (load + costs[index], part))
    return parts


def cut_microbatches(rows: Sequence[int], num_tokens: Sequence[int], token_budget: int) -> list[tuple[int, ...]]:
    """The rows, longest first, in as few microbatches of at most token_budget tokens as first fit finds; a longer row goes alone.

    Neighbours in length end up together, which attention's padding likes (attention.py). First fit keeps a bounded list of open microbatches.
    """
    open_bins: list[tuple[int, list[int]]] = []
    closed: list[tuple[int, ...]] = []
    for row in sorted(rows, key=lambda r: (-num_tokens[r], r)):
        for position, (free, members) in enumerate(open_bins):
            if num_tokens[row] <= free:
                members.append(row)
                open_bins[position] = (free - num_tokens[row], members)
                break
        else:
            open_bins.append((token_budget - num_tokens[row], [row]))
            if len(open_bins) > 64:
                closed.append(tuple(open_bins.pop(0)[1]))
    return closed + [tuple(members) for _, members in open_bins]


def pack(
    rows: Sequence[Row], columns: Sequence[str], *, temperature: float | Sequence[float], device: torch.device, score: str = "response_mask"
) -> Microbatch:
    """Rows one after another as tensors on `device`. `score` names the mask of tokens whose outputs are wanted.

    Masks arrive as bool, other columns as they are.

    `temperature` is one number or one per row. No rows make an empty microbatch. InvalidInputError when a column is not per-token or too short.
    """
    lengths = [int(row["token_ids"].shape[0]) for row in rows]
    if min(lengths, default=1) < 1:
        raise InvalidInputError("a trajectory without tokens cannot be packed")
    score_mask_N = _joined(rows, score, lengths, np.dtype(np.uint8)) != 0
    starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    score_mask_N[starts[:-1]] = False
    temperatures = [temperature] * len(rows) if isinstance(temperature, int | float) else list(temperature)
    arrays = {name: _joined(rows, name, lengths, np.dtype(np.float32)) for name in columns}
    masks = {name: array != 0 for name, array in arrays.items() if array.dtype == np.uint8}
    return Microbatch(
        token_ids_N=torch.from_numpy(_joined(rows, "token_ids", lengths, np.dtype(np.int32)).astype(np.int64)).to(device),
        position_ids_N=torch.from_numpy(np.arange(starts[-1]) - np.repeat(starts[:-1], lengths)).to(device),
        cu_seqlens=torch.from_numpy(starts.astype(np.int32)).to(device),
        lengths=tuple(lengths),
        temperature_N=torch.from_numpy(np.repeat(np.asarray(temperatures, np.float32), lengths)).to(device),
        score_mask_N=torch.from_numpy(score_mask_N).to(device),
        columns={name: torch.from_numpy(array).to(device) for name, array in {**arrays, **masks}.items()},
    )


def unpack(values_N: torch.Tensor, lengths: Sequence[int]) -> list[Array]:
    """One float32 array [T] per sequence of a microbatch, in order: what goes back into the rows."""
    flat_N = values_N.detach().to("cpu", torch.float32).numpy()
    return [part.copy() for part in np.split(flat_N, np.cumsum(lengths)[:-1])] if lengths else []


def local_counts(rows: Sequence[Row], mask: str = "loss_mask") -> Counts:
    """Trained tokens (a sequence's first token is never one) and sequences that have any."""
    per_row = [int(np.count_nonzero(row[mask][1:])) for row in rows]
    return Counts(sum(per_row), sum(count > 0 for count in per_row))


def global_counts(rows: Sequence[Row], group: dist.ProcessGroup | None, mask: str = "loss_mask") -> Counts:
    """local_counts summed over the ranks of the group (None: the default group). A collective."""
    mine = local_counts(rows, mask)
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend(group) == "nccl" else torch.device("cpu")
    total = torch.tensor([mine.num_tokens, mine.num_sequences], dtype=torch.int64, device=device)
    dist.all_reduce(total, group=group)
    return Counts(*(int(n) for n in total.tolist()))


def _optional_int(config: PretrainedConfig, name: str) -> int | None:
    """An optional number of a model's configuration: families differ in which they have."""
    value = config.to_dict().get(name)
    return value if isinstance(value, int) else None


def _joined(rows: Sequence[Row], name: str, lengths: Sequence[int], empty: np.dtype[np.generic]) -> Array:
    for row, length in zip(rows, lengths, strict=True):
        if row[name].shape != (length,):
            raise InvalidInputError(f"column {name!r} has shape {row[name].shape} beside {length} token_ids; only per-token columns can be packed")
    return np.concatenate([row[name] for row in rows]) if rows else np.zeros(0, empty)
