"""Sampler against trainer: importance weights that correct for it and numbers that show it.

The sampler (rollout) and the trainer (actor) compute the same policy with other kernels, and, when staleness is allowed, with other weights. Pure torch.
Left out: sequence-level rejection and IcePop's two-sided mask.

Shapes: N tokens, of one microbatch or of a whole batch.
"""

from dataclasses import dataclass

import torch

LOG_RATIO_BOUND = 20.0
"""log-ratios are held within +-this before exp."""


def truncated_weights_N(old_logprobs_N: torch.Tensor, rollout_logprobs_N: torch.Tensor, cap: float) -> torch.Tensor:
    """float32 [N]: min(pi_old / pi_rollout, cap) per token, without gradient.

    Truncated importance sampling (Ionides 2008), as LlamaRL applies it to a sampler that differs from the trainer (arXiv:2505.24034).
    """
    log_ratio_N = (old_logprobs_N - rollout_logprobs_N).detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return log_ratio_N.exp().clamp(max=cap)


@dataclass(frozen=True)
class Mismatch:
    """How far the sampler's logprobs are from the trainer's on the same tokens; all 0 without a token."""

    num_tokens: int
    kl: float
    """k3 estimate of KL(sampler || trainer), mean per token; the tokens were drawn from the sampler."""
    mean_abs: float
    """Mean |rollout_logprobs - old_logprobs|."""
    p999_abs: float
    """99.9th percentile of it. The largest over ranks bounds the whole batch's."""
    max_abs: float


def mismatch(rollout_logprobs_N: torch.Tensor, old_logprobs_N: torch.Tensor, mask_N: torch.Tensor) -> Mismatch:
    """Diagnostics over the tokens of mask_N (bool [N]). Restrict the mask to tokens of one policy version to measure kernels alone."""
    gap_M = (old_logprobs_N - rollout_logprobs_N)[mask_N].double()
    if gap_M.numel() == 0:
        return Mismatch(0, 0.0, 0.0, 0.0, 0.0)
    bounded_M = gap_M.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    size_M = gap_M.abs().sort().values
    rank = min(size_M.numel() - 1, int(0.999 * size_M.numel()))
    kl = (torch.expm1(bounded_M) - bounded_M).mean()
    return Mismatch(gap_M.numel(), float(kl), float(size_M.mean()), float(size_M[rank]), float(size_M[-1]))
