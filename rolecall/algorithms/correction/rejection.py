"""Rejections: tokens, or whole sequences, whose ratio trainer / sampler is out of bounds. Torch, without gradient.

By ratio (k1), or by the estimates k2 and k3 of their divergence (http://joschu.net/blog/kl-approx.html), of each token
or of a sequence: the mean over its tokens (of k1: the geometric mean of the ratios), the sum (of k1: the product) or
the largest (of k1: any ratio out of bounds).

Shapes: N tokens of one microbatch; S its sequences.
"""

import math

import torch

from rolecall.algorithms.kl import estimates
from rolecall.algorithms.losses.batch import PolicyBatch
from rolecall.settings import Rejection


def rejected_N(rejection: Rejection, batch: PolicyBatch, log_ratio_N: torch.Tensor) -> torch.Tensor:
    """bool [N]: tokens that are rejected; outside the mask it does not matter. log_ratio_N is log trainer - log
    sampler.
    """
    log_ratio_N = log_ratio_N.detach()
    if rejection.kind != "ratio":
        return _spread_N(batch, estimates(log_ratio_N, rejection.kind), rejection.over) > rejection.high
    if rejection.over == "sequence_max":
        outside_N = _outside(log_ratio_N, rejection)
        return (batch.sequence_sums_S(outside_N.to(log_ratio_N.dtype)) > 0)[batch.sequence_N]
    return _outside(_spread_N(batch, log_ratio_N, rejection.over), rejection)


def _outside(log_ratio: torch.Tensor, band: Rejection) -> torch.Tensor:
    return (log_ratio < (math.log(band.low) if band.low else -math.inf)) | (log_ratio > math.log(band.high))


def _spread_N(batch: PolicyBatch, values_N: torch.Tensor, over: str) -> torch.Tensor:
    """[N]: each token's value, or its sequence's, over the tokens of the mask."""
    match over:
        case "sequence_mean":
            return batch.sequence_means_S(values_N)[batch.sequence_N]
        case "sequence_sum":
            return batch.sequence_sums_S(values_N)[batch.sequence_N]
        case "sequence_max":
            floor_S = torch.full((batch.num_sequences,), -math.inf, dtype=values_N.dtype, device=values_N.device)
            return floor_S.scatter_reduce(0, batch.sequence_N, torch.where(batch.mask_N, values_N, -math.inf), "amax")[
                batch.sequence_N
            ]
    return values_N
