"""Whitening over the whole batch. Numpy.

Shapes: N tokens of the batch.
"""

import math

import numpy as np

from rolecall.algorithms.advantages.batch import STD_EPS
from rolecall.wire import Array


def whiten(advantages_N: Array, mask_N: Array) -> Array:
    """[N]: zero mean and unit standard deviation (n) over the masked tokens of the whole batch; 0 elsewhere, and
    everywhere (but for rounding) when all are equal or none is. `advantages_N` must be 0 outside the mask.
    """
    num_tokens = max(int(np.count_nonzero(mask_N)), 1)
    whitened_N = advantages_N - float(advantages_N.sum(dtype=np.float64)) / num_tokens
    whitened_N *= mask_N
    whitened_N /= math.sqrt(np.square(whitened_N).sum(dtype=np.float64) / num_tokens) + STD_EPS
    return np.asarray(whitened_N)
