"""The SFT loss. Torch.

Shapes: N tokens of one microbatch.
"""

import torch


def sft_loss(logprobs_N: torch.Tensor, weights_N: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of the masked tokens, aggregated."""
    return -(logprobs_N * weights_N).sum()
