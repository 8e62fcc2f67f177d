"""The distance of the sampler's logprobs from the trainer's on the same tokens.

Sums that add up over microbatches and ranks, and the numbers that are made of them. Torch.

The tokens were drawn from the sampler. r = trainer / sampler of a token, or the product over a sequence's tokens.

Shapes: N tokens of one microbatch, of S sequences; or of a whole batch.
"""

import math
from dataclasses import dataclass, fields
from typing import Self

import torch

from rolecall.algorithms.bounds import LOG_RATIO_BOUND
from rolecall.algorithms.kl import estimates


@dataclass(frozen=True)
class MismatchSums:
    """Sums over tokens, and over sequences with a token. They add up. float64."""

    num_tokens: float = 0.0
    gap: float = 0.0
    """Sum of log r."""
    k3: float = 0.0
    """Sum of r - 1 - log r."""
    reverse_k3: float = 0.0
    """Sum of r log r - (r - 1)."""
    sampler_logprob: float = 0.0
    trainer_logprob: float = 0.0
    ratio: float = 0.0
    ratio_square: float = 0.0
    sampler_prob: float = 0.0
    trainer_prob: float = 0.0
    sampler_prob_square: float = 0.0
    trainer_prob_square: float = 0.0
    prob_product: float = 0.0
    num_sequences: float = 0.0
    sequence_ratio: float = 0.0
    sequence_ratio_square: float = 0.0

    def numbers(self) -> list[float]:
        """Returns the sums as one array in order of the fields, so that ranks can add them up."""
        return [getattr(self, field.name) for field in fields(self)]

    def __add__(self, other: Self) -> "MismatchSums":
        return MismatchSums(*(a + b for a, b in zip(self.numbers(), other.numbers(), strict=True)))


def mismatch_sums(
    sampled_N: torch.Tensor, trained_N: torch.Tensor, mask_N: torch.Tensor, sequence_N: torch.Tensor, num_sequences: int
) -> MismatchSums:
    """Returns the sums over the tokens of mask_N (bool [N]).

    sampled_N are the sampler's logprobs, trained_N the trainer's; sequence_N is int64 [N] in 0..num_sequences - 1.
    """
    sampler_M, trainer_M = sampled_N[mask_N].double(), trained_N[mask_N].double()
    gap_M = trainer_M - sampler_M
    log_ratio_M = gap_M.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio_M = log_ratio_M.exp()
    p_M, q_M = sampler_M.exp(), trainer_M.exp()
    counts_S, gaps_S = (torch.zeros(num_sequences, dtype=torch.float64, device=gap_M.device) for _ in range(2))
    counts_S.index_add_(0, sequence_N[mask_N], torch.ones_like(gap_M))
    gaps_S.index_add_(0, sequence_N[mask_N], gap_M)
    ratio_S = torch.where(counts_S > 0, gaps_S.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp(), 0.0)
    columns = [
        torch.ones_like(gap_M), gap_M, estimates(gap_M, "k3"), ratio_M * log_ratio_M - torch.expm1(log_ratio_M),
        sampler_M, trainer_M, ratio_M, ratio_M.square(), p_M, q_M, p_M.square(), q_M.square(), p_M * q_M,
    ]  # fmt: skip
    sums = [*(column.sum() for column in columns), (counts_S > 0).sum(), ratio_S.sum(), ratio_S.square().sum()]
    return MismatchSums(*torch.stack([number.double() for number in sums]).tolist())


@dataclass(frozen=True)
class Mismatch:
    """The measures that sums over at least one token amount to."""

    kl: float
    """k3 estimate of KL(sampler || trainer), mean per token: never negative."""
    kl_k1: float
    """k1 estimate of the same: unbiased and noisy, so it may be negative. Far from `kl`, a few tokens make either."""
    reverse_kl: float
    """KL(trainer || sampler) by importance weights: mean of r log r - (r - 1), never negative."""
    sampler_perplexity: float
    """exp(-mean logprob) of the sampler."""
    trainer_perplexity: float
    """The trainer's of the same tokens."""
    ess_tokens: float
    """Effective sample size of the token ratios, (sum r)^2 / sum r^2, as a share of the tokens: 1 is on-policy."""
    ess_sequences: float
    """The same of the sequences' ratios, as a share of the sequences."""
    correlation: float | None
    """Pearson's, of the probabilities that both give the tokens; None where one of them gives all tokens the same."""


def mismatch(sums: MismatchSums) -> Mismatch | None:
    """None without a token."""
    n = sums.num_tokens
    if not n:
        return None
    return Mismatch(
        kl=sums.k3 / n,
        kl_k1=-sums.gap / n,
        reverse_kl=sums.reverse_k3 / n,
        sampler_perplexity=_perplexity(sums.sampler_logprob / n),
        trainer_perplexity=_perplexity(sums.trainer_logprob / n),
        ess_tokens=sums.ratio**2 / (sums.ratio_square * n),
        ess_sequences=sums.sequence_ratio**2 / (sums.sequence_ratio_square * sums.num_sequences),
        correlation=_correlation(sums),
    )


def _perplexity(mean_logprob: float) -> float:
    return math.exp(min(-mean_logprob, 700.0))  # what a float holds


def _correlation(sums: MismatchSums) -> float | None:
    n = sums.num_tokens
    sampler_mean, trainer_mean = sums.sampler_prob / n, sums.trainer_prob / n
    sampler_variance = sums.sampler_prob_square / n - sampler_mean**2
    trainer_variance = sums.trainer_prob_square / n - trainer_mean**2
    if min(sampler_variance, trainer_variance) <= 1e-12:  # rounding of sums of numbers up to 1 leaves about this
        return None
    return (sums.prob_product / n - sampler_mean * trainer_mean) / math.sqrt(sampler_variance * trainer_variance)


@dataclass(frozen=True)
class Spread:
    """Order statistics of the gaps log r on one rank. They do not add up: the extremes over ranks are exact for largest
    and smallest, a bound for the rest.
    """

    mean_abs: float
    """Mean |log r|."""
    p999_abs: float
    """99.9th percentile of |log r|."""
    max_abs: float
    ratio_min: float
    ratio_p01: float
    """1st percentile of r."""
    ratio_p99: float
    """99th percentile of r."""
    ratio_max: float


def spread(sampled_N: torch.Tensor, trained_N: torch.Tensor, mask_N: torch.Tensor) -> Spread | None:
    """Returns the extremes and percentiles over the tokens of mask_N (bool [N]); None without one. Restrict the mask to
    tokens of one policy version to measure kernels alone.
    """
    gap_M = (trained_N - sampled_N)[mask_N].double().sort().values
    if not gap_M.numel():
        return None
    size_M = gap_M.abs().sort().values
    ratio_M = gap_M.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    at = [_at(size_M, 0.999), size_M[-1], ratio_M[0], _at(ratio_M, 0.01), _at(ratio_M, 0.99), ratio_M[-1]]
    return Spread(*torch.stack([size_M.mean(), *at]).tolist())


def _at(sorted_M: torch.Tensor, quantile: float) -> torch.Tensor:
    return sorted_M[min(sorted_M.numel() - 1, int(quantile * sorted_M.numel()))]
