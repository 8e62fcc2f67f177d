"""The measures of a policy by several responses to one prompt: pass@k and maj@k. Numpy, no state.

Both are expectations over subsets of k out of the n responses that were scored, so that every response counts for every
k and nothing is drawn.

Shapes: N responses to one prompt; A distinct answers among them; K = N + 1 sizes of a subset, 0 included; T answers
that share the most votes.
"""

from collections.abc import Collection, Sequence
from math import comb

import numpy as np

from rolecall.wire import Array

MAX_EXACT = 64
"""Most responses to a prompt for which maj@k sums over all subsets; from there on it is estimated."""
NUM_DRAWS = 1024
"""Subsets that the estimate looks at: its standard error is below 0.5 / sqrt(1024) = 0.016 for one prompt."""


def subset_sizes(num_responses: int) -> list[int]:
    """The k that are reported: the powers of two up to n, and n."""
    powers = [2**i for i in range(num_responses.bit_length()) if 2**i <= num_responses]
    return sorted({*powers, num_responses})


def pass_at_k(num_responses: int, num_solved: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): the chance that k of the n responses hold a solved one, unbiased (Codex,
    arXiv:2107.03374, eq. 1). Needs k <= n.
    """
    return 1 - comb(num_responses - num_solved, k) / comb(num_responses, k)


def majority_at_k(answers: Sequence[str | None], solved_N: Array, sizes: Collection[int]) -> dict[int, float]:
    """The chance, by k, that the most frequent answer of k of the n responses is solved.

    This is majority vote, or self-consistency (arXiv:2203.11171).

    Equal strings vote together; a response without an answer (None) takes a place among the k and does not vote, and k
    without a vote solve nothing. Of answers with equally many votes each wins with the same chance. Where a scorer
    disagrees about one answer, it counts as its share of solved responses. Exact up to MAX_EXACT responses; beyond, the
    mean over NUM_DRAWS subsets from a generator with a fixed seed.
    """
    names = sorted({answer for answer in answers if answer is not None})
    index = {name: i for i, name in enumerate(names)}
    voters = np.array([index[answer] for answer in answers if answer is not None], np.int64)
    solved_votes = np.array(
        [bool(solved) for answer, solved in zip(answers, solved_N, strict=True) if answer is not None], np.float64
    )
    counts_A = np.bincount(voters, minlength=len(names))
    share_A = np.bincount(voters, solved_votes, len(names)) / counts_A
    chance = _exact_chances if len(answers) <= MAX_EXACT else _estimated_chances
    return chance(counts_A, share_A, len(answers), sizes)


def _exact_chances(counts_A: Array, share_A: Array, num_responses: int, sizes: Collection[int]) -> dict[int, float]:
    """Sums over the number of votes v that win. All responses whose answer has fewer than v in all may be chosen
    freely; the others, answer by answer, with fewer than v or exactly v. ways[0, t, k] counts the choices of k with t
    answers at v, ways[1, t, k] sums the shares of those t answers over them.
    """
    won_K = np.zeros(num_responses + 1)
    for votes in range(1, int(counts_A.max(initial=0)) + 1):
        reaching = counts_A >= votes
        num_free = num_responses - int(counts_A[reaching].sum())
        ways = np.zeros((2, num_responses // votes + 1, num_responses + 1))
        ways[0, 0, : num_free + 1] = [comb(num_free, j) for j in range(num_free + 1)]
        for count, share in zip(counts_A[reaching].tolist(), share_A[reaching].tolist(), strict=True):
            after = np.zeros_like(ways)
            for j in range(votes):
                after[:, :, j:] += comb(count, j) * ways[:, :, : num_responses + 1 - j]
            tied = comb(count, votes) * ways[:, :-1, : num_responses + 1 - votes]
            after[:, 1:, votes:] += tied
            after[1, 1:, votes:] += share * tied[0]
            ways = after
        won_K += (ways[1, 1:] / np.arange(1, ways.shape[1])[:, None]).sum(axis=0)
    return {k: float(won_K[k] / comb(num_responses, k)) for k in sizes}


def _estimated_chances(counts_A: Array, share_A: Array, num_responses: int, sizes: Collection[int]) -> dict[int, float]:
    num_silent = num_responses - int(counts_A.sum())
    chances = {}
    for k in sizes:
        drawn = np.random.default_rng(k).multivariate_hypergeometric([*counts_A, num_silent], k, NUM_DRAWS)[:, :-1]
        wins = (drawn == drawn.max(axis=1, initial=0, keepdims=True)) & (drawn > 0)
        chances[k] = float(((wins * share_A).sum(axis=1) / np.maximum(wins.sum(axis=1), 1)).mean())
    return chances
