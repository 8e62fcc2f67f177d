"""Statistics of groups: the primitive that group-relative estimators are made of. Numpy.

Shapes: B things that belong to groups (trajectories, or steps of them); G groups.
"""

import numpy as np

from rolecall.algorithms.advantages.batch import STD_EPS
from rolecall.wire import Array


class Groups:
    """A division of things into groups that are compared within themselves."""

    def __init__(self, gids_B: Array) -> None:
        """`gids_B`: equal numbers are one group, whatever the order."""
        _, self.index_B, self.counts_G = np.unique(gids_B, return_inverse=True, return_counts=True)

    @property
    def counts_B(self) -> Array:
        """Size of each one's group."""
        return np.asarray(self.counts_G[self.index_B])

    def sum(self, values_B: Array) -> Array:
        """float64 [B]: the sum over each one's group."""
        return np.asarray(np.bincount(self.index_B, values_B, self.counts_G.size)[self.index_B])

    def mean(self, values_B: Array) -> Array:
        """float64 [B]: the mean over each one's group."""
        return np.asarray(self.sum(values_B) / self.counts_B)

    def centred(self, values_B: Array) -> Array:
        """float64 [B]: the distance from the group's mean; 0 in a group of one. Exactly 0 in a group of equal numbers,
        which rounding would not give.
        """
        return np.asarray(np.where(self.differs(values_B), values_B - self.mean(values_B), 0.0))

    def std(self, values_B: Array) -> Array:
        """float64 [B]: the sample standard deviation (n - 1) of each one's group; 0 in a group of one."""
        return np.asarray(np.sqrt(self.sum(self.centred(values_B) ** 2) / np.maximum(self.counts_B - 1, 1)))

    def normalized(self, values_B: Array) -> Array:
        """float64 [B]: centred over std; 0 in groups of one and of equal numbers."""
        return np.asarray(self.centred(values_B) / (self.std(values_B) + STD_EPS))

    def differs(self, values_B: Array) -> Array:
        """bool [B]: whether the group has two different numbers."""
        low_G, high_G = np.full(self.counts_G.size, np.inf), np.full(self.counts_G.size, -np.inf)
        np.minimum.at(low_G, self.index_B, values_B)
        np.maximum.at(high_G, self.index_B, values_B)
        return np.asarray((low_G < high_G)[self.index_B])
