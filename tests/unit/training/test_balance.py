"""Partitions against Karmarkar and Karp's method written down plainly, and bins against what they may hold."""

import heapq
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from rolecall.training.packing.balance import fill, fill_by_group, partition

MILLIONTH = 1e-6
"""Of the mean load: what balance.py promises at worst. Not imported: a promise that moves with the code is none."""


def karmarkar_karp(costs: Sequence[float], num_parts: int) -> float:
    """Load of the heaviest part by the largest differencing method for many parts, item by item. The method leaves open
    which of two equal spreads comes first, and results differ by it: here the older one.
    """
    heap = [(-cost, age, [cost] + [0.0] * (num_parts - 1)) for age, cost in enumerate(sorted(costs, reverse=True))]
    heapq.heapify(heap)
    for age in range(len(costs), 2 * len(costs) - 1):
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        loads = sorted((a + b for a, b in zip(first, reversed(second), strict=True)), reverse=True)
        heapq.heappush(heap, (loads[-1] - loads[0], age, [load - loads[-1] for load in loads]))
    # what was subtracted on the way is the same for all parts
    top = heap[0][2]
    return (sum(costs) - sum(top)) / num_parts + top[0]


def heaviest(costs: Sequence[float], parts: Sequence[Sequence[int]]) -> float:
    assert Counter(i for part in parts for i in part) == Counter(range(len(costs)))
    return max(sum(costs[i] for i in part) for part in parts)


@example([1.0, 4, 10, 14, 18, 19, 19, 27, 39, 41, 44, 44, 45, 50, 59, 74, 79, 40.5, 96.5], 3)
@given(
    st.lists(st.one_of(st.integers(0, 20).map(float), st.floats(0.1, 100)), min_size=1, max_size=60), st.integers(1, 8)
)
def test_no_part_is_heavier_than_karmarkar_karps(costs: list[float], num_parts: int) -> None:
    parts = partition(costs, num_parts)
    assert len(parts) == num_parts
    assert heaviest(costs, parts) <= max(
        karmarkar_karp(costs, num_parts) * (1 + 1e-12), sum(costs) / num_parts * (1 + MILLIONTH)
    )


@pytest.mark.parametrize(("num_items", "num_parts"), [(4096, 64), (4096, 7), (600, 128), (2000, 2)])
@pytest.mark.parametrize("skewed", [True, False])
def test_a_whole_batch_is_as_even_as_karmarkar_karp_or_a_millionth_from_ideal(
    num_items: int, num_parts: int, skewed: bool
) -> None:
    rng = np.random.default_rng(num_items + num_parts)
    lengths = rng.lognormal(6, 1, num_items).clip(20, 8192).astype(int) if skewed else rng.integers(50, 2000, num_items)
    costs = (lengths + lengths**2 / 6000).tolist()
    mean = sum(costs) / num_parts
    assert heaviest(costs, partition(costs, num_parts)) <= max(
        karmarkar_karp(costs, num_parts), mean * (1 + MILLIONTH)
    ) * (1 + 1e-12)


def test_nothing_and_fewer_items_than_parts_leave_parts_empty() -> None:
    assert partition([], 3) == [[], [], []]
    assert sorted(map(len, partition([1.0, 2.0], 4))) == [0, 0, 1, 1]


def test_equal_costs_come_out_in_equal_numbers() -> None:
    assert [len(part) for part in partition([3.0] * 12, 4)] == [3, 3, 3, 3]


@given(st.lists(st.integers(1, 30), max_size=40), st.integers(5, 60), st.integers(0, 5))
def test_bins_hold_everything_once_within_their_capacity_and_the_costliest_comes_first(
    sizes: list[int], capacity: int, num_bins: int
) -> None:
    costs = [size + 0.1 * size**2 for size in sizes]
    bins = fill(costs, sizes, capacity=capacity, num_bins=num_bins)
    assert Counter(i for members in bins for i in members) == Counter(range(len(sizes)))
    assert all(len(members) <= 1 or sum(sizes[i] for i in members) <= capacity for members in bins)
    loads = [sum(costs[i] for i in members) for members in bins]
    assert loads == pytest.approx(sorted(loads, reverse=True))


@given(st.lists(st.tuples(st.integers(1, 30), st.integers(0, 6)), max_size=40), st.integers(5, 60), st.integers(0, 5))
def test_bins_by_group_hold_everything_once_within_their_capacity_and_the_costliest_comes_first(
    items: list[tuple[int, int]], capacity: int, num_bins: int
) -> None:
    sizes, groups = [size for size, _ in items], [group for _, group in items]
    costs = [size + 0.1 * size**2 for size in sizes]
    bins = fill_by_group(costs, sizes, groups, capacity=capacity, num_bins=num_bins)
    assert Counter(i for members in bins for i in members) == Counter(range(len(sizes)))
    assert all(len(members) <= 1 or sum(sizes[i] for i in members) <= capacity for members in bins)
    loads = [sum(costs[i] for i in members) for members in bins]
    assert loads == sorted(loads, reverse=True)


@pytest.mark.parametrize(("num_groups", "num_bins"), [(12, 12), (12, 3), (12, 7), (12, 20)])
def test_a_group_is_parted_only_where_a_bin_is_full_and_bins_cost_the_same(num_groups: int, num_bins: int) -> None:
    groups = [item % num_groups for item in range(16 * num_groups)]
    sizes = np.random.default_rng(num_bins).integers(40, 60, len(groups)).tolist()
    costs = [float(size) for size in sizes]
    mean = sum(sizes) / num_bins
    bins = fill_by_group(costs, sizes, groups, capacity=int(1.2 * mean), num_bins=num_bins)
    assert len(bins) == num_bins
    assert max(sum(costs[i] for i in members) for members in bins) <= mean + 60
    # end to end, each cut but the last would part one group
    assert sum(len({groups[i] for i in members}) for members in bins) <= 1.15 * (num_groups + num_bins)
