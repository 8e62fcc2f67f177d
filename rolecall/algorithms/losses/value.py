"""The clipped value loss. Torch.

Shapes: N tokens of one microbatch.
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ValueTerms:
    """Detached [N] tensors for metrics."""

    error_N: torch.Tensor
    """values - returns."""
    clipped_N: torch.Tensor
    """bool, the clip took the gradient away."""


def value_loss(
    values_N: torch.Tensor,
    returns_N: torch.Tensor,
    old_values_N: torch.Tensor,
    weights_N: torch.Tensor,
    *,
    clip_eps: float | None,
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
