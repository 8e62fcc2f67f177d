"""The shaping of raw rewards to those that advantages are computed from, in numpy.

Clipping, normalisation, DAPO's overlong punishment, placement on a token, and the KL penalty of classic PPO.

Pure; raw columns are never overwritten, so shaping can be computed again. The KL term of a loss is in kl.py.

Shapes: B trajectories of a batch; T tokens of one trajectory (prompt + response), another for each.
"""

from dataclasses import dataclass
from typing import Self

import numpy as np

from rolecall.algorithms.advantages.batch import STD_EPS
from rolecall.algorithms.bounds import LOG_RATIO_BOUND
from rolecall.errors import InvalidInputError
from rolecall.settings import ShapingSection
from rolecall.wire import Array


@dataclass(frozen=True)
class Moments:
    """Number, mean and spread of rewards seen so far."""

    num: int = 0
    mean: float = 0.0
    deviations: float = 0.0
    """Sum of the squared deviations from the mean."""

    @classmethod
    def of(cls, values_B: Array) -> Self:
        """Returns the moments of one batch."""
        return cls(values_B.size, float(values_B.mean()), float(((values_B - values_B.mean()) ** 2).sum()))

    def merged(self, other: "Moments") -> "Moments":
        """Returns the moments of both together (Chan, Golub and LeVeque, Updating formulae and a pairwise algorithm for
        computing sample variances, 1979, eq. 2.1).
        """
        num = self.num + other.num
        if num == 0:
            return self
        delta = other.mean - self.mean
        return Moments(
            num,
            self.mean + delta * other.num / num,
            self.deviations + other.deviations + delta**2 * self.num * other.num / num,
        )

    @property
    def std(self) -> float:
        """Standard deviation of what was seen (n, not n - 1); 0 of nothing."""
        return float(np.sqrt(self.deviations / max(self.num, 1)))


def clip_rewards(section: ShapingSection, rewards_B: Array) -> Array:
    """[B]: within clip_min..clip_max."""
    low, high = section.clip_min, section.clip_max
    return np.clip(rewards_B, -np.inf if low is None else low, np.inf if high is None else high)


def shape_rewards(
    section: ShapingSection, rewards_B: Array, num_tokens_B: Array, moments: Moments, max_tokens: int
) -> Array:
    """[B]: clip, normalise by `moments`, punish the overlong. `moments`: of the clipped rewards that `normalize` names;
    `max_tokens`: the longest response.
    """
    rewards_B = clip_rewards(section, rewards_B)
    if section.normalize is not None:
        rewards_B = (rewards_B - moments.mean) / (moments.std + STD_EPS)
    if section.overlong is not None:
        overlong = section.overlong
        rewards_B = rewards_B + overlong.penalty * overlong_penalty(num_tokens_B, max_tokens, overlong.buffer_tokens)
    return rewards_B


def overlong_penalty(num_tokens_B: Array, max_tokens: int, buffer_tokens: int) -> Array:
    """float64 [B]: 0 up to max_tokens - buffer_tokens, then linear to -1 at max_tokens and beyond (DAPO,
    arXiv:2503.14476, eq. 13).
    """
    return np.asarray(-np.clip((num_tokens_B - (max_tokens - buffer_tokens)) / buffer_tokens, 0.0, 1.0))


def trained_mask(section: ShapingSection, response_mask_T: Array, is_truncated: bool) -> Array:
    """uint8 [T]: the loss_mask of a response; 0 throughout when it was cut off and those are masked (overlong
    filtering, same paper, section 3.4).
    """
    return np.zeros_like(response_mask_T) if section.mask_truncated and is_truncated else response_mask_T


def place_rewards(reward: float, response_mask_T: Array, token_rewards_T: Array | None = None) -> Array:
    """float64 [T], so that sums do not depend on where a reward stands: the scalar reward on the last sampled token,
    plus the per-token rewards when there are any. InvalidInputError when nothing was sampled.
    """
    sampled = np.flatnonzero(response_mask_T)
    if not sampled.size:
        raise InvalidInputError(
            "a trajectory without a sampled token has no token to reward; its response_mask is all 0"
        )
    rewards_T = (
        np.zeros(response_mask_T.shape)
        if token_rewards_T is None
        else token_rewards_T.astype(np.float64) * (response_mask_T != 0)
    )
    rewards_T[sampled[-1]] += reward
    return rewards_T


def penalise_kl(
    rewards_T: Array,
    logprobs_T: Array,
    reference_logprobs_T: Array,
    response_mask_T: Array,
    kl_coef: float,
    estimator: str = "k1",
) -> Array:
    """float64 [T]: rewards - kl_coef * KL estimate of each sampled token (InstructGPT, arXiv:2203.02155, eq. 2, token
    by token).

    k1 = log(p / ref) is unbiased and what the paper uses; the others as in kl.py.
    """
    kl_T = np.where(response_mask_T != 0, kl_estimate(logprobs_T, reference_logprobs_T, estimator), 0.0)
    return np.asarray(rewards_T - kl_coef * kl_T)


def kl_estimate(logprobs: Array, reference_logprobs: Array, estimator: str) -> Array:
    """Schulman's estimators of KL(p || ref) from samples of p (http://joschu.net/blog/kl-approx.html), elementwise,
    float64; k3 bounded as kl.py's.
    """
    log_ratio = reference_logprobs.astype(np.float64) - logprobs.astype(np.float64)
    match estimator:
        case "k1":
            return -log_ratio
        case "k2":
            return 0.5 * log_ratio**2
        case "k3":
            held = np.minimum(log_ratio, LOG_RATIO_BOUND)
            return np.asarray(np.expm1(held) + np.exp(LOG_RATIO_BOUND) * (log_ratio - held) - log_ratio)
        case "abs":
            return np.abs(log_ratio)
    raise InvalidInputError(f"KL estimator {estimator!r} is none of k1, k2, k3, abs")
