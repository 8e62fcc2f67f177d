"""The arrays that every policy loss reads and gives. Torch.

Shapes: N tokens of one microbatch, packed; S its sequences.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from rolecall.algorithms.bounds import LOG_RATIO_BOUND

SELECTED = "selected"
"""bool column that training/step/token_selection.py makes for the losses of covariance.py; false outside the mask."""


@dataclass(frozen=True)
class PolicyBatch:
    """One microbatch as a policy loss sees it. Sequences are whole: what a loss wants to know of one, it can compute
    here. What it wants to know of the whole mini-batch is in columns that were made before (token_selection.py).
    """

    logprobs_N: torch.Tensor
    """float32 [N] with the graph."""
    old_logprobs_N: torch.Tensor
    """float32 [N]: the proximal policy's, without a graph."""
    advantages_N: torch.Tensor
    """float32 [N]."""
    mask_N: torch.Tensor
    """bool [N], tokens trained on; elsewhere a token's loss does not matter."""
    sequence_N: torch.Tensor
    """int64 [N], the sequence of each token, 0..S-1."""
    num_sequences: int
    """S."""
    columns: Mapping[str, torch.Tensor]
    """[N] each, by their names in the trajectory schema."""

    def log_ratio_N(self) -> torch.Tensor:
        """float32 [N]: log pi / pi_old with the graph; 0 outside the mask. Not bounded: what is exponentiated is
        `ratios` of it, or of its mean.
        """
        return torch.where(self.mask_N, self.logprobs_N - self.old_logprobs_N, 0.0)

    def ratio_N(self) -> torch.Tensor:
        """float32 [N]: pi / pi_old with the graph; 1 outside the mask."""
        return ratios(self.log_ratio_N())

    def sequence_sums_S(self, values_N: torch.Tensor) -> torch.Tensor:
        """[S]: the sum of `values_N` over each sequence's tokens of the mask."""
        masked_N = torch.where(self.mask_N, values_N, 0.0)
        return torch.zeros(self.num_sequences, dtype=masked_N.dtype, device=masked_N.device).index_add(
            0, self.sequence_N, masked_N
        )

    def sequence_means_S(self, values_N: torch.Tensor) -> torch.Tensor:
        """[S]: the mean of `values_N` over each sequence's tokens of the mask; 0 where it has none."""
        return self.sequence_sums_S(values_N) / self.sequence_sums_S(torch.ones_like(values_N)).clamp(min=1)


def ratios(log_ratios: torch.Tensor) -> torch.Tensor:
    """e^log_ratios, of any shape, finite: held at the bound above it, where the gradient is 0."""
    return log_ratios.clamp(max=LOG_RATIO_BOUND).exp()


@dataclass(frozen=True)
class TokenLosses:
    """A loss before it is aggregated: the loss of a mini-batch is sum(weights_N * losses_N), with weights of
    aggregation.py times those of correction/.
    """

    losses_N: torch.Tensor
    """[N] with the graph; finite everywhere, meaningful where the mask is true."""
    shown: Mapping[str, torch.Tensor]
    """Detached [N] (bool or float), averaged over the mask as metrics actor/<name>; those of a function of one's own as
    actor/custom/<name>.
    """
