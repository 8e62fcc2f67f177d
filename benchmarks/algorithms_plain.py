"""The estimators as a reader of the papers would write them first: Python over groups and trajectories, and over tokens
where a number depends on the next.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import fmean, stdev

import numpy as np

from rolecall.settings import (
    AdvantageSection,
    GaeAdvantage,
    GdpoAdvantage,
    GrpoAdvantage,
    PassAtKAdvantage,
    PlainAdvantage,
    ReinforcePlusPlusAdvantage,
)
from rolecall.wire import Array


@dataclass(frozen=True)
class Rows:
    """The rows that assembly has of B trajectories before it lays them end to end."""

    gids: list[int]
    rewards: list[Array]
    masks: list[Array]
    columns: dict[str, list[Array]]
    components: dict[str, Array]
    greedy_rewards: Array


def plain(section: AdvantageSection, rows: Rows) -> list[Array]:
    """Advantages of each trajectory's tokens."""
    match section:
        case GrpoAdvantage(supervision="process"):
            return _process(rows)
        case GaeAdvantage():
            estimates = [_gae(section, rows, i) for i in range(len(rows.gids))]
            return _whitened(estimates, rows.masks) if section.whiten else estimates
        case ReinforcePlusPlusAdvantage(baseline="none"):
            return _whitened(
                [_to_go(r, m, section.gamma) for r, m in zip(rows.rewards, rows.masks, strict=True)], rows.masks
            )
        case PlainAdvantage(kind="remax"):
            triples = zip(rows.rewards, rows.masks, rows.greedy_rewards, strict=True)
            return [np.where(m != 0, _to_go(r, m, 1.0) - greedy, 0) for r, m, greedy in triples]
        case PlainAdvantage(kind="optimal_token_baseline"):
            return _token_baseline(rows)
    numbers = _numbers(section, rows)
    spread = [np.where(mask_T != 0, number, 0) for number, mask_T in zip(numbers, rows.masks, strict=True)]
    return _whitened(spread, rows.masks) if isinstance(section, ReinforcePlusPlusAdvantage) else spread


def _numbers(section: AdvantageSection, rows: Rows) -> list[float]:
    """One for each trajectory."""
    rewards = [float(reward_T.sum()) for reward_T in rows.rewards]
    lengths = [int(mask_T.sum()) for mask_T in rows.masks]
    if isinstance(section, GdpoAdvantage):
        parts = [_by_group(rows, _normalized, values.tolist()) for values in rows.components.values()]
        sums = [sum(values) for values in zip(*parts, strict=True)]
        mean, std = fmean(sums), float(np.std(sums))
        return [(x - mean) / (std + 1e-6) for x in sums]
    if section.kind == "opo":
        numbers = [0.0] * len(rewards)
        for members in _groups(rows):
            baseline = sum(lengths[i] * rewards[i] for i in members) / sum(lengths[i] for i in members)
            for i in members:
                numbers[i] = rewards[i] - baseline
        return numbers
    if section.kind == "gpg":
        useful = sum(len(members) for members in _groups(rows) if len({rewards[i] for i in members}) > 1)
        return [x * len(rewards) / max(useful, 1) for x in _by_group(rows, _centred, rewards)]
    rules: dict[str, Callable[[list[float]], list[float]]] = {
        "grpo": _normalized if isinstance(section, GrpoAdvantage) and section.normalize_std else _centred,
        "reinforce_plus_plus": _centred,
        "rloo": lambda r: [x - (sum(r) - x) / (len(r) - 1) for x in r],
        "maxrl": lambda r: [x / fmean(r) if fmean(r) > 0 else 0.0 for x in _centred(r)],
        "pass_at_k": lambda r: _pass_at_k(r, section.k if isinstance(section, PassAtKAdvantage) else 1),
    }
    return _by_group(rows, rules[section.kind], rewards)


def _groups(rows: Rows) -> Iterator[list[int]]:
    members: dict[int, list[int]] = {}
    for i, gid in enumerate(rows.gids):
        members.setdefault(gid, []).append(i)
    yield from members.values()


def _by_group(rows: Rows, rule: Callable[[list[float]], list[float]], values: list[float]) -> list[float]:
    numbers = [0.0] * len(values)
    for members in _groups(rows):
        for i, number in zip(members, rule([values[i] for i in members]), strict=True):
            numbers[i] = number
    return numbers


def _centred(values: list[float]) -> list[float]:
    mean = fmean(values)
    return [x - mean for x in values]


def _normalized(values: list[float]) -> list[float]:
    std = stdev(values)
    return [x / (std + 1e-6) for x in _centred(values)]


def _pass_at_k(rewards: list[float], k: int) -> list[float]:
    n, wrong = len(rewards), sum(r < 1 for r in rewards)
    solved = 1 - math.comb(wrong, k) / math.comb(n, k)
    std = math.sqrt(solved * (1 - solved))
    if std == 0:
        return [0.0] * n
    others = math.comb(wrong - 1, k - 1) / math.comb(n - 1, k - 1)
    return [((1 - solved) if r >= 1 else (1 - solved - others)) / std for r in rewards]


def _to_go(rewards_T: Array, mask_T: Array, gamma: float) -> Array:
    rewards, chosen, running = rewards_T.tolist(), mask_T.tolist(), 0.0
    out = [0.0] * len(rewards)
    for t in range(len(rewards) - 1, -1, -1):
        if chosen[t]:
            running = rewards[t] + gamma * running
            out[t] = running
    return np.array(out)


def _gae(section: GaeAdvantage, rows: Rows, i: int) -> Array:
    rewards, values, chosen = rows.rewards[i].tolist(), rows.columns["values"][i].tolist(), rows.masks[i].tolist()
    following, running = float(rows.columns["bootstrap_value"][i][0]), 0.0
    out = [0.0] * len(rewards)
    for t in range(len(rewards) - 1, -1, -1):
        if chosen[t]:
            running = rewards[t] + section.gamma * following - values[t] + section.gamma * section.gae_lambda * running
            out[t], following = running, values[t]
    return np.array(out)


def _whitened(rows: list[Array], masks: list[Array]) -> list[Array]:
    chosen = np.concatenate([row[mask != 0] for row, mask in zip(rows, masks, strict=True)])
    mean, std = chosen.mean(), chosen.std()
    return [np.where(mask != 0, (row - mean) / (std + 1e-6), 0) for row, mask in zip(rows, masks, strict=True)]


def _process(rows: Rows) -> list[Array]:
    out = [np.zeros(row.size) for row in rows.rewards]
    for members in _groups(rows):
        steps = [(i, int(t)) for i in members for t in np.flatnonzero(rows.rewards[i])]
        values = [float(rows.rewards[i][t]) for i, t in steps]
        for (i, t), number in zip(steps, _normalized(values) if len(values) > 1 else [0.0] * len(values), strict=True):
            out[i][: t + 1] += number
    return [np.where(mask != 0, row, 0) for row, mask in zip(out, rows.masks, strict=True)]


def _token_baseline(rows: Rows) -> list[Array]:
    out = [np.zeros(row.size) for row in rows.rewards]
    for members in _groups(rows):
        to_go, energy = {}, {}
        for i in members:
            chosen = rows.masks[i] != 0
            to_go[i] = _to_go(rows.rewards[i], rows.masks[i], 1.0)[chosen]
            probs = np.exp(rows.columns["old_logprobs"][i][chosen].astype(np.float64))
            energy[i] = np.cumsum(1 - 2 * probs + rows.columns["sum_squared_probs"][i][chosen])
        for position in range(max(row.size for row in to_go.values())):
            there = [i for i in members if to_go[i].size > position]
            if len(there) > 1:
                baseline = sum(to_go[i][position] * energy[i][position] for i in there) / sum(
                    energy[i][position] for i in there
                )
                for i in there:
                    out[i][np.flatnonzero(rows.masks[i])[0] + position] = to_go[i][position] - baseline
    return out
