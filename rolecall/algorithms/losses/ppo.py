"""PPO's clipped objective with its refinements: separate bounds and the dual clip. Torch.

Shapes: N tokens of one microbatch.
"""

import torch

from rolecall.algorithms.losses.batch import PolicyBatch, TokenLosses


def ppo(
    batch: PolicyBatch, *, clip_eps_low: float, clip_eps_high: float, dual_clip: float | None = None
) -> TokenLosses:
    """-min(r A, clip(r, 1 - low, 1 + high) A) per token (PPO, arXiv:1707.06347, eq. 7; separate bounds: DAPO,
    arXiv:2503.14476, eq. 8).

    With dual_clip c, where A < 0 the objective is at least c A (arXiv:1912.09729, eq. 5).
    """
    advantages_N = batch.advantages_N
    losses = clipped(batch.ratio_N(), advantages_N, clip_eps_low, clip_eps_high)
    if dual_clip is None:
        return losses
    ceiling_N = -dual_clip * advantages_N
    over_N = (advantages_N < 0) & (losses.losses_N > ceiling_N)
    low_N = losses.shown["clip_fraction_low"] | over_N
    return TokenLosses(torch.where(over_N, ceiling_N, losses.losses_N), {**losses.shown, "clip_fraction_low": low_N})


def clipped(
    ratio_N: torch.Tensor, advantages_N: torch.Tensor, clip_eps_low: float, clip_eps_high: float
) -> TokenLosses:
    """The clipped objective of any ratio; what is shown is where the clip took the gradient away."""
    free_N = -ratio_N * advantages_N
    bounded_N = -ratio_N.clamp(1 - clip_eps_low, 1 + clip_eps_high) * advantages_N
    clipped_N = bounded_N > free_N
    shown = {"clip_fraction_high": clipped_N & (advantages_N > 0), "clip_fraction_low": clipped_N & (advantages_N < 0)}
    return TokenLosses(torch.maximum(free_N, bounded_N), shown)
