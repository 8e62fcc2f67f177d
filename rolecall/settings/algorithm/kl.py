"""The section of the KL to a reference."""

from typing import Literal, Self, TypeAlias

from pydantic import PositiveFloat, PositiveInt, model_validator

from rolecall.settings.section import NonNegativeFloat, Section

ACTOR_BASE = "base"
"""The reference that is the actor's own model without its adapters; no instance under `references` has this name."""

KL_ERROR_BOUND = 0.2
"""The relative error of an adaptive coefficient's KL counts up to this, either way: Ziegler et al.'s constant."""

KlEstimator: TypeAlias = Literal["k1", "k2", "k3", "abs"]
"""How the KL is estimated from sampled tokens (rolecall/algorithms/kl.py)."""


class AdaptiveKl(Section):
    """The coefficient follows the KL toward a target (Ziegler et al., arXiv:1909.08593, section 2.2), and never falls
    below a thousandth of kl_coef.
    """

    target: PositiveFloat
    """The KL to be held, as the estimator measures it: nats per token, a mean over the batch: over trained tokens with
    placement loss, over sampled ones with placement reward. (The paper's is per response.)
    """
    horizon: PositiveInt = 10_000
    """Responses over which the coefficient may change by a fifth."""


class KlSection(Section):
    """KL to a reference, as a term of the loss or of the reward."""

    reference: str
    """Instance under `references`; or `base`: the actor's own model without its adapters, computed within the step
    (needs actor.lora).
    """
    kl_coef: NonNegativeFloat
    """Weight; with `adaptive`, the one to start from."""
    adaptive: AdaptiveKl | None = None
    """Moves the weight from step to step; absent: it stays."""
    estimator: KlEstimator = "k3"
    """Schulman's estimators (http://joschu.net/blog/kl-approx.html): k3 is unbiased, low-variance and never negative;
    k1 is unbiased, noisy, and what PPO takes from the reward; k2 is half the squared log-ratio; `abs` its absolute
    value, which is no KL. In the loss, k1's own gradient is 0 on average on-policy: use `gradient: k2` with it.
    """
    gradient: Literal["estimator", "k2"] = "estimator"
    """Gradient of the loss term. `k2`: straight-through, the value is the estimator's and the gradient k2's, which
    on-policy is that of the true KL on average.
    """
    placement: Literal["loss", "reward"] = "loss"
    """`loss`: a term of the policy loss. `reward`: subtracted per token from the reward (PPO's classic form), as the
    trainer's old policy has it: a forward pass of the actor over every batch, unless correction.proximal is `bypass`.
    """

    @model_validator(mode="after")
    def _base_is_known_in_time(self) -> Self:
        if self.reference == ACTOR_BASE and self.placement == "reward":
            raise ValueError(
                f"reference {ACTOR_BASE!r} is computed within the step, after rewards are shaped; use placement: "
                "loss, or an instance under references"
            )
        return self

    @model_validator(mode="after")
    def _fields_have_an_effect(self) -> Self:
        if self.placement == "reward" and self.gradient != "estimator":
            raise ValueError(f"gradient {self.gradient!r}: a reward has none; remove it, or use placement: loss")
        if self.adaptive is not None and not self.kl_coef:
            raise ValueError("kl_coef 0 stays 0: adaptive multiplies it; start from a positive one")
        return self
