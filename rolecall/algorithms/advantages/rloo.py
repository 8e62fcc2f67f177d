"""RLOO's leave-one-out advantage. Numpy.

Shapes: B trajectories.
"""

from collections.abc import Sequence

import numpy as np

from rolecall.algorithms.advantages.groups import Groups
from rolecall.wire import Array


def rloo(rewards_B: Array, gids: Sequence[int]) -> Array:
    """float64 [B]: r_i minus the mean of the group's other rewards (RLOO, arXiv:2402.14740, section 2.3). A group of one gets 0."""
    groups = Groups(gids)
    return np.asarray((rewards_B - groups.mean(rewards_B)) * groups.counts_B / np.maximum(groups.counts_B - 1, 1))
