"""Sections of the actor's loss: the policy losses, one per method, and its entropy term."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

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
    """The entropy term of the loss."""

    entropy_coef: NonNegativeFloat
    """Weight of the bonus."""
