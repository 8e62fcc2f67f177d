"""A policy loss of your own: the clipped objective of PPO, on the tokens alone that the sampler itself found
unlikely.
"""

import torch

from rolecall.algorithms.losses import PolicyBatch, TokenLosses


def unlikely(batch: PolicyBatch, *, max_prob: float, clip_eps: float = 0.2) -> TokenLosses:
    """-min(r A, clip(r) A) where the sampler's probability was at most max_prob, 0 elsewhere. `unlikely` shows the
    share of such tokens.
    """
    ratio_N, advantages_N = batch.ratio_N(), batch.advantages_N
    losses_N = -torch.minimum(ratio_N * advantages_N, ratio_N.clamp(1 - clip_eps, 1 + clip_eps) * advantages_N)
    unlikely_N = batch.columns["rollout_logprobs"].exp() <= max_prob
    return TokenLosses(torch.where(unlikely_N, losses_N, 0.0), {"unlikely": unlikely_N})
