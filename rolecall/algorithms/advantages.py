"""Advantage estimators over one batch of ragged trajectories, in numpy, without a loop over tokens of Python objects.

Each estimator says which columns it `needs` beside the rewards; `estimate` is the one entry for a configured estimator. Pure: rewards come
already shaped (shaping.py), results are new arrays. Left out: process-reward estimators and per-turn credit.

Shapes: B trajectories of the batch, in order; T tokens of one trajectory (prompt + response), another for each; L sampled tokens of the longest
response. Alignment is that of rolecall/trajectory.py: values_T[t] is the value before token t, a reward at t arrives after token t.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from rolecall.algorithms.shaping import spread
from rolecall.errors import InvalidInputError
from rolecall.settings import AdvantageSection, GaeAdvantage, GrpoAdvantage, RlooAdvantage
from rolecall.wire import Array

STD_EPS = 1e-6
"""Added to a standard deviation before dividing: groups and batches without spread get advantage 0, not nan."""


@dataclass(frozen=True)
class ScoredBatch:
    """What estimators read. Every sequence has B entries."""

    gids: Sequence[int]
    """Admission number of each trajectory's group; equal numbers are compared with one another."""
    rewards: Sequence[Array]
    """float32 [T] per-token rewards, after shaping; 0 where nothing was sampled."""
    response_masks: Sequence[Array]
    """uint8 [T], 1 = sampled by the policy."""
    loss_masks: Sequence[Array]
    """uint8 [T], subset of response_masks that is trained on."""
    values: Sequence[Array] | None = None
    """float32 [T], the critic's column; only where `needs` asks for it."""
    bootstrap_values: Sequence[float] | None = None
    """The value after the last token for truncated trajectories, 0 for stopped ones; only where `needs` asks for it."""


@dataclass(frozen=True)
class Estimate:
    """Columns to write, float32 [T] each, 0 where loss_mask is 0."""

    advantages: list[Array]
    returns: list[Array] | None
    """Targets of the value model; None from estimators without one."""


def needs(section: AdvantageSection) -> tuple[str, ...]:
    """Columns of other roles that the estimator reads beside rewards and masks."""
    return ("values", "bootstrap_value") if isinstance(section, GaeAdvantage) else ()


def estimate(section: AdvantageSection, batch: ScoredBatch) -> Estimate:
    """Runs the configured estimator. InvalidInputError when a column it needs is missing."""
    match section:
        case GrpoAdvantage():
            return Estimate(spread(grpo(_totals(batch.rewards), batch.gids, normalize_std=section.normalize_std), batch.loss_masks), None)
        case RlooAdvantage():
            return Estimate(spread(rloo(_totals(batch.rewards), batch.gids), batch.loss_masks), None)
        case GaeAdvantage():
            return _gae_estimate(section, batch)


def grpo(rewards_B: Array, gids: Sequence[int], *, normalize_std: bool = True) -> Array:
    """float64 [B]: (r_i - mean(group)) / std(group) (GRPO, arXiv:2402.03300, section 4.1.2); without std, Dr.GRPO's centring (arXiv:2503.20783).

    std is the sample standard deviation (n - 1). A group of one, or of equal rewards, gets 0.
    """
    group_B, counts_G = _groups(gids)
    centred_B = rewards_B - (np.bincount(group_B, rewards_B) / counts_G)[group_B]
    if not normalize_std:
        return centred_B
    variances_G = np.bincount(group_B, centred_B**2) / np.maximum(counts_G - 1, 1)
    return np.asarray(centred_B / (np.sqrt(variances_G)[group_B] + STD_EPS))


def rloo(rewards_B: Array, gids: Sequence[int]) -> Array:
    """float64 [B]: r_i minus the mean of the group's other rewards (RLOO, arXiv:2402.14740, section 2.3). A group of one gets 0."""
    group_B, counts_G = _groups(gids)
    centred_B = rewards_B - (np.bincount(group_B, rewards_B) / counts_G)[group_B]
    return np.asarray(centred_B * (counts_G / np.maximum(counts_G - 1, 1))[group_B])


def gae(
    rewards: Sequence[Array], values: Sequence[Array], masks: Sequence[Array], bootstrap_values: Sequence[float], *, gamma: float, gae_lambda: float
) -> tuple[list[Array], list[Array]]:
    """(advantages, returns), float32 [T] each, 0 where the mask is 0 (GAE, arXiv:1506.02438, eq. 16; returns = advantages + values).

    Time runs over sampled tokens: tokens of an environment between two turns are stepped over, with no discount. After the last sampled token comes
    the bootstrap value. One vectorised backward pass over [B, L].
    """
    positions = [np.flatnonzero(mask_T) for mask_T in masks]
    lengths_B = np.array([p.size for p in positions])
    valid_BL = np.arange(lengths_B.max(initial=0))[None, :] < lengths_B[:, None]
    rewards_BL, values_BL = _compact(rewards, positions, valid_BL), _compact(values, positions, valid_BL)
    next_values_BL = np.zeros_like(values_BL)
    next_values_BL[:, :-1] = values_BL[:, 1:]
    rows = np.flatnonzero(lengths_B)
    next_values_BL[rows, lengths_B[rows] - 1] = np.asarray(bootstrap_values, np.float64)[rows]
    deltas_BL = np.where(valid_BL, rewards_BL + gamma * next_values_BL - values_BL, 0.0)
    advantages_BL = np.zeros_like(deltas_BL)
    running_B = np.zeros(len(positions))
    for t in range(valid_BL.shape[1] - 1, -1, -1):
        running_B = deltas_BL[:, t] + gamma * gae_lambda * running_B
        advantages_BL[:, t] = running_B
    return _scatter(advantages_BL, positions, masks), _scatter(advantages_BL + values_BL, positions, masks)


def whiten(advantages: Sequence[Array], masks: Sequence[Array]) -> list[Array]:
    """Zero mean and unit standard deviation over the masked tokens of the whole batch; 0 elsewhere."""
    chosen = np.concatenate([a[mask != 0] for a, mask in zip(advantages, masks, strict=True)]).astype(np.float64)
    if not chosen.size:
        return [np.zeros_like(a) for a in advantages]
    mean, std = chosen.mean(), chosen.std()
    return [np.where(mask != 0, (a - mean) / (std + STD_EPS), 0.0).astype(np.float32) for a, mask in zip(advantages, masks, strict=True)]


def _gae_estimate(section: GaeAdvantage, batch: ScoredBatch) -> Estimate:
    if batch.values is None or batch.bootstrap_values is None:
        raise InvalidInputError("gae reads values and bootstrap_value; the critic has not written them")
    advantages, returns = gae(batch.rewards, batch.values, batch.response_masks, batch.bootstrap_values, gamma=section.gamma, gae_lambda=section.gae_lambda)
    if section.whiten:
        advantages = whiten(advantages, batch.loss_masks)
    return Estimate(*([np.where(mask != 0, a, np.float32(0)) for a, mask in zip(column, batch.loss_masks, strict=True)] for column in (advantages, returns)))


def _totals(rewards: Sequence[Array]) -> Array:
    return np.array([float(rewards_T.sum(dtype=np.float64)) for rewards_T in rewards])


def _groups(gids: Sequence[int]) -> tuple[Array, Array]:
    _, group_B, counts_G = np.unique(np.asarray(gids), return_inverse=True, return_counts=True)
    return group_B, counts_G


def _compact(columns: Sequence[Array], positions: Sequence[Array], valid_BL: Array) -> Array:
    """float64 [B, L]: each row's sampled tokens, left-aligned."""
    out_BL = np.zeros(valid_BL.shape)
    if columns:
        out_BL[valid_BL] = np.concatenate([column_T[p] for column_T, p in zip(columns, positions, strict=True)])
    return out_BL


def _scatter(values_BL: Array, positions: Sequence[Array], masks: Sequence[Array]) -> list[Array]:
    columns = []
    for values_L, p, mask_T in zip(values_BL, positions, masks, strict=True):
        column_T = np.zeros(mask_T.shape, np.float32)
        column_T[p] = values_L[: p.size]
        columns.append(column_T)
    return columns
