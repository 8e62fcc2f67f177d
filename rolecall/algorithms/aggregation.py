"""How token losses become one number: every kind is a weighted sum whose weights hold the global mini-batch's own counts.

That is what makes loss and gradients independent of microbatch split, packing, order and number of ranks: the parts just add up. Pure torch.

Shapes: N tokens of one microbatch, packed; S its sequences.
"""

from dataclasses import dataclass
from typing import Literal

import torch

Aggregation = Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"]


@dataclass(frozen=True)
class Counts:
    """Of a whole mini-batch, over all ranks."""

    num_tokens: int
    """Tokens trained on."""
    num_sequences: int
    """Sequences with at least one of them."""


def token_weights(mask_N: torch.Tensor, cu_seqlens: torch.Tensor, kind: Aggregation, counts: Counts) -> torch.Tensor:
    """float32 [N]: the loss is sum(weights * token losses). 0 where mask_N (bool [N]) is false; cu_seqlens int [S + 1].

    token_mean: every token counts the same (DAPO, arXiv:2503.14476, eq. 8). seq_mean_token_mean: every sequence counts the same, its tokens share that
    (GRPO, arXiv:2402.03300, eq. 3). seq_mean_token_sum: a sequence counts by its length (Dr.GRPO, arXiv:2503.20783, up to its constant).
    """
    mask = mask_N.to(torch.float32)
    if kind == "token_mean":
        return mask / max(counts.num_tokens, 1)
    if kind == "seq_mean_token_sum":
        return mask / max(counts.num_sequences, 1)
    lengths_S = cu_seqlens.diff().long()
    sequence_N = torch.repeat_interleave(torch.arange(lengths_S.numel(), device=mask.device), lengths_S, output_size=mask.numel())
    trained_S = torch.zeros(lengths_S.numel(), device=mask.device).index_add_(0, sequence_N, mask)
    return mask / (trained_S.clamp(min=1)[sequence_N] * max(counts.num_sequences, 1))
