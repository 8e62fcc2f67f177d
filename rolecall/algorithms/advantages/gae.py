"""GAE over a critic's values. Numpy, one vectorised backward pass over time.

Shapes: B trajectories; T tokens of one trajectory, another for each; L sampled tokens of the longest response. values_T[t] is the value before token t.
"""

from collections.abc import Sequence

import numpy as np

from rolecall.algorithms.advantages.groups import compact, scatter
from rolecall.wire import Array


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
    rewards_BL, values_BL = compact(rewards, positions, valid_BL), compact(values, positions, valid_BL)
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
    return scatter(advantages_BL, positions, masks), scatter(advantages_BL + values_BL, positions, masks)
