"""Sections of the algorithm: advantages, the policy loss, KL, correction."""

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from rolecall.settings.section import NonNegativeFloat, NonNegativeInt, Section, UnitFloat


class GrpoAdvantage(Section):
    """GRPO: reward minus the group's mean, over its standard deviation (arXiv:2402.03300, eq. 4 text)."""

    kind: Literal["grpo"] = "grpo"
    normalize_std: bool = True
    """Divide by the group's standard deviation; false is Dr.GRPO's centring (arXiv:2503.20783)."""


class RlooAdvantage(Section):
    """RLOO: reward minus the mean of the group's other rewards (arXiv:2402.14740)."""

    kind: Literal["rloo"] = "rloo"


class GaeAdvantage(Section):
    """GAE over the critic's values (arXiv:1506.02438, eq. 16), whitened over the batch. Needs the `critic` section."""

    kind: Literal["gae"] = "gae"
    gamma: UnitFloat = 1.0
    """Discount per token."""
    gae_lambda: UnitFloat = 1.0
    """Trace decay per token."""
    whiten: bool = True
    """Subtract the batch's mean and divide by its standard deviation, over trained tokens."""


AdvantageSection: TypeAlias = Annotated[GrpoAdvantage | RlooAdvantage | GaeAdvantage, Field(discriminator="kind")]


class PolicyLossSection(Section):
    """PPO's clipped objective (arXiv:1707.06347, eq. 7) with separate bounds (DAPO, arXiv:2503.14476, eq. 8) and dual clip (arXiv:1912.09729, eq. 5)."""

    clip_eps_low: NonNegativeFloat = 0.2
    """Ratios below 1 - this are clipped."""
    clip_eps_high: NonNegativeFloat = 0.28
    """Ratios above 1 + this are clipped."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound on the ratio where the advantage is negative; absent: none."""
    aggregation: Literal["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"] = "token_mean"
    """How token losses become one number, normalised by the whole mini-batch's own counts."""
    entropy_coef: NonNegativeFloat = 0.0
    """Weight of the entropy bonus."""


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


class CorrectionSection(Section):
    """Truncated importance sampling of sampler against trainer (design section 6): weight min(old / rollout, cap) per token."""

    tis_cap: PositiveFloat = 2.0
    """Upper bound of the weight."""


class AlgorithmSection(Section):
    """What a batch is and what is computed from it."""

    groups_per_batch: PositiveInt
    """B, prompt groups in a train batch."""
    max_staleness: NonNegativeInt = 0
    """Most steps between the oldest token's weights and the step that trains it; 0 is synchronous."""
    num_minibatches: PositiveInt = 1
    """Optimizer steps per pass over the batch."""
    num_epochs: PositiveInt = 1
    """Passes over the batch."""
    advantage: AdvantageSection = GrpoAdvantage()
    """Estimator."""
    policy_loss: PolicyLossSection = PolicyLossSection()
    """Loss of the actor."""
    kl: KlSection | None = None
    """KL to a reference; absent: none, and no reference is asked."""
    correction: CorrectionSection | None = None
    """Off-policy correction of the loss; absent: metrics only."""
    drop_groups_without_signal: bool = False
    """Drop groups whose rewards are all equal and sample others instead (DAPO's dynamic sampling)."""
    max_dropped_groups_per_step: PositiveInt = 1024
    """Budget of groups dropped by filters within one step; spent, the run stops."""
