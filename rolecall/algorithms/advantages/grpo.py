"""GRPO's group-relative advantage, with outcome and with process supervision, with and without the standard deviation.
Numpy.

Shapes: B trajectories; S steps of all trajectories, which are their tokens with a reward; M sampled tokens; N tokens of
the batch.
"""

import numpy as np

from rolecall.algorithms.advantages.batch import Estimate, ScoredBatch
from rolecall.algorithms.advantages.groups import Groups
from rolecall.algorithms.advantages.time import backward_sums
from rolecall.wire import Array


def grpo(totals_B: Array, gids_B: Array, *, normalize_std: bool) -> Array:
    """float64 [B]: (r_i - mean(group)) / (std(group) + eps) (GRPO, arXiv:2402.03300, section 4.1.2); without std,
    Dr.GRPO's centring (arXiv:2503.20783).

    std is the sample standard deviation (n - 1). A group of one, or of equal rewards, gets 0. A trajectory that is
    masked out counts in its group.
    """
    groups = Groups(gids_B)
    return groups.normalized(totals_B) if normalize_std else groups.centred(totals_B)


def grpo_process(batch: ScoredBatch, *, normalize_std: bool) -> Estimate:
    """Each step's reward is normalised over all steps of the group; a token's advantage is the sum of those from its
    step on (arXiv:2402.03300, section 4.1.3).

    A step ends at a sampled token whose reward is not 0, the last token's outcome reward included: a scorer that means
    "a step, worth nothing" must say so by another number. A group of one compares its own steps; a group with one step,
    or with equal ones, gets 0. Tokens after the last step get 0. InvalidInputError when no scorer gave token_rewards.
    """
    batch.column("token_rewards")
    rewards_M = batch.at_sampled(batch.rewards_N)
    steps_S = np.flatnonzero(rewards_M != 0)
    trajectory_S = np.searchsorted(batch.sampled_offsets, steps_S, side="right") - 1
    normalized_M = np.zeros(rewards_M.size)
    normalized_M[steps_S] = grpo(
        rewards_M[steps_S].astype(np.float64), batch.gids_B[trajectory_S], normalize_std=normalize_std
    )
    return Estimate(batch.scatter(backward_sums(normalized_M, batch.sampled_offsets)))
