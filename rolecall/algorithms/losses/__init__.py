"""Losses over packed tokens, in torch: one file per family, `token_losses` is the one entry for a configured policy loss.

A policy loss gives the losses of tokens and what is to be shown of them; the caller aggregates (aggregation.py), corrects (correction.py) and turns what is
shown into typed reductions (training/objectives.py).

Shapes: N tokens of one microbatch, packed.
"""

from rolecall.algorithms.losses.batch import PolicyBatch, TokenLosses
from rolecall.algorithms.losses.ppo import ppo
from rolecall.settings import PolicyLossSection, PpoLoss

__all__ = ["PolicyBatch", "TokenLosses", "token_losses"]


def token_losses(section: PolicyLossSection, batch: PolicyBatch) -> TokenLosses:
    """Runs the configured loss."""
    match section:
        case PpoLoss():
            return ppo(batch, clip_eps_low=section.clip_eps_low, clip_eps_high=section.clip_eps_high, dual_clip=section.dual_clip)
