"""Whitening over the whole batch. Numpy.

Shapes: T tokens of one trajectory, another for each.
"""

from collections.abc import Sequence

import numpy as np

from rolecall.algorithms.advantages.batch import STD_EPS
from rolecall.wire import Array


def whiten(advantages: Sequence[Array], masks: Sequence[Array]) -> list[Array]:
    """Zero mean and unit standard deviation over the masked tokens of the whole batch; 0 elsewhere."""
    chosen = np.concatenate([a[mask != 0] for a, mask in zip(advantages, masks, strict=True)]).astype(np.float64)
    if not chosen.size:
        return [np.zeros_like(a) for a in advantages]
    mean, std = chosen.mean(), chosen.std()
    return [np.where(mask != 0, (a - mean) / (std + STD_EPS), 0.0).astype(np.float32) for a, mask in zip(advantages, masks, strict=True)]
