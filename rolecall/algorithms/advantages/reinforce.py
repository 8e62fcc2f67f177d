"""Advantages from a trajectory's own rewards to go: REINFORCE++ and ReMax. Numpy.

Shapes: B trajectories; L steps of time; N tokens of the batch.
"""

from rolecall.algorithms.advantages.batch import Estimate, ScoredBatch
from rolecall.algorithms.advantages.groups import Groups
from rolecall.algorithms.advantages.time import discount
from rolecall.algorithms.advantages.whiten import whiten
from rolecall.errors import InvalidInputError
from rolecall.wire import Array


def rewards_to_go(batch: ScoredBatch, gamma: float) -> Array:
    """float64 [B, L]: G_t = r_t + gamma G_{t+1} over a trajectory's sampled tokens; what an environment said is stepped
    over.
    """
    return discount(batch.in_time(batch.rewards_N), gamma)


def reinforce_plus_plus(batch: ScoredBatch, *, gamma: float) -> Estimate:
    """Reward to go, whitened over the trained tokens of the batch (REINFORCE++, arXiv:2501.03262: the reward less the
    KL penalties from t on, normalised by the global batch's mean and standard deviation; gamma 1 is the paper's).

    Groups do not matter: a group of one is like any other. A batch whose returns are all equal gets 0.
    """
    return Estimate(whiten(batch.from_time(rewards_to_go(batch, gamma)), batch.loss_mask_N))


def reinforce_plus_plus_baseline(batch: ScoredBatch) -> Estimate:
    """REINFORCE++ with baseline (arXiv:2501.03262): reward minus the group's mean, then whitened over the trained
    tokens of the batch.

    A group of one, or of equal rewards, is 0 before whitening, and minus the batch's mean over its standard deviation
    after it.
    """
    return Estimate(whiten(batch.spread(Groups(batch.gids_B).centred(batch.totals_B)), batch.loss_mask_N))


def remax(batch: ScoredBatch) -> Estimate:
    """Reward to go minus the reward of the greedy response to the same prompt (ReMax, arXiv:2310.10505).

    Groups do not matter: a group of one is like any other. InvalidInputError when nobody scored a greedy response.
    """
    if batch.greedy_rewards is None:
        raise InvalidInputError("remax subtracts the greedy response's reward, and the batch has none")
    return Estimate(batch.from_time(rewards_to_go(batch, 1.0) - batch.greedy_rewards[:, None]))
