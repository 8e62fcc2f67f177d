"""Tokens that several sequences of a microbatch have in common from their start, computed once: the responses to one
prompt all begin with it.

What a causal model computes at a token depends on the tokens up to it and on nothing else, so sequences that begin
alike share everything up to where they part. All but attention then runs over C distinct tokens instead of N; attention
(attention/packed.py) still sees every sequence whole, and losses see all N tokens. Numbers differ by rounding only:
gradients of what is shared are summed before the matrix multiplications instead of after, in float32 and rounded once.

Owns how beginnings are found, and both directions of the copy. Shapes: N tokens of the pack; C distinct ones; S of them
that several sequences share; R tokens of the pack that are computed there.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rolecall.wire import Array

MIN_SHARED = 1 / 16
"""Share of the tokens below which nothing is shared: copying to and fro costs about as much."""


@dataclass(frozen=True)
class SharedPrefixes:
    """The runs of tokens that sequences share from their start."""

    home_N: torch.Tensor
    """int64, where in [C] a token of the pack is computed."""
    first_C: torch.Tensor
    """int64, the first token of the pack that is computed there."""
    shared_S: torch.Tensor
    """int64, where in [C] what several sequences share is computed."""
    user_R: torch.Tensor
    """int64, the tokens of the pack that are computed there."""
    slot_R: torch.Tensor
    """int64, where in [S] they are."""

    def spread(self, x_C: torch.Tensor) -> torch.Tensor:
        """[N, ...] from [C, ...]: every token's own copy. Gradients of copies are summed in float32 at least."""
        x_N: torch.Tensor = _Spread.apply(x_C, self)  # type: ignore[no-untyped-call]
        return x_N

    @property
    def num_saved(self) -> int:
        """Tokens that are not computed."""
        return self.home_N.shape[0] - self.first_C.shape[0]


def find_prefixes(token_ids: Sequence[Array], device: torch.device) -> SharedPrefixes | None:
    """Finds what sequences of any lengths share from their start, tokens [T] or [T, n] whole; None when it is too
    little.
    """
    starts = np.concatenate([[0], np.cumsum([len(ids) for ids in token_ids], dtype=np.int64)])
    home_N, num_distinct = np.zeros(starts[-1], np.int64), 0
    before = -1
    # In the order of their bytes each sequence stands next to the one with which it shares most of all that stand
    # before it.
    for index in sorted(range(len(token_ids)), key=lambda i: token_ids[i].tobytes()):
        num_shared = _num_equal(token_ids[before], token_ids[index]) if before >= 0 else 0
        own, num_new = slice(starts[index], starts[index + 1]), len(token_ids[index]) - num_shared
        home_N[own] = np.concatenate(
            [home_N[starts[before] : starts[before] + num_shared], np.arange(num_distinct, num_distinct + num_new)]
        )
        num_distinct += num_new
        before = index
    if len(home_N) - num_distinct < MIN_SHARED * len(home_N) or num_distinct == len(home_N):
        return None
    first_C, users_C = np.unique(home_N, return_index=True, return_counts=True)[1:]
    shared_S = np.flatnonzero(users_C > 1)
    user_R = np.flatnonzero(users_C[home_N] > 1)
    slot_R = np.searchsorted(shared_S, home_N[user_R])
    return SharedPrefixes(
        *(torch.from_numpy(index).to(device) for index in (home_N, first_C, shared_S, user_R, slot_R))
    )


class _Spread(torch.autograd.Function):
    """index_select, whose own backward would add in the tensor's dtype: in bfloat16 each of many copies costs a
    rounding.
    """

    @staticmethod
    def forward(ctx: Any, x_C: torch.Tensor, prefixes: SharedPrefixes) -> torch.Tensor:
        ctx.prefixes = prefixes
        return x_C.index_select(0, prefixes.home_N)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        prefixes: SharedPrefixes = ctx.prefixes
        (grad_N,) = grads
        grad_C = grad_N.index_select(0, prefixes.first_C)
        wide = torch.promote_types(grad_N.dtype, torch.float32)
        sum_S = torch.zeros(prefixes.shared_S.shape[0], *grad_N.shape[1:], dtype=wide, device=grad_N.device)
        sum_S.index_add_(0, prefixes.slot_R, grad_N.index_select(0, prefixes.user_R).to(wide))
        return grad_C.index_copy_(0, prefixes.shared_S, sum_S.to(grad_N.dtype)), None


def _num_equal(a: Array, b: Array) -> int:
    """Length of the common beginning."""
    length = min(len(a), len(b))
    different = np.flatnonzero((a[:length] != b[:length]).reshape(length, -1).any(1))
    return int(different[0]) if different.size else length
