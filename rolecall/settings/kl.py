"""The section of the KL to a reference."""

from typing import Literal, Self

from pydantic import model_validator

from rolecall.settings.section import NonNegativeFloat, Section

ACTOR_BASE = "base"
"""The reference that is the actor's own model without its adapters; no instance under `references` has this name."""


class KlSection(Section):
    """KL to a reference, as a loss term."""

    reference: str
    """Instance under `references`; or `base`: the actor's own model without its adapters, computed within the step (needs actor.lora)."""
    kl_coef: NonNegativeFloat
    """Weight."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators (http://joschu.net/blog/kl-approx.html); k3 is low-variance and non-negative."""
    placement: Literal["loss", "reward"] = "loss"
    """`loss`: a term of the policy loss. `reward`: subtracted per token from the reward (PPO's classic form)."""

    @model_validator(mode="after")
    def _base_is_known_in_time(self) -> Self:
        if self.reference == ACTOR_BASE and self.placement == "reward":
            raise ValueError(
                f"reference {ACTOR_BASE!r} is computed within the step, after rewards are shaped; use placement: loss, or an instance under references"
            )
        return self
