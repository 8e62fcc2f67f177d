"""The entropy bonus. Torch.

Shapes: N tokens of one microbatch.
"""

import torch


def entropy_bonus(entropy_N: torch.Tensor, weights_N: torch.Tensor) -> torch.Tensor:
    """Scalar to be subtracted from the loss, times its coefficient: the aggregated entropy (PPO, arXiv:1707.06347, eq.
    9).
    """
    return (entropy_N * weights_N).sum()
