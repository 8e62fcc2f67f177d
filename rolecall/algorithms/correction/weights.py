"""Importance weights of sampled tokens. Torch, without gradient.

Log-ratios are log trainer - log sampler, of each token. Shapes: N tokens of one microbatch; S its sequences.
"""

import torch

from rolecall.algorithms.losses.batch import PolicyBatch, ratios


def token_weights_N(log_ratio_N: torch.Tensor, cap: float | None) -> torch.Tensor:
    """[N]: min(trainer / sampler, cap) per token: truncated importance sampling (Ionides 2008), per token as AIPO has
    it (LlamaRL, arXiv:2505.24034).
    """
    return _truncated(log_ratio_N, cap)


def sequence_weights_N(batch: PolicyBatch, log_ratio_N: torch.Tensor, cap: float | None) -> torch.Tensor:
    """[N]: min(product of the ratios of the sequence's tokens of the mask, cap), the same for all of them."""
    return _truncated(batch.sequence_sums_S(log_ratio_N), cap)[batch.sequence_N]


def icepop_weights_N(log_ratio_N: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """[N]: the ratio where low <= ratio <= high, else 0 (IcePop: Ring-1T, arXiv:2510.18855)."""
    ratio_N = _truncated(log_ratio_N, None)
    return torch.where((ratio_N >= low) & (ratio_N <= high), ratio_N, 0.0)


def _truncated(log_ratio: torch.Tensor, cap: float | None) -> torch.Tensor:
    return ratios(log_ratio.detach()).clamp(max=cap if cap is not None else torch.inf)
