"""Losses over packed tokens, in torch: one file per family, `token_losses` is the one entry for a configured policy
loss.

A policy loss gives the losses of tokens and what is to be shown of them; the caller aggregates (aggregation.py),
corrects (correction/) and turns what is shown into typed reductions (training/objective/objectives.py).

Shapes: N tokens of one microbatch, packed.
"""

from rolecall.algorithms.losses.batch import PolicyBatch, TokenLosses
from rolecall.algorithms.losses.cispo import cispo
from rolecall.algorithms.losses.covariance import clip_cov, kl_cov
from rolecall.algorithms.losses.custom import custom
from rolecall.algorithms.losses.dppo import dppo_kl, dppo_tv
from rolecall.algorithms.losses.dro import dro
from rolecall.algorithms.losses.gmpo import gmpo
from rolecall.algorithms.losses.gspo import gspo
from rolecall.algorithms.losses.ppo import ppo
from rolecall.algorithms.losses.reinforce import reinforce
from rolecall.algorithms.losses.sapo import sapo
from rolecall.settings import (
    ClippedLoss,
    CovarianceLoss,
    CustomLoss,
    DppoLoss,
    DroLoss,
    PolicyLossSection,
    ReinforceLoss,
    SapoLoss,
)

__all__ = ["PolicyBatch", "TokenLosses", "token_losses"]


def token_losses(section: PolicyLossSection, batch: PolicyBatch) -> TokenLosses:
    """Runs the configured loss."""
    match section:
        case ClippedLoss():
            return _clipped(section, batch)
        case SapoLoss():
            return sapo(batch, tau_pos=section.tau_pos, tau_neg=section.tau_neg)
        case CovarianceLoss(kind="clip_cov"):
            return clip_cov(batch, clip_eps_low=section.clip_eps_low, clip_eps_high=section.clip_eps_high)
        case CovarianceLoss():
            return kl_cov(batch, kl_coef=section.kl_coef)
        case DppoLoss():
            loss = dppo_tv if section.kind == "dppo_tv" else dppo_kl
            return loss(batch, max_divergence=section.max_divergence)
        case DroLoss():
            return dro(batch, beta=section.beta)
        case ReinforceLoss():
            return reinforce(batch)
        case CustomLoss():
            return custom(batch, section)


def _clipped(section: ClippedLoss, batch: PolicyBatch) -> TokenLosses:
    low, high = section.clip_eps_low, section.clip_eps_high
    match section.kind:
        case "ppo":
            return ppo(batch, clip_eps_low=low, clip_eps_high=high, dual_clip=section.dual_clip)
        case "gspo":
            return gspo(batch, clip_eps_low=low, clip_eps_high=high)
        case "cispo":
            return cispo(batch, clip_eps_low=low, clip_eps_high=high)
        case "gmpo":
            return gmpo(batch, clip_eps_low=low, clip_eps_high=high)
