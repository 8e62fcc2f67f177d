"""GAE over a critic's values. Numpy.

Shapes: B trajectories; L steps of time; N tokens of the batch. values[t] is the value before token t.
"""

import numpy as np

from rolecall.algorithms.advantages.batch import Estimate, ScoredBatch
from rolecall.algorithms.advantages.time import discount
from rolecall.algorithms.advantages.whiten import whiten


def gae(batch: ScoredBatch, *, gamma: float, gae_lambda: float, whitened: bool = False) -> Estimate:
    """delta_t = r_t + gamma V_{t+1} - V_t, A_t = delta_t + gamma lambda A_{t+1} (GAE, arXiv:1506.02438, eq. 16); returns = A + V.

    Time runs over sampled tokens: what an environment said between two turns is stepped over, with no discount. After the last sampled token comes the
    column bootstrap_value; a one-token response gets r + gamma * bootstrap - V. Groups do not matter. A trajectory that is masked out gets 0 and has no part
    in whitening. InvalidInputError without the critic's columns.
    """
    values_BL, deltas_BL = batch.in_time(batch.column("values")), batch.in_time(batch.rewards_N)
    deltas_BL -= values_BL
    values_BL *= gamma
    deltas_BL[:, :-1] += values_BL[:, 1:]
    deltas_BL[:, -1] += gamma * batch.column("bootstrap_value").astype(np.float64)
    advantages_N = batch.from_time(discount(deltas_BL, gamma * gae_lambda))
    returns_N = advantages_N + batch.column("values")
    returns_N *= batch.loss_mask_N
    return Estimate(whiten(advantages_N, batch.loss_mask_N) if whitened else advantages_N, returns_N)
