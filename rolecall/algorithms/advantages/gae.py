"""GAE over a critic's values. Numpy.

Shapes: B trajectories; M sampled tokens of the batch; N tokens of the batch. values_N[t] is the value before token t.
"""

import numpy as np

from rolecall.algorithms.advantages.batch import Estimate, ScoredBatch
from rolecall.algorithms.advantages.time import discounted
from rolecall.algorithms.advantages.whiten import whiten


def gae(batch: ScoredBatch, *, gamma: float, gae_lambda: float, whitened: bool = False) -> Estimate:
    """delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lambda A_{t+1} (GAE, arXiv:1506.02438, eq. 16); returns = A + V.

    Time runs over sampled tokens: what an environment said between two turns is stepped over, with no discount. After the last sampled token comes the
    column bootstrap_value; a one-token response gets r + gamma * bootstrap - V. Groups do not matter. A trajectory that is masked out gets 0 and has no part
    in whitening. InvalidInputError without the critic's columns.
    """
    values_M = batch.column("values")[batch.sampled_M].astype(np.float64)
    lasts_B = batch.sampled_offsets[1:] - 1
    sampled_B = batch.num_sampled_B > 0
    deltas_M = batch.rewards_N[batch.sampled_M].astype(np.float64)
    deltas_M -= values_M
    next_values_M = np.empty_like(values_M)
    next_values_M[:-1] = values_M[1:]
    next_values_M[lasts_B[sampled_B]] = batch.column("bootstrap_value")[sampled_B]
    next_values_M *= gamma
    deltas_M += next_values_M
    advantages_M = discounted(deltas_M, batch.sampled_offsets, gamma * gae_lambda)
    advantages_N = batch.scatter(advantages_M)
    advantages_M += values_M
    return Estimate(whiten(advantages_N, batch.loss_mask_N) if whitened else advantages_N, batch.scatter(advantages_M))
