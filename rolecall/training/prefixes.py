"""Tokens that several sequences of a microbatch have in common from their start, computed once: the responses to one prompt all begin with it.

What a causal model computes at a token depends on the tokens up to it and on nothing else, so sequences that begin alike share everything up to where they
part. All but attention then runs over C distinct tokens instead of N; attention (attention.py) still sees every sequence whole, and losses see all N tokens.
Numbers differ by rounding only: gradients of what is shared are summed before the matrix multiplications instead of after.

Owns how beginnings are found. Shapes: N tokens of the pack; C distinct ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rolecall.wire import Array

MIN_SHARED = 1 / 16
"""Share of the tokens below which nothing is shared: copying to and fro costs about as much."""


@dataclass(frozen=True)
class SharedPrefixes:
    """Which tokens are the same."""

    home_N: torch.Tensor
    """int64, where in [C] a token of the pack is computed."""
    first_C: torch.Tensor
    """int64, the first token of the pack that is computed there."""

    @property
    def num_saved(self) -> int:
        """Tokens that are not computed."""
        return self.home_N.shape[0] - self.first_C.shape[0]


def find_prefixes(token_ids: Sequence[Array], device: torch.device) -> SharedPrefixes | None:
    """What the sequences share, of any lengths, each from its start; None when it is too little."""
    starts = np.concatenate([[0], np.cumsum([len(ids) for ids in token_ids], dtype=np.int64)])
    home_N, num_distinct = np.zeros(starts[-1], np.int64), 0
    before = -1
    # In the order of their bytes each sequence stands next to the one with which it shares most of all that stand before it.
    for index in sorted(range(len(token_ids)), key=lambda i: token_ids[i].tobytes()):
        num_shared = _num_equal(token_ids[before], token_ids[index]) if before >= 0 else 0
        own, num_new = slice(starts[index], starts[index + 1]), len(token_ids[index]) - num_shared
        home_N[own] = np.concatenate([home_N[starts[before] : starts[before] + num_shared], np.arange(num_distinct, num_distinct + num_new)])
        num_distinct += num_new
        before = index
    if len(home_N) - num_distinct < MIN_SHARED * len(home_N) or num_distinct == len(home_N):
        return None
    first_C = np.unique(home_N, return_index=True)[1]
    return SharedPrefixes(torch.from_numpy(home_N).to(device), torch.from_numpy(first_C).to(device))


def _num_equal(a: Array, b: Array) -> int:
    """Length of the common beginning."""
    length = min(len(a), len(b))
    different = np.flatnonzero(a[:length] != b[:length])
    return int(different[0]) if different.size else length
