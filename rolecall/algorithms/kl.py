"""KL to a reference policy, estimated from sampled tokens, as a differentiable term of a loss. (As a reward:
shaping.py, in numpy.)

Pure torch. Estimators of KL(p || ref) under samples of p, r = ref / p (J. Schulman,
http://joschu.net/blog/kl-approx.html): k1 = -log r, unbiased, high variance; k2 = (log r)^2 / 2, biased; k3 = (r - 1) -
log r, unbiased, never negative; abs = |log r|, a distance and no KL.

Gradients, on average over samples of p: that of k2 is the true KL's, that of k1 is 0, that of k3 is KL(ref || p)'s. So
a value of one estimator may be wanted with the gradient of another: straight-through.

Shapes: N tokens of one microbatch.
"""

import math
from typing import Literal

import torch

from rolecall.algorithms.bounds import LOG_RATIO_BOUND
from rolecall.settings import KlEstimator


def kl_N(
    logprobs_N: torch.Tensor,
    reference_logprobs_N: torch.Tensor,
    estimator: KlEstimator,
    gradient: Literal["estimator", "k2"] = "estimator",
) -> torch.Tensor:
    """[N]: the estimate of each token. Differentiable in logprobs_N, with the estimator's own gradient or,
    straight-through, k2's.
    """
    log_ratio_N = reference_logprobs_N - logprobs_N
    value_N = estimates(log_ratio_N, estimator)
    if gradient == "estimator":
        return value_N
    k2_N = estimates(log_ratio_N, "k2")
    return value_N.detach() + (k2_N - k2_N.detach())


def estimates(log_ratios: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """The estimate of each log r, of any shape. Only k3 exponentiates: above the bound its e^x goes on as the tangent
    there, finite and as steep.
    """
    match estimator:
        case "k1":
            return -log_ratios
        case "k2":
            return 0.5 * log_ratios.square()
        case "k3":
            # its own clamp: two large gradients that cancel would leave their rounding
            beyond = (log_ratios - LOG_RATIO_BOUND).clamp(min=0.0)
            return torch.expm1(log_ratios.clamp(max=LOG_RATIO_BOUND)) + math.exp(LOG_RATIO_BOUND) * beyond - log_ratios
        case "abs":
            return log_ratios.abs()
