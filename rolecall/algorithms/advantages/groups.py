"""Statistics of groups and of ragged rows: the primitives that estimators are made of. Numpy, no loop over tokens of Python objects.

Shapes: B trajectories; G groups; T tokens of one trajectory; L sampled tokens of the longest response.
"""

from collections.abc import Sequence

import numpy as np

from rolecall.wire import Array


class Groups:
    """Which trajectories are compared with one another."""

    def __init__(self, gids: Sequence[int]) -> None:
        _, self.index_B, self.counts_G = np.unique(np.asarray(gids), return_inverse=True, return_counts=True)

    @property
    def counts_B(self) -> Array:
        """Size of each trajectory's group."""
        return np.asarray(self.counts_G[self.index_B])

    def sum(self, values_B: Array) -> Array:
        """float64 [B]: the sum over each trajectory's group."""
        return np.asarray(np.bincount(self.index_B, values_B, self.counts_G.size)[self.index_B])

    def mean(self, values_B: Array) -> Array:
        """float64 [B]: the mean over each trajectory's group."""
        return np.asarray(self.sum(values_B) / self.counts_B)

    def std(self, values_B: Array) -> Array:
        """float64 [B]: the sample standard deviation (n - 1) of each trajectory's group; 0 in a group of one."""
        return np.asarray(np.sqrt(self.sum((values_B - self.mean(values_B)) ** 2) / np.maximum(self.counts_B - 1, 1)))


def totals(rewards: Sequence[Array]) -> Array:
    """float64 [B]: the sum of each trajectory's rewards."""
    return np.array([float(rewards_T.sum(dtype=np.float64)) for rewards_T in rewards])


def compact(columns: Sequence[Array], positions: Sequence[Array], valid_BL: Array) -> Array:
    """float64 [B, L]: each row's sampled tokens, left-aligned."""
    out_BL = np.zeros(valid_BL.shape)
    if columns:
        out_BL[valid_BL] = np.concatenate([column_T[p] for column_T, p in zip(columns, positions, strict=True)])
    return out_BL


def scatter(values_BL: Array, positions: Sequence[Array], masks: Sequence[Array]) -> list[Array]:
    """B arrays float32 [T]: `compact` undone, 0 elsewhere."""
    columns = []
    for values_L, p, mask_T in zip(values_BL, positions, masks, strict=True):
        column_T = np.zeros(mask_T.shape, np.float32)
        column_T[p] = values_L[: p.size]
        columns.append(column_T)
    return columns


def spread(values_B: Array, masks: Sequence[Array]) -> list[Array]:
    """B arrays float32 [T]: each trajectory's number on the tokens of its mask, 0 elsewhere."""
    return [np.where(mask_T != 0, np.float32(value), np.float32(0)) for value, mask_T in zip(values_B, masks, strict=True)]
