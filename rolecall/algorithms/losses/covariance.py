"""Clip-Cov and KL-Cov: a few tokens of the mini-batch, selected beforehand (training/step/token_selection.py), are held
back from lowering the entropy. Torch.

Shapes: N tokens of one microbatch.
"""

import torch

from rolecall.algorithms.losses.batch import SELECTED, PolicyBatch, TokenLosses
from rolecall.algorithms.losses.ppo import clipped


def clip_cov(batch: PolicyBatch, *, clip_eps_low: float, clip_eps_high: float) -> TokenLosses:
    """PPO's clipped objective, 0 on selected tokens (arXiv:2505.22617, section 4; there detached, which has the same
    gradient).
    """
    selected_N = batch.columns[SELECTED]
    losses = clipped(batch.ratio_N(), batch.advantages_N, clip_eps_low, clip_eps_high)
    return TokenLosses(torch.where(selected_N, 0.0, losses.losses_N), {**losses.shown, "selected_fraction": selected_N})


def kl_cov(batch: PolicyBatch, *, kl_coef: float) -> TokenLosses:
    """-r A per token, plus kl_coef |log r| on selected tokens (arXiv:2505.22617, section 4; the form of the penalty is
    that of the authors' code).
    """
    selected_N, log_ratio_N = batch.columns[SELECTED], batch.log_ratio_N()
    losses_N = -batch.ratio_N() * batch.advantages_N
    return TokenLosses(
        torch.where(selected_N, losses_N + kl_coef * log_ratio_N.abs(), losses_N), {"selected_fraction": selected_N}
    )
