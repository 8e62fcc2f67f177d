"""Splitting work into parts of nearly equal cost: over ranks, and over the microbatches of a rank.

Over ranks nothing but the cost counts: Karmarkar and Karp's differencing method for many parts, then exchanges between
the heaviest part and the others. Differencing one item at a time costs some 10 us an item; of more than
DIFFERENCED_ITEMS it takes several at a time, and the exchanges win back what that loses. Within a rank the token budget
comes first, then the cost.

Karmarkar and Karp, The differencing method of set partitioning (1982), as generalised to many parts by Korf (AAAI
2009): keep vectors of part loads, join the two with the largest spread so that the heaviest of one meets the lightest
of the other, repeat until one vector is left.
"""

import heapq
import math
from collections.abc import Sequence
from functools import cache

import numpy as np

from rolecall.wire import Array

DIFFERENCED_ITEMS = 512
"""Most items that are differenced one at a time."""
EXCHANGES_PER_PART = 8
"""Most exchanges, for each part; far fewer are made before none helps."""
PAIRED_ITEMS = 24
"""Most items of a part whose pairs are offered: single lengths differ by whole tokens, pairs by less."""
EVEN = 1e-6
"""Share of the mean load: a heaviest part that exceeds it by less is left alone."""
RESOLUTION = 1e-3
"""Share of the gap between two parts: a smaller gain is no gain."""


def partition(costs: Sequence[float] | Array, num_parts: int) -> list[list[int]]:
    """Indices of `costs` (each at least 0) in num_parts parts, some of them empty if need be.

    The heaviest part is no heavier than Karmarkar-Karp's, or within EVEN of the mean: by construction up to
    DIFFERENCED_ITEMS items, by measurement beyond.
    """
    costs = np.asarray(costs, np.float64)
    if num_parts == 1:
        return [list(range(len(costs)))]
    part_of = _difference(costs, num_parts)
    _exchange(costs, part_of, num_parts)
    return [np.flatnonzero(part_of == part).tolist() for part in range(num_parts)]


def fill(costs: Sequence[float], sizes: Sequence[int], *, capacity: int, num_bins: int) -> list[list[int]]:
    """Indices in num_bins bins of nearly equal cost that hold at most `capacity` each: the largest first, each to the
    cheapest bin with room.

    Where none has room another bin is added. What is larger than a bin goes alone. The costliest bin comes first.
    """
    bins = _Bins(costs, sizes, capacity, num_bins)
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        bins.put(index, bins.cheapest(index))
    return bins.costliest_first()


def fill_by_group(
    costs: Sequence[float], sizes: Sequence[int], groups: Sequence[int], *, capacity: int, num_bins: int
) -> list[list[int]]:
    """Bins as those of `fill`, of which few have items of the same group; `groups` has that of each item.

    The largest group comes first. It goes to the fullest bin that can take all of it within a bin's share of the cost;
    else to the cheapest, as far as that has room and costs no more than its share, and on to the next. Where that takes
    more than num_bins, bins are filled as far as they have room, whatever they cost.
    """
    share = sum(costs) / max(num_bins, 1)
    bins = _by_group(_Bins(costs, sizes, capacity, num_bins), sizes, groups, share)
    if len(bins.members) > num_bins:
        bins = _by_group(_Bins(costs, sizes, capacity, num_bins), sizes, groups, math.inf)
    return bins.costliest_first()


def _by_group(bins: "_Bins", sizes: Sequence[int], groups: Sequence[int], most: float) -> "_Bins":
    """Fills `bins` with groups, none up to a cost of more than `most`."""
    members: dict[int, list[int]] = {}
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        members.setdefault(groups[index], []).append(index)
    for left in sorted(members.values(), key=lambda group: -sum(sizes[i] for i in group)):
        while left:
            chosen = bins.fullest(left, most)
            left = bins.put_group(left, bins.cheapest(left[0]) if chosen is None else chosen, most)
    return bins


class _Bins:
    """Bins that are being filled."""

    def __init__(self, costs: Sequence[float], sizes: Sequence[int], capacity: int, num_bins: int) -> None:
        self.members: list[list[int]] = [[] for _ in range(num_bins)]
        self._costs, self._sizes = costs, [min(size, capacity) for size in sizes]
        self._capacity = capacity
        self._loads, self._free = np.zeros(num_bins), np.full(num_bins, capacity)

    def cheapest(self, index: int) -> int:
        """The cheapest bin with room for an item; another one where none has."""
        size = self._sizes[index]
        chosen = int(np.where(self._free >= size, self._loads, np.inf).argmin()) if self.members else 0
        if self.members and self._free[chosen] >= size:
            return chosen
        self.members.append([])
        self._loads, self._free = np.append(self._loads, 0.0), np.append(self._free, self._capacity)
        return len(self.members) - 1

    def fullest(self, indices: Sequence[int], most: float) -> int | None:
        """The costliest bin that has room for all items and then costs no more than `most`, if there is one."""
        size, cost = sum(self._sizes[i] for i in indices), sum(self._costs[i] for i in indices)
        able = np.flatnonzero((self._free >= size) & (self._loads + cost <= (1 + EVEN) * most))
        return int(able[self._loads[able].argmax()]) if len(able) else None

    def put(self, index: int, chosen: int) -> None:
        """Adds an item to a bin."""
        self.members[chosen].append(index)
        self._loads[chosen] += self._costs[index]
        self._free[chosen] -= self._sizes[index]

    def put_group(self, indices: list[int], chosen: int, most: float) -> list[int]:
        """Adds the first of these items, the largest, to a bin. So it does with each of the others that has room there
        and brings the bin's cost nearer to `most`. Returns the rest.
        """
        load, free = float(self._loads[chosen]), int(self._free[chosen])
        left = list[int]()
        for number, index in enumerate(indices):
            if free < self._sizes[indices[-1]]:  # not even the smallest: none of them is looked at
                left += indices[number:]
                break
            size, cost = self._sizes[index], float(self._costs[index])
            if not number or (free >= size and load + cost / 2 <= (1 + EVEN) * most):
                self.members[chosen].append(index)
                load, free = load + cost, free - size
            else:
                left.append(index)
        self._loads[chosen], self._free[chosen] = load, free
        return left

    def costliest_first(self) -> list[list[int]]:
        """The items of each bin."""
        return [self.members[i] for i in np.argsort(-self._loads, kind="stable")]


def _difference(costs: Array, num_parts: int) -> Array:
    """int64 [items]: the part of each."""
    order = np.argsort(-costs, kind="stable")
    size = min(num_parts, -(-len(order) // DIFFERENCED_ITEMS))
    rounds = [order[start : start + size] for start in range(0, len(order), size)] if size else [order]
    loads = [np.concatenate([np.zeros(num_parts - len(items)), costs[items[::-1]]]) for items in rounds]
    heap = [(vector[0] - vector[-1], index) for index, vector in enumerate(loads)]
    heapq.heapify(heap)
    joins: list[tuple[int, int, Array]] = []
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[1], heapq.heappop(heap)[1]
        joint = loads[first] + loads[second][::-1]
        slots = joint.argsort(kind="stable")
        joins.append((first, second, slots))
        joint = joint[slots]
        joint -= joint[0]
        heapq.heappush(heap, (-joint[-1], len(loads)))
        loads.append(joint)
    return _assigned(rounds, joins, len(costs), num_parts)


def _assigned(
    rounds: Sequence[Array], joins: Sequence[tuple[int, int, Array]], num_items: int, num_parts: int
) -> Array:
    """Walks from the last join back to the rounds: which part each slot became. Slot j of a join was slots[j] of the
    first and its mirror of the second.
    """
    part_of_slot = {len(rounds) + len(joins) - 1: np.arange(num_parts)}
    part_of = np.empty(num_items, np.int64)
    for index, (first, second, slots) in reversed(list(enumerate(joins, start=len(rounds)))):
        parts = np.empty(num_parts, np.int64)
        parts[slots] = part_of_slot.pop(index)
        part_of_slot[first], part_of_slot[second] = parts, parts[::-1]
    for index, items in enumerate(rounds):
        part_of[items[::-1]] = part_of_slot[index][num_parts - len(items) :]
    return part_of


def _exchange(costs: Array, part_of: Array, num_parts: int) -> None:
    """Gives an item of the heaviest part for none, one or two of another part. It goes on as long as that makes the
    heavier of the two lighter.
    """
    loads = np.bincount(part_of, costs, num_parts)
    for _ in range(EXCHANGES_PER_PART * num_parts):
        heaviest = int(loads.argmax())
        heavy = np.flatnonzero(part_of == heaviest)
        if len(heavy) == 1 or loads[heaviest] <= (1 + EVEN) * loads.mean():
            return
        for other in np.argsort(loads, kind="stable")[:-1].tolist():
            gap = loads[heaviest] - loads[other]
            given, taken = _best_exchange(costs, heavy, np.flatnonzero(part_of == other), gap)
            moved = costs[given] - costs[taken].sum()
            if abs(moved - gap / 2) < gap / 2 * (1 - RESOLUTION):
                break
        else:
            return
        part_of[given], part_of[taken] = other, heaviest
        loads[heaviest] -= moved
        loads[other] += moved


def _best_exchange(costs: Array, heavy: Array, light: Array, gap: float) -> tuple[int, Array]:
    """The item of `heavy`, and those of `light`, whose exchange moves as nearly half the gap as can be."""
    first, second = _pairs(min(len(light), PAIRED_ITEMS))
    offers = np.concatenate([[0.0], costs[light], costs[light[first]] + costs[light[second]]])
    order = offers.argsort(kind="stable")
    wanted = costs[heavy] - gap / 2
    above = offers[order].searchsorted(wanted)
    near = order[np.stack([(above - 1).clip(0), above.clip(None, len(offers) - 1)])]
    row, item = divmod(int(np.abs(offers[near] - wanted).argmin()), len(heavy))
    offer = int(near[row, item])
    if offer <= len(light):
        return int(heavy[item]), light[max(offer - 1, 0) : offer]
    pair = offer - 1 - len(light)
    return int(heavy[item]), light[[first[pair], second[pair]]]


@cache
def _pairs(num_items: int) -> tuple[Array, Array]:
    return np.triu_indices(num_items, 1)
