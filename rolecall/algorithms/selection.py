"""The choice of the tokens that Clip-Cov and KL-Cov single out (arXiv:2505.22617, section 4).

They have the largest covariance of logprob and advantage in the mini-batch: their update lowers the entropy most.
Numpy.

A token's covariance is its own term (log pi - mean log pi)(A - mean A), the means over all trained tokens of the
mini-batch. Tokens are put in one order and the first of them are taken: the parts of a mini-batch need to agree on the
last token taken and on nothing else.

Shapes: M trained tokens of a part of a mini-batch, T tokens of one trajectory.
"""

import hashlib
from dataclasses import dataclass

import numpy as np

from rolecall.settings import CovarianceLoss
from rolecall.wire import Array


@dataclass(frozen=True)
class Tokens:
    """Trained tokens of a part of a mini-batch."""

    logprobs_M: Array
    """float [M], of the policy at this moment."""
    old_logprobs_M: Array
    """float [M]."""
    advantages_M: Array
    """float [M]."""
    keys_M: Array
    """int64 [M], of token_keys."""

    def sums(self) -> Array:
        """float64 [3]: number, sum of logprobs, sum of advantages; they add up over parts."""
        return np.array(
            [self.keys_M.size, self.logprobs_M.sum(dtype=np.float64), self.advantages_M.sum(dtype=np.float64)]
        )


@dataclass(frozen=True)
class Order:
    """The place of each of M tokens; smaller is earlier."""

    ranks_M: Array
    """float64 [M]; inf: never taken."""
    keys_M: Array
    """int64 [M], between equal ranks."""

    def first(self, num: int) -> "Order":
        """The `num` earliest, in order; fewer where there are not so many."""
        index = np.lexsort((self.keys_M, self.ranks_M))[:num]
        index = index[np.isfinite(self.ranks_M[index])]
        return Order(self.ranks_M[index], self.keys_M[index])

    def up_to(self, last: "Order") -> Array:
        """bool [M]: those not after the last of `last`, which is what `first` gave for all parts together."""
        if not last.ranks_M.size:
            return np.zeros(self.ranks_M.shape, np.bool_)
        rank, key = last.ranks_M[-1], last.keys_M[-1]
        taken_M: Array = (self.ranks_M < rank) | ((self.ranks_M == rank) & (self.keys_M <= key))
        return taken_M


def order(loss: CovarianceLoss, tokens: Tokens, sums: Array) -> Order:
    """The order of `tokens` in a mini-batch with `sums` (Tokens.sums over all its parts).

    KL-Cov: by falling covariance. Clip-Cov: at random by their keys, those within its bounds that PPO's clip leaves a
    gradient.
    """
    num, sum_logprobs, sum_advantages = sums
    covariance_M = (tokens.logprobs_M - sum_logprobs / max(num, 1)) * (
        tokens.advantages_M - sum_advantages / max(num, 1)
    )
    if loss.kind == "kl_cov":
        return Order(-covariance_M, tokens.keys_M)
    ratio_M = np.exp(np.clip(tokens.logprobs_M - tokens.old_logprobs_M, -20.0, 20.0))
    high_M = (tokens.advantages_M > 0) & (ratio_M > 1 + loss.clip_eps_high)
    low_M = (tokens.advantages_M < 0) & (ratio_M < 1 - loss.clip_eps_low)
    drawn_M = (covariance_M > loss.cov_low) & (covariance_M < loss.cov_high) & ~high_M & ~low_M
    ranks_M = np.where(drawn_M, 0.0, np.inf)
    return Order(ranks_M, tokens.keys_M)


def num_selected(loss: CovarianceLoss, num_tokens: int) -> int:
    """How many of a mini-batch's tokens are taken: its fraction, rounded down, and at least one."""
    return max(int(loss.fraction * num_tokens), 1)


def token_keys(trajectory: str, num_tokens: int) -> Array:
    """int64 [T]: numbers that look random and depend on the text `trajectory` and the token's index alone (SplitMix64,
    doi:10.1145/2660193.2660195).
    """
    start = np.uint64(int.from_bytes(hashlib.blake2b(trajectory.encode(), digest_size=8).digest(), "little"))
    mixed = start + np.arange(1, num_tokens + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((mixed ^ (mixed >> np.uint64(31))) >> np.uint64(1)).astype(np.int64)
