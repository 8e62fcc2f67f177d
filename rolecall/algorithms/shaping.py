"""From raw rewards to per-token rewards, in numpy: placement of the scalar reward and the KL penalty of classic PPO.

Pure; raw columns are never overwritten, so shaping can be computed again. The KL term of a loss is in kl.py.

Shapes: T tokens of one trajectory (prompt + response), another for each.
"""

import numpy as np

from rolecall.errors import InvalidInputError
from rolecall.wire import Array


def place_rewards(reward: float, response_mask_T: Array, token_rewards_T: Array | None = None) -> Array:
    """float32 [T]: the scalar reward on the last sampled token, plus the per-token rewards when there are any. InvalidInputError when nothing was sampled."""
    sampled = np.flatnonzero(response_mask_T)
    if not sampled.size:
        raise InvalidInputError("a trajectory without a sampled token has no token to reward; its response_mask is all 0")
    rewards_T = np.zeros(response_mask_T.shape, np.float32) if token_rewards_T is None else token_rewards_T.astype(np.float32) * (response_mask_T != 0)
    rewards_T[sampled[-1]] += np.float32(reward)
    return rewards_T


def penalise_kl(rewards_T: Array, logprobs_T: Array, reference_logprobs_T: Array, response_mask_T: Array, kl_coef: float, estimator: str = "k1") -> Array:
    """float32 [T]: rewards - kl_coef * KL estimate of each sampled token (InstructGPT, arXiv:2203.02155, eq. 2, token by token).

    k1 = log(p / ref) is unbiased and what the paper uses; k2 and k3 as in kl.py.
    """
    kl_T = np.where(response_mask_T != 0, kl_estimate(logprobs_T, reference_logprobs_T, estimator), 0.0)
    return (rewards_T - kl_coef * kl_T).astype(np.float32)


def kl_estimate(logprobs: Array, reference_logprobs: Array, estimator: str) -> Array:
    """Schulman's estimators of KL(p || ref) from samples of p (http://joschu.net/blog/kl-approx.html), elementwise, float64."""
    log_ratio = reference_logprobs.astype(np.float64) - logprobs.astype(np.float64)
    match estimator:
        case "k1":
            return -log_ratio
        case "k2":
            return 0.5 * log_ratio**2
        case "k3":
            return np.expm1(log_ratio) - log_ratio
    raise InvalidInputError(f"KL estimator {estimator!r} is none of k1, k2, k3")
