"""Whitening over the whole batch. Numpy.

Shapes: N tokens of the batch.
"""

import numpy as np

from rolecall.algorithms.advantages.batch import STD_EPS
from rolecall.wire import Array


def whiten(advantages_N: Array, mask_N: Array) -> Array:
    """[N]: zero mean and unit standard deviation (n) over the masked tokens of the whole batch; 0 elsewhere, and everywhere when all are equal or none is."""
    chosen_M = advantages_N[mask_N != 0].astype(np.float64)
    if not chosen_M.size or chosen_M.min() == chosen_M.max():
        return np.zeros_like(advantages_N)
    whitened_N = advantages_N - float(chosen_M.mean())  # a NumPy scalar would make float32 columns float64
    whitened_N /= float(chosen_M.std()) + STD_EPS
    whitened_N *= mask_N
    return np.asarray(whitened_N)
