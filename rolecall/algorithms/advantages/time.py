"""Sums over time: the primitives of estimators with a number for each token. Numpy.

Shapes: B trajectories; L steps of time, as ScoredBatch.in_time lays them; M sampled tokens of all trajectories, end to
end.
"""

import numpy as np

from rolecall.wire import Array


def discount(values_BL: Array, decay: float) -> Array:
    """x_t = values_t + decay * x_{t+1}, in place; the last column stays. Python steps over time, numpy over all
    trajectories at once.
    """
    following_B = np.zeros(values_BL.shape[0])
    for now_B in values_BL.T[::-1]:
        now_B += decay * following_B
        following_B = now_B
    return values_BL


def forward_sums(values_M: Array, offsets: Array) -> Array:
    """float64 [M]: the sum over each trajectory's tokens up to this one, this one included. `offsets` int64 [B + 1] as
    ScoredBatch.sampled_offsets.
    """
    sums = np.concatenate([[0.0], np.cumsum(values_M, dtype=np.float64)])
    return np.asarray(sums[1:] - np.repeat(sums[offsets[:-1]], np.diff(offsets)))


def backward_sums(values_M: Array, offsets: Array) -> Array:
    """float64 [M]: the sum over each trajectory's tokens from this one on."""
    sums = np.concatenate([[0.0], np.cumsum(values_M, dtype=np.float64)])
    return np.asarray(np.repeat(sums[offsets[1:]], np.diff(offsets)) - sums[:-1])
