"""An advantage estimator of one's own: how far a response's reward is above the median of its group, which one lucky
response does not move.
"""

import numpy as np

from rolecall.algorithms.advantages import Estimate, Groups, ScoredBatch


def above_median(batch: ScoredBatch, *, scale: float = 1.0) -> Estimate:
    """The reward less the group's median, times `scale`, on every trained token. A group of one gets 0."""
    groups = Groups(batch.gids_B)
    medians_G = np.array([np.median(batch.totals_B[groups.index_B == group]) for group in range(groups.counts_G.size)])
    return Estimate(batch.spread(scale * (batch.totals_B - medians_G[groups.index_B])))
