"""What sequences share from their start, against a slow oracle."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from rolecall.training.prefixes import find_prefixes

CPU = torch.device("cpu")


@given(st.lists(st.lists(st.integers(0, 2**31 - 1) | st.integers(0, 1), min_size=1, max_size=6), min_size=1, max_size=8))
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


def test_little_in_common_is_not_shared() -> None:
    apart = [np.array([7, *range(k * 40, k * 40 + 39)], np.int32) for k in range(4)]
    assert find_prefixes(apart, CPU) is None
    assert find_prefixes([], CPU) is None
