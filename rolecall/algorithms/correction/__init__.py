"""Sampler against trainer: weights and rejections that correct the loss for it, and numbers that show it. Torch.

The sampler (rollout) and the trainer (actor) compute the same policy with other kernels and, when staleness is allowed,
with other weights. `correct` is the one entry for a configured correction; mismatch.py measures. Sequences are whole
within a microbatch, so what is asked of a sequence is computed there, and nothing here depends on how a mini-batch is
cut. The mean that weights may be divided by is handed in, as the counts of the loss are: `weight_sums` adds up to it,
over microbatches and ranks (training/step/mean_weight.py).

Shapes: N tokens of one microbatch; S its sequences.
"""

import math
from dataclasses import dataclass

import torch

from rolecall.algorithms.correction.rejection import rejected_N
from rolecall.algorithms.correction.weights import icepop_weights_N, sequence_weights_N, token_weights_N
from rolecall.algorithms.losses.batch import PolicyBatch
from rolecall.settings import CorrectionSection, ImportanceWeight

__all__ = ["Correction", "correct", "weight_sums"]


@dataclass(frozen=True)
class Correction:
    """The weights that multiply the losses of tokens. The loss's normaliser stays the whole mini-batch's own count: a
    rejection never raises the weight of the rest.
    """

    weights_N: torch.Tensor
    """[N], without gradient; 0 where rejected and outside the mask."""
    rejected_N: torch.Tensor
    """bool [N]: tokens of the mask that weigh 0."""


def correct(
    section: CorrectionSection, batch: PolicyBatch, sampled_N: torch.Tensor, mean_weight: float = 1.0
) -> Correction:
    """The configured correction. `sampled_N` [N]: rollout_logprobs. Weights are divided by `mean_weight`.

    Weights and rejections compare the proximal policy (batch.old_logprobs_N) with the sampler. Under `proximal: bypass`
    these are the same, weights are 1, and rejections compare the policy as it is with the sampler.
    """
    trainer_N = batch.old_logprobs_N if section.proximal == "recompute" else batch.logprobs_N.detach()
    log_ratio_N = trainer_N - sampled_N
    weight = section.weight if section.proximal == "recompute" else None
    weights_N = _weights_N(weight, batch, log_ratio_N) / mean_weight
    for rejection in section.reject:
        weights_N = torch.where(rejected_N(rejection, batch, log_ratio_N), 0.0, weights_N)
    weights_N = torch.where(batch.mask_N, weights_N, 0.0)
    return Correction(weights_N, batch.mask_N & (weights_N == 0))


def weight_sums(weight: ImportanceWeight, batch: PolicyBatch, sampled_N: torch.Tensor) -> torch.Tensor:
    """float64 [2]: the sum of the weights before any rejection, and of how many, over the tokens of the mask; of kind
    sequence over the sequences with one, which weigh the same however long they are.
    """
    weights_N = _weights_N(weight, batch, batch.old_logprobs_N - sampled_N).double()
    ones_N = torch.ones_like(weights_N)
    if weight.kind == "sequence":
        trained_S = batch.sequence_sums_S(ones_N) > 0
        return torch.stack([batch.sequence_means_S(weights_N).sum(), trained_S.sum().double()])
    return torch.stack([torch.where(batch.mask_N, each_N, 0.0).sum() for each_N in (weights_N, ones_N)])


def _weights_N(weight: ImportanceWeight | None, batch: PolicyBatch, log_ratio_N: torch.Tensor) -> torch.Tensor:
    if weight is None:
        return torch.ones_like(log_ratio_N)
    match weight.kind:
        case "token":
            return token_weights_N(log_ratio_N, weight.cap)
        case "sequence":
            return sequence_weights_N(batch, log_ratio_N, weight.cap)
        case "icepop":
            return icepop_weights_N(log_ratio_N, weight.low, math.inf if weight.cap is None else weight.cap)
