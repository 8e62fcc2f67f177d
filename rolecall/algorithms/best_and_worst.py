"""The measures of graded rewards by several responses to one prompt: best@k and worst@k. Numpy, no state.

Both are expectations over all subsets of k out of the n responses that were scored, by order statistics: nothing is
drawn.

Shapes: N responses to one prompt.
"""

from collections.abc import Collection
from functools import cache
from math import comb

import numpy as np

from rolecall.wire import Array


def is_graded(rewards_N: Array) -> bool:
    """Whether some reward is neither 0 nor 1, as float32, which rewards are in training. Of others pass@k says it."""
    return bool((~np.isin(rewards_N.astype(np.float32), (0, 1))).any())


def best_and_worst_at_k(rewards_N: Array, sizes: Collection[int]) -> dict[int, tuple[float, float]]:
    """The expected largest and smallest reward, by k, of k of the n responses. Needs k <= n.

    Of all C(n, k) subsets the i-th smallest reward is the largest in C(i - 1, k - 1): those whose others are among the
    i - 1 below it. Of equal rewards any may be called the smaller.
    """
    ascending_N = np.sort(rewards_N)
    of_largest = {k: _chances_of_largest(len(ascending_N), k) for k in sizes}
    return {k: (float(ascending_N @ of_largest[k]), float(ascending_N[::-1] @ of_largest[k])) for k in sizes}


@cache
def _chances_of_largest(num_responses: int, k: int) -> Array:
    num_subsets = comb(num_responses, k)
    return np.array([comb(i, k - 1) / num_subsets for i in range(num_responses)])
