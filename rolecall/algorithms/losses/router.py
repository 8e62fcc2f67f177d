"""Auxiliary losses of mixtures of experts: load balancing and the router z-loss, as sums over tokens that add up over
microbatches and ranks. Torch.

The fraction of tokens that an expert gets is a count over the whole mini-batch, which is known before (`RouterLoad`)
and has no gradient; what is left of the balancing loss is linear in the tokens' probabilities. So neither loss depends
on how the mini-batch was cut. Layers are pooled, as transformers pools them.

Shapes: N tokens of one microbatch that a router sees; L layers with a router; E experts, of which each token is sent to
K.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Routing:
    """The routers' probabilities and choices for one microbatch, summed over its tokens."""

    probs_E: torch.Tensor
    """float32 or float64, over all layers, of softmax(logits); with the graph."""
    squares: torch.Tensor
    """Scalar, over all layers, of logsumexp(logits)^2; with the graph."""
    counts_LE: torch.Tensor
    """Tokens sent to each expert; no graph."""
    num_choices: torch.Tensor
    """Scalar, tokens times layers."""

    def each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "Routing":
        """Returns the sums with `change` applied to each."""
        return Routing(change(self.probs_E), change(self.squares), change(self.counts_LE), change(self.num_choices))


@dataclass(frozen=True)
class RouterLoad:
    """The load of the experts in the whole mini-batch, on all ranks."""

    counts_LE: torch.Tensor
    """float64, tokens sent to each expert."""
    num_choices: float
    """Tokens times layers."""

    @property
    def busiest(self) -> float:
        """Tokens of the busiest expert of any layer over those that each would have in balance: 1 is even, E / K is all
        to the same ones.
        """
        means_L = self.counts_LE.mean(1)
        return float((self.counts_LE.max(1).values / means_L).max())


def sum_routing(
    logits_LNE: Sequence[torch.Tensor],
    weights_N: torch.Tensor,
    num_chosen: int,
    chosen_LNK: Sequence[torch.Tensor] | None = None,
) -> Routing:
    """Sums over tokens, each counting `weights_N` times (float [N]: 0 for padding, 2 for a token that stands for two),
    sent to the experts `chosen_LNK` (int64), or to the num_chosen likeliest.
    """
    first_NE = logits_LNE[0]
    dtype = torch.promote_types(first_NE.dtype, torch.float32)
    probs_E, squares = first_NE.new_zeros(first_NE.shape[1], dtype=dtype), first_NE.new_zeros((), dtype=dtype)
    weights_N, counts_LE = weights_N.to(dtype), list[torch.Tensor]()
    for layer, logits_NE in enumerate(logits_LNE):
        wide_NE = logits_NE.to(dtype)
        probs_NE = wide_NE.softmax(1)
        probs_E = probs_E + weights_N @ probs_NE
        squares = squares + weights_N @ wide_NE.logsumexp(1).square()
        chosen_NK = probs_NE.detach().topk(num_chosen, dim=1).indices if chosen_LNK is None else chosen_LNK[layer]
        counts_LE.append(
            torch.zeros_like(probs_E)
            .index_add(0, chosen_NK.flatten(), weights_N.repeat_interleave(num_chosen))
            .detach()
        )
    return Routing(probs_E, squares, torch.stack(counts_LE), weights_N.sum() * len(logits_LNE))


def balance_loss(routing: Routing, load: RouterLoad) -> torch.Tensor:
    """The microbatch's part of E * sum_i f_i P_i (Switch, arXiv:2101.03961, eq. 4-6, without alpha): f_i expert i's
    tokens and P_i its probability, both per token and layer of the mini-batch. K where all are even, for top-k routing
    counts K experts a token. f_i has no gradient.
    """
    fractions_E = (load.counts_LE.sum(0) / load.num_choices).to(routing.probs_E)
    return fractions_E.numel() * (fractions_E * routing.probs_E).sum() / load.num_choices


def z_loss(routing: Routing, load: RouterLoad) -> torch.Tensor:
    """The microbatch's part of the mean over tokens and layers of logsumexp(logits)^2 (ST-MoE, arXiv:2202.08906, eq.
    5).
    """
    return routing.squares / load.num_choices
