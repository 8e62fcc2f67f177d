"""RLOO's leave-one-out advantage. Numpy.

Shapes: B trajectories.
"""

import numpy as np

from rolecall.algorithms.advantages.groups import Groups
from rolecall.wire import Array


def rloo(totals_B: Array, gids_B: Array) -> Array:
    """float64 [B]: r_i minus the mean of the group's other rewards (RLOO, arXiv:2402.14740, section 2.3): n / (n - 1)
    times the centred reward.

    A group of one, or of equal rewards, gets 0.
    """
    groups = Groups(gids_B)
    return np.asarray(groups.centred(totals_B) * groups.counts_B / np.maximum(groups.counts_B - 1, 1))
