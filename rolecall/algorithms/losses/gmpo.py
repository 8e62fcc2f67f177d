"""GMPO: the geometric mean of clipped ratios. Torch.

Shapes: N tokens of one microbatch; S its sequences.
"""

import torch

from rolecall.algorithms.losses.batch import PolicyBatch, TokenLosses, ratios


def gmpo(batch: PolicyBatch, *, clip_eps_low: float, clip_eps_high: float) -> TokenLosses:
    """The geometric mean of clipped ratios: -A exp(mean over the sequence's tokens of l) on each token.

    l = min(log r, high) where A > 0 and max(log r, -low) where A < 0 (arXiv:2507.20673).

    A is the mean of the sequence's advantages: the paper has one per sequence. Every token carries its sequence's loss,
    so that seq_mean_token_mean gives the paper's mean over sequences; weights of the off-policy correction act through
    their mean over the sequence.
    """
    log_ratio_N = batch.log_ratio_N()
    advantages_S = batch.sequence_means_S(batch.advantages_N)
    advantages_N = advantages_S[batch.sequence_N]
    high_N, low_N = (
        (advantages_N > 0) & (log_ratio_N > clip_eps_high),
        (advantages_N < 0) & (log_ratio_N < -clip_eps_low),
    )
    bounded_N = torch.where(high_N, clip_eps_high, torch.where(low_N, -clip_eps_low, log_ratio_N))
    losses_S = -advantages_S * ratios(batch.sequence_means_S(bounded_N))
    return TokenLosses(losses_S[batch.sequence_N], {"clip_fraction_high": high_N, "clip_fraction_low": low_N})
