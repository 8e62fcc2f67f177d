"""Group-relative advantages that differ from GRPO in what they subtract or divide by: OPO, GPG, MaxRL and GDPO. Numpy.

In all of them a group of one, or of equal rewards, is 0 (GDPO: before its last normalisation), and a trajectory that is
masked out counts in its group.

Shapes: B trajectories.
"""

from collections.abc import Mapping

import numpy as np

from rolecall.algorithms.advantages.batch import STD_EPS, ScoredBatch
from rolecall.algorithms.advantages.groups import Groups
from rolecall.errors import InvalidInputError
from rolecall.wire import Array


def opo(totals_B: Array, gids_B: Array, lengths_B: Array) -> Array:
    """float64 [B]: r_i - sum(l r) / sum(l) over the group: the baseline of least variance when a gradient's squared
    norm grows with the length l in sampled tokens (OPO, arXiv:2505.23585).
    """
    groups = Groups(gids_B)
    baseline_B = groups.sum(lengths_B * totals_B) / np.maximum(groups.sum(lengths_B), 1)
    return np.asarray(np.where(groups.differs(totals_B), totals_B - baseline_B, 0.0))


def gpg(totals_B: Array, gids_B: Array) -> Array:
    """float64 [B]: alpha (r_i - mean(group)), alpha = B / (B - M), where M trajectories are in groups of equal rewards
    (GPG, arXiv:2504.02546, eq. 6 and 7 with F_norm = 1).

    alpha undoes that those dilute a mean over the batch. verl's gpg counts rewards that are not 0 instead; for groups
    that are all right that is another number. A batch without any difference gets 0.
    """
    groups = Groups(gids_B)
    return np.asarray(groups.centred(totals_B) * (totals_B.size / max(int(groups.differs(totals_B).sum()), 1)))


def maxrl(totals_B: Array, gids_B: Array) -> Array:
    """float64 [B]: (r_i - mean(group)) / mean(group) (MaxRL, arXiv:2602.02710), for rewards >= 0.

    A group whose mean is not above 0 gets 0: nobody in it succeeded.
    """
    groups = Groups(gids_B)
    mean_B = groups.mean(totals_B)
    return np.asarray(np.where(mean_B > 0, groups.centred(totals_B), 0.0) / np.where(mean_B > 0, mean_B, 1.0))


def gdpo(batch: ScoredBatch, weights: Mapping[str, float]) -> Array:
    """float64 [B]: A_i = sum_k w_k (r_ik - mean(group)) / std(group), each component by itself, then normalised over
    the batch's trajectories (GDPO, arXiv:2601.05242).

    Reads components, not rewards_N. A component without difference in a group is 0 there; a batch without any
    difference gets 0. Responses that a component does not apply to (NaN) take no part in its mean and std and get
    nothing from it. InvalidInputError names a weighted component that the scorer did not give; one that weighs nothing
    may be away.
    """
    combined_B = np.zeros(batch.gids_B.size)
    for name, weight in weights.items():
        if not weight:
            continue
        if name not in batch.components:
            raise InvalidInputError(
                f"gdpo weighs the reward component {name!r}, and the scorer gave {sorted(batch.components)}"
            )
        applies_B = ~np.isnan(batch.components[name])
        combined_B[applies_B] += weight * Groups(batch.gids_B[applies_B]).normalized(
            batch.components[name][applies_B].astype(np.float64)
        )
    if combined_B.min() == combined_B.max():
        return np.zeros_like(combined_B)
    return np.asarray((combined_B - combined_B.mean()) / (combined_B.std() + STD_EPS))
