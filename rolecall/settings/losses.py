"""Sections of the actor's loss: the policy losses, one per method, and its entropy term."""

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, PositiveFloat, model_validator

from rolecall.settings.section import NonNegativeFloat, Section


class PpoLoss(Section):
    """PPO's clipped objective (arXiv:1707.06347, eq. 7) with separate bounds (DAPO, arXiv:2503.14476, eq. 8) and dual clip (arXiv:1912.09729, eq. 5)."""

    kind: Literal["ppo"] = "ppo"
    clip_eps_low: NonNegativeFloat = 0.2
    """Ratios below 1 - this are clipped."""
    clip_eps_high: NonNegativeFloat = 0.28
    """Ratios above 1 + this are clipped."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound on the ratio where the advantage is negative; absent: none."""


PolicyLossSection: TypeAlias = Annotated[PpoLoss, Field(discriminator="kind")]

Aggregation: TypeAlias = Literal["token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"]
"""How token losses become one number (rolecall/algorithms/aggregation.py)."""


class EntropySection(Section):
    """The entropy term of the loss, with a fixed weight or one that follows the entropy toward a target (Skywork-OR1, arXiv:2505.22312)."""

    entropy_coef: NonNegativeFloat
    """Weight of the bonus; with `target`, the one to start from."""
    target: PositiveFloat | None = None
    """Entropy to be held, nats per trained token: below it the weight rises, above it the weight falls and the bonus is not applied. Absent: a fixed weight."""
    coef_step: PositiveFloat = 0.0001
    """How far the weight moves in a step."""
    min_coef: NonNegativeFloat = 0.0
    """Lowest weight."""
    max_coef: PositiveFloat = 0.005
    """Highest weight."""

    @model_validator(mode="after")
    def _starts_within_its_bounds(self) -> Self:
        if self.target is None and self.model_fields_set & {"coef_step", "min_coef", "max_coef"}:
            raise ValueError("coef_step, min_coef and max_coef move the weight toward a target; set target, or remove them")
        if self.target is not None and not self.min_coef <= self.entropy_coef <= self.max_coef:
            raise ValueError(f"entropy_coef {self.entropy_coef} is not within min_coef {self.min_coef} .. max_coef {self.max_coef}; move one of them")
        return self
