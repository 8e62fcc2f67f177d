"""Losses over packed tokens: PPO's clipped objective with its refinements, and the clipped value loss.

Pure torch: (loss, metrics as detached scalar tensors). Every loss is sum(weights_N * token losses) with the weights of aggregation.py, so that the parts of a
mini-batch add up. The caller turns metrics into typed reductions. Left out: sequence-level ratios (GSPO) and soft clips.

Shapes: N tokens of one microbatch, packed. mask_N is bool, everything else float32.
"""

from dataclasses import dataclass

import torch

LOG_RATIO_BOUND = 20.0
"""log-ratios are held within +-this before exp, so that one stray token cannot make the loss inf."""


@dataclass(frozen=True)
class PolicyTerms:
    """Detached [N] tensors for metrics; meaningful where the mask is true."""

    ratio_N: torch.Tensor
    clipped_high_N: torch.Tensor
    """bool, the upper bound took the gradient away."""
    clipped_low_N: torch.Tensor
    """bool, the lower bound (or the dual clip) took the gradient away."""


def policy_loss(
    logprobs_N: torch.Tensor,
    old_logprobs_N: torch.Tensor,
    advantages_N: torch.Tensor,
    weights_N: torch.Tensor,
    *,
    clip_eps_low: float,
    clip_eps_high: float,
    dual_clip: float | None = None,
    correction_N: torch.Tensor | None = None,
) -> tuple[torch.Tensor, PolicyTerms]:
    """-min(r A, clip(r, 1 - low, 1 + high) A) per token (PPO, arXiv:1707.06347, eq. 7; separate bounds: DAPO, arXiv:2503.14476, eq. 8).

    With dual_clip c, where A < 0 the objective is at least c A (arXiv:1912.09729, eq. 5). correction_N multiplies token losses (correction.py). The
    loss is a scalar with the graph of logprobs_N.
    """
    ratio_N = (logprobs_N - old_logprobs_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    free_N = -ratio_N * advantages_N
    bounded_N = -ratio_N.clamp(1 - clip_eps_low, 1 + clip_eps_high) * advantages_N
    losses_N = torch.maximum(free_N, bounded_N)
    clipped_N = bounded_N > free_N
    low_N = clipped_N & (advantages_N < 0)
    if dual_clip is not None:
        ceiling_N = -dual_clip * advantages_N
        over_N = (advantages_N < 0) & (losses_N > ceiling_N)
        losses_N = torch.where(over_N, ceiling_N, losses_N)
        low_N = low_N | over_N
    if correction_N is not None:
        losses_N = losses_N * correction_N
    return (losses_N * weights_N).sum(), PolicyTerms(ratio_N.detach(), clipped_N & (advantages_N > 0), low_N)


@dataclass(frozen=True)
class ValueTerms:
    """Detached [N] tensors for metrics."""

    error_N: torch.Tensor
    """values - returns."""
    clipped_N: torch.Tensor
    """bool, the clip took the gradient away."""


def value_loss(
    values_N: torch.Tensor, returns_N: torch.Tensor, old_values_N: torch.Tensor, weights_N: torch.Tensor, *, clip_eps: float | None
) -> tuple[torch.Tensor, ValueTerms]:
    """0.5 * max((v - R)^2, (clip(v, v_old - eps, v_old + eps) - R)^2) per token.

    The clipped value loss of PPO's implementation, described in arXiv:2005.12729, section 2.
    """
    error_N = values_N - returns_N
    squares_N = error_N.square()
    clipped_N = torch.zeros_like(squares_N, dtype=torch.bool)
    if clip_eps is not None:
        change_N = values_N - old_values_N
        bounded_N = (old_values_N + change_N.clamp(-clip_eps, clip_eps) - returns_N).square()
        # Within the bounds both squares are the same but for rounding, which is no clip.
        clipped_N = (bounded_N > squares_N) & (change_N.abs() > clip_eps)
        squares_N = torch.maximum(squares_N, bounded_N)
    return 0.5 * (squares_N * weights_N).sum(), ValueTerms(error_N.detach(), clipped_N)


def entropy_bonus(entropy_N: torch.Tensor, weights_N: torch.Tensor) -> torch.Tensor:
    """Scalar to be subtracted from the loss, times its coefficient: the aggregated entropy (PPO, arXiv:1707.06347, eq. 9)."""
    return (entropy_N * weights_N).sum()


def supervised_loss(logprobs_N: torch.Tensor, weights_N: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of the masked tokens, aggregated."""
    return -(logprobs_N * weights_N).sum()
