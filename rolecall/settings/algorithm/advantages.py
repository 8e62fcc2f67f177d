"""Sections of the advantage estimators, one per method. What each computes exactly stands in
rolecall/algorithms/advantages/.
"""

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, PositiveInt, model_validator

from rolecall.settings.plugin import PluginSection
from rolecall.settings.section import Section, UnitFloat


class GrpoAdvantage(Section):
    """GRPO: reward minus the group's mean, over its standard deviation (arXiv:2402.03300, section 4.1)."""

    kind: Literal["grpo"] = "grpo"
    """The estimator that this section chooses."""
    normalize_std: bool = True
    """Divide by the group's standard deviation; false is Dr.GRPO's centring (arXiv:2503.20783)."""
    supervision: Literal["outcome", "process"] = "outcome"
    """`outcome` compares whole responses. `process` compares the steps that a scorer rewards one by one
    (token_rewards), and a token gets the sum of the normalised rewards from its step on.
    """


class PlainAdvantage(Section):
    """An estimator that has nothing to set beside its `kind`.

    - `rloo`: RLOO: reward minus the mean of the group's other rewards (arXiv:2402.14740).
    - `remax`: ReMax: reward minus the reward of a greedy response to the same prompt, which the rollouts sample beside
      the others (arXiv:2310.10505).
    - `opo`: OPO: reward minus the group's mean weighted by length, the baseline of least variance (arXiv:2505.23585).
    - `gpg`: GPG: reward minus the group's mean, scaled up by the share of responses in groups whose rewards differ
      (arXiv:2504.02546).
    - `maxrl`: MaxRL: reward minus the group's mean, over that mean; rewards are 0 or more (arXiv:2602.02710).
    - `optimal_token_baseline`: OTB: each token's reward to go minus a baseline of its own, the group's mean weighted by
      how uncertain the paths to it were (arXiv:2602.07078). It costs a forward pass of the actor over every batch.
    """

    kind: Literal["rloo", "remax", "opo", "gpg", "maxrl", "optimal_token_baseline"]
    """The estimator that this section chooses."""


class GaeAdvantage(Section):
    """GAE over the critic's values (arXiv:1506.02438, eq. 16), whitened over the batch. Needs the `critic` section."""

    kind: Literal["gae"] = "gae"
    """The estimator that this section chooses."""
    gamma: UnitFloat = 1.0
    """Discount per token."""
    gae_lambda: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Trace decay per token; 0 is TD(0)."""
    whiten: bool = True
    """Subtract the batch's mean and divide by its standard deviation, over trained tokens."""
    bootstrap_truncated: bool = False
    """After the last token of a response that was cut off at sampling.max_tokens comes the critic's value there instead
    of 0. For rewards that say nothing of the rest; a scorer's reward for a response that never came to its answer is
    final, and with a bootstrap not finishing would cost nothing.
    """


class ReinforcePlusPlusAdvantage(Section):
    """REINFORCE++: the response's own reward to go, normalised over the whole batch instead of within groups
    (arXiv:2501.03262).
    """

    kind: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    """The estimator that this section chooses."""
    gamma: UnitFloat = 1.0
    """Discount per token."""
    baseline: Literal["none", "group"] = "none"
    """`group` subtracts the mean reward of the group before normalising (REINFORCE++ with baseline)."""

    @model_validator(mode="after")
    def _baseline_is_of_whole_responses(self) -> Self:
        if self.baseline == "group" and self.gamma != 1:
            raise ValueError(
                "gamma: with baseline group, whole responses are compared and nothing is discounted; leave it at 1 "
                "or use baseline none"
            )
        return self


class PassAtKAdvantage(Section):
    """Pass@k training: how much a response adds to the chance that k responses have a right one among them
    (arXiv:2508.10751).
    """

    kind: Literal["pass_at_k"] = "pass_at_k"
    """The estimator that this section chooses."""
    k: PositiveInt
    """Responses that are tried; at most sampling.num_responses, and useful below it. 1 is GRPO of right and wrong."""
    solved_at: float = 1.0
    """A response is right when its reward, after shaping, is at least this."""


class GdpoAdvantage(Section):
    """GDPO: every component of the reward is normalised within its group by itself, then their weighted sum over the
    batch (arXiv:2601.05242).
    """

    kind: Literal["gdpo"] = "gdpo"
    """The estimator that this section chooses."""
    weights: dict[str, float] = {}
    """Weight of each component; absent: those of reward.components. Shaping of the reward does not reach components,
    and filters.without_signal compares whole rewards: it also drops groups whose components differ and add up to the
    same.
    """


class CustomAdvantage(PluginSection):
    """Your own estimator, `def f(batch: ScoredBatch, **options) -> Estimate` of rolecall.algorithms.advantages. Called
    in the controller, which has numpy and no torch; it must be a pure function, for a controller that starts again
    calls it again.
    """

    kind: Literal["custom"] = "custom"
    """The estimator that this section chooses."""
    columns: tuple[
        Literal[
            "values",
            "bootstrap_value",
            "token_rewards",
            "token_ids",
            "rollout_logprobs",
            "policy_versions",
            "old_logprobs",
            "sum_squared_probs",
        ],
        ...,
    ] = ()
    """Columns that it reads with `batch.column(name)`, described in rolecall/trajectory.py. values and bootstrap_value
    need the `critic` section, which is trained on the `returns_N` that the function must then give; the last two cost a
    forward pass of the actor over every batch.
    """


AdvantageSection: TypeAlias = Annotated[
    GrpoAdvantage
    | PlainAdvantage
    | GaeAdvantage
    | ReinforcePlusPlusAdvantage
    | PassAtKAdvantage
    | GdpoAdvantage
    | CustomAdvantage,
    Field(discriminator="kind"),
]


def reads_values(section: AdvantageSection) -> bool:
    """Whether a critic has to say them."""
    return isinstance(section, GaeAdvantage) or (
        isinstance(section, CustomAdvantage) and bool({"values", "bootstrap_value"} & set(section.columns))
    )


def compares_responses(section: AdvantageSection) -> bool:
    """Whether a group of one response gets no advantage."""
    if isinstance(section, ReinforcePlusPlusAdvantage):
        return section.baseline == "group"
    return section.kind != "remax" and not isinstance(section, GaeAdvantage | CustomAdvantage)
