"""Aggregation of token losses to one number: a weighted sum whose weights hold the global mini-batch's own counts.

That is what makes loss and gradients independent of microbatch split, packing, order and number of ranks: the parts
just add up. Pure torch.

Shapes: N tokens of one microbatch, packed; S its sequences.
"""

from dataclasses import dataclass

import torch

from rolecall.settings import Aggregation


@dataclass(frozen=True)
class Counts:
    """The counts of a whole mini-batch, over all ranks."""

    num_tokens: int
    """Tokens trained on."""
    num_sequences: int
    """Sequences with at least one of them."""


def token_weights(
    mask_N: torch.Tensor,
    sequence_N: torch.Tensor,
    num_sequences: int,
    kind: Aggregation,
    counts: Counts,
    length: int = 1,
) -> torch.Tensor:
    """float32 [N]: the loss is sum(weights * token losses). 0 where mask_N (bool [N]) is false; sequence_N int64 [N] in
    0..num_sequences - 1.

    token_mean: every token counts the same (DAPO, arXiv:2503.14476, eq. 8). token_sum: the same without a normaliser:
    the gradient grows with the batch. seq_mean_token_mean: every sequence counts the same, its tokens share that (GRPO,
    arXiv:2402.03300, eq. 3). seq_mean_token_sum: a sequence counts by its length. seq_mean_token_sum_norm: that over
    the constant `length` (Dr.GRPO, arXiv:2503.20783, section 3).
    """
    mask = mask_N.to(torch.float32)
    match kind:
        case "token_mean":
            return mask / max(counts.num_tokens, 1)
        case "token_sum":
            return mask
        case "seq_mean_token_sum":
            return mask / max(counts.num_sequences, 1)
        case "seq_mean_token_sum_norm":
            return mask / (max(counts.num_sequences, 1) * length)
        case "seq_mean_token_mean":
            trained_S = torch.zeros(num_sequences, device=mask.device).index_add_(0, sequence_N, mask)
            return mask / (trained_S.clamp(min=1)[sequence_N] * max(counts.num_sequences, 1))


def sequence_index(cu_seqlens: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """int64 [N]: the sequence of each of the N = num_tokens packed tokens; cu_seqlens int [S + 1]."""
    lengths_S = cu_seqlens.diff().long()
    return torch.repeat_interleave(
        torch.arange(lengths_S.numel(), device=cu_seqlens.device), lengths_S, output_size=num_tokens
    )
