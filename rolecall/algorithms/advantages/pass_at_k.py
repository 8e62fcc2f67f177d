"""The advantage of pass@k training, in closed form. Numpy.

Shapes: B trajectories.
"""

import numpy as np

from rolecall.algorithms.advantages.groups import Groups
from rolecall.wire import Array


def pass_at_k(totals_B: Array, gids_B: Array, *, k: int, solved_at: float) -> Array:
    """float64 [B]: the mean GRPO advantage of all k-subsets that a response is in, when a subset's reward is whether
    any of it is solved (Pass@k Training, arXiv:2508.10751, section 2.4, the analytic derivation).

    With n responses, w of them wrong: R = 1 - C(w, k) / C(n, k), sigma = sqrt(R (1 - R)); a right response gets (1 - R)
    / sigma, a wrong one (1 - R - C(w - 1, k - 1) / C(n - 1, k - 1)) / sigma. Groups in which no subset or every subset
    is solved get 0: groups of one, of all right, of fewer than k wrong. k = 1 is GRPO of right and wrong with the
    population's standard deviation. k above n counts as n.

    Preferred over giving the best response its lead over the second best (verl's grpo_passk, arXiv:2503.19595): that is
    for k = n alone and leaves all but one response without a signal. It reads more than right and wrong, which this
    does not.
    """
    groups = Groups(gids_B)
    right_B = totals_B >= solved_at
    n_B = groups.counts_B.astype(np.float64)
    wrong_B = groups.sum(~right_B)
    k_B = np.minimum(k, n_B)
    none_B = _subset_fraction(wrong_B, n_B, k_B)
    sigma_B = np.sqrt(none_B * (1 - none_B))
    without_B = np.where(right_B, 0.0, _subset_fraction(wrong_B - 1, n_B - 1, k_B - 1))
    return np.asarray(np.where(sigma_B > 0, none_B - without_B, 0.0) / np.where(sigma_B > 0, sigma_B, 1.0))


def _subset_fraction(part_B: Array, whole_B: Array, k_B: Array) -> Array:
    """C(part, k) / C(whole, k): the chance that k drawn without replacement are all of the part."""
    fraction_B = np.ones(part_B.size)
    for j in range(int(k_B.max(initial=0))):
        drawn_B = j < k_B
        fraction_B *= np.where(drawn_B, np.maximum(part_B - j, 0), 1.0) / np.where(drawn_B, whole_B - j, 1.0)
    return fraction_B
