"""KL to a reference policy, estimated from sampled tokens, as a differentiable term of a loss. (As a reward: shaping.py, in numpy.)

Pure torch. Estimators of KL(p || ref) under samples of p, r = ref / p (J. Schulman, http://joschu.net/blog/kl-approx.html):
k1 = -log r, unbiased, high variance; k2 = (log r)^2 / 2, biased, its gradient is that of the true KL on-policy; k3 = (r - 1) - log r, unbiased, never negative.

Shapes: N tokens of one microbatch.
"""

from typing import Literal

import torch

KlEstimator = Literal["k1", "k2", "k3"]

LOG_RATIO_BOUND = 20.0
"""log r is held within +-this before exp: e^20 is far beyond any useful gradient and still finite in float32."""


def kl_N(logprobs_N: torch.Tensor, reference_logprobs_N: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """float32 [N]: the estimate of each token. Differentiable in logprobs_N."""
    log_ratio_N = (reference_logprobs_N - logprobs_N).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    match estimator:
        case "k1":
            return -log_ratio_N
        case "k2":
            return 0.5 * log_ratio_N.square()
        case "k3":
            return torch.expm1(log_ratio_N) - log_ratio_N
