"""DPPO: a trust region in divergence instead of in ratio. Torch.

The divergence is of two outcomes, the sampled token and any other (the paper's binary approximation), so that it needs
no more than logprobs.

Shapes: N tokens of one microbatch.
"""

import torch

from rolecall.algorithms.losses.batch import PolicyBatch, TokenLosses


def dppo_tv(batch: PolicyBatch, *, max_divergence: float) -> TokenLosses:
    """-M r A per token, M = 0 where |pi - pi_old| > max_divergence and the step would go on in that direction
    (arXiv:2602.04879).

    That direction: up with A > 0 and r > 1, down with A < 0 and r < 1.
    """
    divergence_N = (batch.logprobs_N.detach().exp() - batch.old_logprobs_N.exp()).abs()
    return _within(batch, divergence_N, max_divergence)


def dppo_kl(batch: PolicyBatch, *, max_divergence: float) -> TokenLosses:
    """dppo_tv with the divergence p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)), in nats."""
    old_N = batch.old_logprobs_N
    other_N = _log_of_others(old_N) - _log_of_others(batch.logprobs_N.detach())
    divergence_N = -old_N.exp() * batch.log_ratio_N().detach() - torch.expm1(old_N) * other_N
    return _within(batch, divergence_N, max_divergence)


def _log_of_others(logprobs_N: torch.Tensor) -> torch.Tensor:
    """log(1 - p), bounded where p is 1 to the last bit."""
    return (-torch.expm1(logprobs_N)).clamp(min=torch.finfo(logprobs_N.dtype).eps).log()


def _within(batch: PolicyBatch, divergence_N: torch.Tensor, max_divergence: float) -> TokenLosses:
    outside_N, ratio_N = divergence_N > max_divergence, batch.ratio_N()
    high_N = outside_N & (batch.advantages_N > 0) & (ratio_N > 1)
    low_N = outside_N & (batch.advantages_N < 0) & (ratio_N < 1)
    losses_N = torch.where(high_N | low_N, 0.0, -ratio_N * batch.advantages_N)
    return TokenLosses(losses_N, {"clip_fraction_high": high_N, "clip_fraction_low": low_N})
