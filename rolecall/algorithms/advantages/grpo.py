"""GRPO's group-relative advantage, with and without the standard deviation. Numpy.

Shapes: B trajectories.
"""

from collections.abc import Sequence

import numpy as np

from rolecall.algorithms.advantages.batch import STD_EPS
from rolecall.algorithms.advantages.groups import Groups
from rolecall.wire import Array


def grpo(rewards_B: Array, gids: Sequence[int], *, normalize_std: bool = True) -> Array:
    """float64 [B]: (r_i - mean(group)) / std(group) (GRPO, arXiv:2402.03300, section 4.1.2); without std, Dr.GRPO's centring (arXiv:2503.20783).

    std is the sample standard deviation (n - 1). A group of one, or of equal rewards, gets 0.
    """
    groups = Groups(gids)
    centred_B = np.asarray(rewards_B - groups.mean(rewards_B))
    return np.asarray(centred_B / (groups.std(rewards_B) + STD_EPS)) if normalize_std else centred_B
