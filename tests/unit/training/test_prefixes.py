"""What sequences share from their start, against a slow oracle."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from rolecall.columns import ROUTED_EXPERTS
from rolecall.training.model.prefixes import find_prefixes
from rolecall.training.packing.pack import Row, pack

CPU = torch.device("cpu")


@given(
    st.lists(st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=8)
)
def test_two_tokens_have_one_home_exactly_when_all_tokens_up_to_them_are_equal(sequences: list[list[int]]) -> None:
    prefixes = find_prefixes([np.array(ids, np.int32) for ids in sequences], CPU)
    beginnings = [tuple(ids[: t + 1]) for ids in sequences for t in range(len(ids))]
    num_distinct = len(set(beginnings))
    if prefixes is None:
        assert len(beginnings) - num_distinct < max(1, len(beginnings) / 16)
        return
    homes = prefixes.home_N.tolist()
    assert len(set(zip(homes, beginnings, strict=True))) == len(set(homes)) == num_distinct
    assert prefixes.first_C.tolist() == [homes.index(home) for home in range(num_distinct)]
    assert prefixes.num_saved == len(beginnings) - num_distinct


@given(st.lists(st.lists(st.tuples(*[st.integers(0, 1)] * 3), min_size=1, max_size=5), min_size=1, max_size=8))
def test_rows_share_what_they_begin_with_as_far_as_they_were_routed_alike(
    sequences: list[list[tuple[int, int, int]]],
) -> None:
    """A token is its id and the experts that it is sent to: one copy of it goes where every row's went."""
    wide = [np.array(tokens, np.int32) for tokens in sequences]
    rows: list[Row] = [
        {
            "token_ids": np.ascontiguousarray(tokens[:, 0]),
            "response_mask": np.ones(len(tokens), np.uint8),
            ROUTED_EXPERTS: tokens[:, 1:].astype(np.uint8),
        }
        for tokens in wide
    ]
    packed = pack(rows, [ROUTED_EXPERTS], temperature=1.0, device=CPU)
    beginnings = [tuple(map(tuple, tokens[: t + 1])) for tokens in sequences for t in range(len(tokens))]
    num_distinct = len(set(beginnings))
    if packed.prefixes is None:
        assert len(beginnings) - num_distinct < max(1, len(beginnings) / 16)
        return
    homes = packed.prefixes.home_N.tolist()
    assert len(set(zip(homes, beginnings, strict=True))) == len(set(homes)) == num_distinct
    routed_NW = packed.columns[ROUTED_EXPERTS]
    assert routed_NW.dtype == torch.uint8
    assert torch.equal(routed_NW[packed.prefixes.first_C][packed.prefixes.home_N], routed_NW)


def test_little_in_common_is_not_shared() -> None:
    apart = [np.array([7, *range(k * 40, k * 40 + 39)], np.int32) for k in range(4)]
    assert find_prefixes(apart, CPU) is None
    assert find_prefixes([], CPU) is None


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=8))
def test_gradients_of_all_copies_are_added_up(sequences: list[list[int]]) -> None:
    prefixes = find_prefixes([np.array(ids, np.int32) for ids in sequences], CPU)
    if prefixes is None:
        return
    num_tokens, num_distinct = prefixes.home_N.shape[0], prefixes.first_C.shape[0]
    x_C = torch.arange(2.0 * num_distinct, dtype=torch.float64).view(num_distinct, 2).requires_grad_()
    grad_N = torch.randn(num_tokens, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    spread = prefixes.spread(x_C)
    assert torch.equal(spread, x_C[prefixes.home_N])
    torch.autograd.backward(spread, grad_N)
    expected = torch.zeros_like(x_C).index_add_(0, prefixes.home_N, grad_N)
    torch.testing.assert_close(x_C.grad, expected, rtol=1e-12, atol=1e-12)


class Additions(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's own
    """Notes in which dtype rows are added up."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dtypes: list[torch.dtype] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__.startswith("index_add"):
            self.dtypes.append(args[0].dtype)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("num_rows", [8, 256])
def test_the_gradient_of_what_many_rows_share_is_rounded_once(num_rows: int) -> None:
    """A GPU adds in the tensor's dtype: in bfloat16 it would lose 0.4% at 8 rows, 2% at 256."""
    rows = [np.array([*range(16), 100 + row], np.int32) for row in range(num_rows)]
    prefixes = find_prefixes(rows, CPU)
    assert prefixes is not None
    grad_N = torch.randn(prefixes.home_N.shape[0], 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    x_C = torch.zeros(prefixes.first_C.shape[0], 64, dtype=torch.bfloat16, requires_grad=True)
    spread = prefixes.spread(x_C)
    with Additions() as additions:
        torch.autograd.backward(spread, grad_N)
    assert additions.dtypes == [torch.float32]
    exact = torch.zeros(x_C.shape, dtype=torch.float64).index_add_(0, prefixes.home_N, grad_N.double())
    assert x_C.grad is not None
    assert torch.equal(x_C.grad, exact.float().bfloat16())
