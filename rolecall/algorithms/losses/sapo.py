"""SAPO: a soft gate on the ratio. Torch.

Shapes: N tokens of one microbatch.
"""

import torch

from rolecall.algorithms.losses.batch import PolicyBatch, TokenLosses


def sapo(batch: PolicyBatch, *, tau_pos: float, tau_neg: float) -> TokenLosses:
    """-(4 / tau) sigmoid(tau (r - 1)) A per token, tau by the sign of A (arXiv:2511.20347).

    The gradient is that of -r A times 4 p (1 - p), p the sigmoid: 1 at ratio 1, falling off smoothly on both sides.
    `gate` shows that factor.
    """
    advantages_N, ratio_N = batch.advantages_N, batch.ratio_N()
    tau_N = torch.where(advantages_N > 0, tau_pos, torch.full_like(advantages_N, tau_neg))
    share_N = torch.sigmoid(tau_N * (ratio_N - 1))
    return TokenLosses(-4 / tau_N * share_N * advantages_N, {"gate": (4 * share_N * (1 - share_N)).detach()})
