"""Sums backward over time of ragged trajectories: the primitive of estimators with a number for each token. Numpy.

Shapes: B trajectories; M tokens of all of them, end to end; L tokens of the longest.
"""

from itertools import pairwise

import numpy as np

from rolecall.wire import Array


def discounted(values_M: Array, offsets: Array, decay: float) -> Array:
    """float64 [M]: x_t = values_t + decay * x_{t+1} within each trajectory, nothing after its last token. `offsets` int64 [B + 1] as in ScoredBatch.

    Trajectories stand right-aligned in [B, L], so that a step of time is one column: L steps in Python, all trajectories at once. L is made odd: columns of
    rows that are a power of two apart would all fall into the same few lines of the processor's cache.
    """
    bounds = list(pairwise(offsets.tolist()))
    width = max(stop - start for start, stop in bounds) | 1
    padded_BL = np.zeros((len(bounds), width))
    for row_L, (start, stop) in zip(padded_BL, bounds, strict=True):
        row_L[width - (stop - start) :] = values_M[start:stop]
    following_B = np.zeros(len(bounds))
    for now_B in padded_BL.T[::-1]:
        now_B += decay * following_B
        following_B = now_B
    out_M = np.empty(values_M.size)
    for row_L, (start, stop) in zip(padded_BL, bounds, strict=True):
        out_M[start:stop] = row_L[width - (stop - start) :]
    return out_M
