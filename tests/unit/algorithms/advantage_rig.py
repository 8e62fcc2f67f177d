"""Batches for the tests of advantages: small ones by hand and ragged ones drawn by hypothesis, and loops that walk them
trajectory by trajectory.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
from hypothesis import strategies as st

from rolecall.algorithms.advantages import Estimate, ScoredBatch
from rolecall.wire import Array


def f32(*values: float) -> Array:
    return np.array(values, np.float32)


def mask(*values: int) -> Array:
    return np.array(values, np.uint8)


def outcomes(gids: Sequence[int], rewards: Sequence[float], lengths: Sequence[int] | None = None) -> ScoredBatch:
    """Trajectories of one prompt token and `lengths` sampled ones (absent: one each), rewarded at their end."""
    lengths = lengths or [1] * len(gids)
    masks = [np.array([0, *[1] * n], np.uint8) for n in lengths]
    placed = [np.array([0.0] * n + [reward]) for n, reward in zip(lengths, rewards, strict=True)]
    return ScoredBatch.of_rows(gids, placed, masks, masks)


@st.composite
def ragged_batches(draw: st.DrawFn) -> ScoredBatch:
    """float64 batches of 1 to 9 trajectories in interleaved groups, with gaps of environment tokens, rows and tokens
    that are masked out, ties and zeros.
    """
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    sizes = draw(st.lists(st.integers(1, 12), min_size=1, max_size=9))
    sampled = [(rng.random(n) < 0.7).astype(np.uint8) for n in sizes]
    trained = [m * (rng.random() < 0.85) * (rng.random(m.size) < 0.9).astype(np.uint8) for m in sampled]
    dense = draw(st.booleans())
    rewards = []
    for m in sampled:
        row = rng.normal(size=m.size) if dense else np.zeros(m.size)
        if m.any() and not dense:
            row[np.flatnonzero(m)[-1]] = rng.choice([0.0, 0.5, 1.0, 1.0])
        rewards.append(row * m)
    probs = [rng.uniform(0.05, 1, n) for n in sizes]
    columns = {
        "values": [rng.normal(size=n) for n in sizes],
        "bootstrap_value": [rng.normal(size=1) for _ in sizes],
        "token_rewards": rewards,
        "old_logprobs": [np.log(p) for p in probs],
        "sum_squared_probs": [p**2 + rng.random(p.size) * (1 - p) ** 2 for p in probs],
    }
    components = {name: rng.choice([0.0, 0.25, 1.0], len(sizes)) for name in ("right", "short")}
    gids = rng.integers(0, draw(st.integers(1, 4)), len(sizes)).tolist()
    return ScoredBatch.of_rows(
        gids, rewards, sampled, trained, columns, components, {"right": 1.0, "short": 0.5}, rng.normal(size=len(sizes))
    )


def trajectories(batch: ScoredBatch, values_N: Array) -> list[list[float]]:
    return [row.tolist() for row in batch.rows(values_N)]


def groups_of(batch: ScoredBatch) -> Iterator[list[int]]:
    """The members of each group, by their places in the batch."""
    gids = batch.gids_B.tolist()
    for gid in sorted(set(gids)):
        yield [i for i, other in enumerate(gids) if other == gid]


def spread_slowly(batch: ScoredBatch, numbers: Sequence[float] | Mapping[int, float]) -> list[list[float]]:
    """Each trajectory's number on its trained tokens."""
    masks = trajectories(batch, batch.loss_mask_N)
    return [[numbers[i] if trained else 0.0 for trained in masks[i]] for i in range(len(masks))]


def of_groups(batch: ScoredBatch, rule: Callable[[list[float], list[int]], list[float]]) -> list[list[float]]:
    """`rule(rewards, lengths)` of each group, spread."""
    rewards = batch.totals_B.tolist()
    np.testing.assert_allclose(
        rewards, [sum(row) for row in trajectories(batch, batch.rewards_N)], rtol=1e-7, atol=1e-6
    )
    lengths = [int(sum(row)) for row in trajectories(batch, batch.response_mask_N)]
    numbers: dict[int, float] = {}
    for members in groups_of(batch):
        numbers.update(zip(members, rule([rewards[i] for i in members], [lengths[i] for i in members]), strict=True))
    return spread_slowly(batch, numbers)


def whiten_slowly(batch: ScoredBatch, rows: list[list[float]]) -> list[list[float]]:
    """Mean 0 and standard deviation 1 over the batch's trained tokens."""
    masks = trajectories(batch, batch.loss_mask_N)
    chosen = [x for row, kept in zip(rows, masks, strict=True) for x, trained in zip(row, kept, strict=True) if trained]
    if not chosen or min(chosen) == max(chosen):
        return [[0.0] * len(row) for row in rows]
    mean = sum(chosen) / len(chosen)
    std = (sum((x - mean) ** 2 for x in chosen) / len(chosen)) ** 0.5
    return [
        [(x - mean) / (std + 1e-6) if trained else 0.0 for x, trained in zip(row, kept, strict=True)]
        for row, kept in zip(rows, masks, strict=True)
    ]


def agrees(batch: ScoredBatch, result: Estimate, slow: list[list[float]], atol: float = 1e-6) -> None:
    assert result.advantages_N.dtype == np.float64
    np.testing.assert_allclose(
        result.advantages_N, np.concatenate([np.array(row) for row in slow]), rtol=1e-6, atol=atol
    )
    assert not result.advantages_N[batch.loss_mask_N == 0].any()
