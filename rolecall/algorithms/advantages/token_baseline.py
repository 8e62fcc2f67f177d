"""The optimal token baseline. Numpy.

Shapes: B trajectories; M sampled tokens of the batch; C cells, one for each position in each group.
"""

import numpy as np

from rolecall.algorithms.advantages.batch import Estimate, ScoredBatch
from rolecall.algorithms.advantages.groups import Groups
from rolecall.algorithms.advantages.time import backward_sums, forward_sums

ENERGY_EPS = 1e-8
"""A group's energy up to this is that of a certain policy and rounding."""


def optimal_token_baseline(batch: ScoredBatch) -> Estimate:
    """A_t = G_t - B_t, B_t = sum(G_t W_t) / sum(W_t) over the group's responses that have a t-th sampled token (OTB,
    arXiv:2602.07078).

    G_t is the reward to go and W_t = sum_{s <= t} (1 - 2 pi_s + sum_v pi_s(v)^2), the squared norms of the score with
    respect to the logits, summed up to t: the energy of a path. Reads old_logprobs and sum_squared_probs. A group of
    one gets 0, and so do tokens beyond the second longest response: nothing is left to compare with. (verl gives those
    the reward to go as an option.) Where all of W is 0, the policy having been certain, the baseline is 0. A norm that
    rounding made negative counts as 0, so that a baseline never leaves the range of its G_t. InvalidInputError without
    the columns.
    """
    to_go_M = backward_sums(batch.at_sampled(batch.rewards_N), batch.sampled_offsets)
    probs_M = np.exp(batch.at_sampled(batch.column("old_logprobs")).astype(np.float64))
    norms_M = np.maximum(1 - 2 * probs_M + batch.at_sampled(batch.column("sum_squared_probs")), 0)
    energy_M = forward_sums(norms_M, batch.sampled_offsets)
    position_M = np.arange(energy_M.size) - np.repeat(batch.sampled_offsets[:-1], batch.num_sampled_B)
    groups = Groups(batch.gids_B)
    cell_M = np.repeat(groups.index_B, batch.num_sampled_B) * int(batch.num_sampled_B.max()) + position_M
    weights_C = np.bincount(cell_M, energy_M)
    baseline_C = np.bincount(cell_M, energy_M * to_go_M) / np.where(weights_C > ENERGY_EPS, weights_C, np.inf)
    alone_C = np.bincount(cell_M) == 1
    return Estimate(batch.scatter(np.where(alone_C[cell_M], 0.0, to_go_M - baseline_C[cell_M])))
