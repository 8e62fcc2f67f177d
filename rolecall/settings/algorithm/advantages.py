"""Sections of the advantage estimators, one per method, with what others must know of them.

What each computes exactly stands in rolecall/algorithms/advantages/. `words` are a section's line in `rolecall check`;
a type checker finds a section without.
"""

from typing import Annotated, ClassVar, Literal, Self, TypeAlias

from pydantic import AfterValidator, Field, PositiveInt, model_validator

from rolecall.columns import COLUMNS, Plugin, Writer, columns_for
from rolecall.settings.plugin import PluginSection
from rolecall.settings.section import Section, UnitFloat


def _may_be_asked_for(name: str) -> str:
    if name not in (allowed := columns_for(Plugin.ESTIMATOR)):
        raise ValueError(f"{name!r} is no column that an estimator may ask for; name some of {', '.join(allowed)}")
    return name


EstimatorColumn: TypeAlias = Annotated[str, AfterValidator(_may_be_asked_for)]
"""A column that a user's estimator may ask for (rolecall/columns.py)."""


class EstimatorSection(Section):
    """A section that chooses an estimator: what the run must have for it, and what it asks for."""

    @property
    def wants_greedy_response(self) -> bool:
        """Whether every group has a greedy response beside its sampled ones."""
        return False

    @property
    def compares_responses(self) -> bool:
        """Whether a group of one response gets no advantage."""
        return True

    @property
    def needs(self) -> tuple[str, ...]:
        """Columns that it reads beside rewards and masks; they are computed for exactly those that are named."""
        return ()

    @property
    def reads_values(self) -> bool:
        """Whether a critic must compute one of its columns."""
        return any(COLUMNS[name].writer is Writer.CRITIC for name in self.needs)

    @property
    def needs_a_pass(self) -> bool:
        """Whether a trainer must compute one of its columns."""
        return any(COLUMNS[name].writer in (Writer.CRITIC, Writer.ACTOR) for name in self.needs)


class GrpoAdvantage(EstimatorSection):
    """GRPO: reward minus the group's mean, over its standard deviation (arXiv:2402.03300, section 4.1)."""

    kind: Literal["grpo"] = "grpo"
    """The estimator that this section chooses."""
    normalize_std: bool = True
    """Divide by the group's standard deviation; false is Dr.GRPO's centring (arXiv:2503.20783)."""
    supervision: Literal["outcome", "process"] = "outcome"
    """`outcome` compares whole responses. `process` compares the steps that a scorer rewards one by one
    (token_rewards), and a token gets the sum of the normalised rewards from its step on.
    """

    @property
    def needs(self) -> tuple[str, ...]:
        return ("token_rewards",) if self.supervision == "process" else ()

    @property
    def words(self) -> str:
        if self.supervision == "process":
            scaled = ", over their standard deviation" if self.normalize_std else ""
            return (
                f"rewards of steps minus the mean of all the group's{scaled}, summed from each token's step on "
                "(GRPO, process supervision)"
            )
        if self.normalize_std:
            return "reward minus the group's mean, over the group's standard deviation (GRPO)"
        return "reward minus the group's mean (GRPO without the standard deviation, as Dr. GRPO)"


_PLAIN = {
    "rloo": "reward minus the mean of the group's other rewards (RLOO)",
    "remax": "reward minus that of a greedy response to the same prompt, which is sampled beside the group (ReMax)",
    "opo": "reward minus the group's mean weighted by response length (OPO)",
    "gpg": "reward minus the group's mean, scaled up for groups without signal (GPG)",
    "maxrl": "reward minus the group's mean, over that mean (MaxRL)",
    "optimal_token_baseline": (
        "reward to go minus a baseline for every token, after a pass of the actor over the batch "
        "(optimal token baseline)"
    ),
}


class PlainAdvantage(EstimatorSection):
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

    @property
    def wants_greedy_response(self) -> bool:
        return self.kind == "remax"

    @property
    def compares_responses(self) -> bool:
        return self.kind != "remax"

    @property
    def needs(self) -> tuple[str, ...]:
        return ("old_logprobs", "sum_squared_probs") if self.kind == "optimal_token_baseline" else ()

    @property
    def words(self) -> str:
        return _PLAIN[self.kind]


class GaeAdvantage(EstimatorSection):
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
    """Take the critic's value after the last token of a truncated response, instead of 0.

    For rewards that say nothing of the rest; a scorer's reward for a response that never came to its answer is
    final, and with a bootstrap not finishing would cost nothing.
    """

    @property
    def compares_responses(self) -> bool:
        return False

    @property
    def needs(self) -> tuple[str, ...]:
        return ("values", "bootstrap_value") if self.bootstrap_truncated else ("values",)

    @property
    def words(self) -> str:
        cut_off = ", and the critic's value after a response that was cut off" if self.bootstrap_truncated else ""
        whitened = ", whitened over the batch" if self.whiten else ""
        return f"GAE over the critic's values, gamma {self.gamma:g}, lambda {self.gae_lambda:g}{cut_off}{whitened}"


class ReinforcePlusPlusAdvantage(EstimatorSection):
    """REINFORCE++: the response's own reward to go, normalised over the whole batch instead of within groups
    (arXiv:2501.03262).
    """

    kind: Literal["reinforce_plus_plus"] = "reinforce_plus_plus"
    """The estimator that this section chooses."""
    gamma: UnitFloat = 1.0
    """Discount per token."""
    baseline: Literal["none", "group"] = "none"
    """`group` subtracts the mean reward of the group before normalising (REINFORCE++ with baseline)."""

    @property
    def compares_responses(self) -> bool:
        return self.baseline == "group"

    @property
    def words(self) -> str:
        if self.baseline == "group":
            return "reward minus the group's mean, whitened over the batch (REINFORCE++ with baseline)"
        return f"reward to go, gamma {self.gamma:g}, whitened over the batch (REINFORCE++)"

    @model_validator(mode="after")
    def _baseline_is_of_whole_responses(self) -> Self:
        if self.baseline == "group" and self.gamma != 1:
            raise ValueError(
                "gamma: with baseline group, whole responses are compared and nothing is discounted; leave it at 1 "
                "or use baseline none"
            )
        return self


class PassAtKAdvantage(EstimatorSection):
    """Pass@k training: how much a response adds to the chance that k responses have a right one among them
    (arXiv:2508.10751).
    """

    kind: Literal["pass_at_k"] = "pass_at_k"
    """The estimator that this section chooses."""
    k: PositiveInt
    """Responses that are tried; at most sampling.num_responses, and useful below it. 1 is GRPO of right and wrong."""
    solved_at: ClassVar[float] = 1.0
    """A response is right when its reward, after shaping, is at least this."""

    @property
    def words(self) -> str:
        return f"what a response adds to the chance that one of {self.k} reaches {self.solved_at:g} (pass@k training)"


class GdpoAdvantage(EstimatorSection):
    """GDPO: every component of the reward is normalised within its group by itself, then their weighted sum over the
    batch (arXiv:2601.05242).
    """

    kind: Literal["gdpo"] = "gdpo"
    """The estimator that this section chooses."""
    words: ClassVar[str] = (
        "each component of the reward normalised in its group, and their weighted sum over the batch (GDPO)"
    )
    weights: dict[str, float] = {}
    """Weight of each component; absent: those of reward.components. Shaping of the reward does not reach components,
    and filters.without_signal compares whole rewards: it also drops groups whose components differ and add up to the
    same.
    """


class CustomAdvantage(PluginSection, EstimatorSection):
    """Your own estimator, `def f(batch: ScoredBatch, **options) -> Estimate` of rolecall.algorithms.advantages. Called
    in the controller, which has numpy and no torch; it must be a pure function, for a controller that starts again
    calls it again.
    """

    kind: Literal["custom"] = "custom"
    """The estimator that this section chooses."""
    columns: tuple[EstimatorColumn, ...] = ()
    """Columns that it reads with `batch.column(name)`, described in rolecall/columns.py. values and bootstrap_value
    need the `critic` section, which is trained on the `returns_N` that the function must then give; the actor's cost
    a forward pass over every batch.
    """

    @property
    def compares_responses(self) -> bool:
        return False

    @property
    def needs(self) -> tuple[str, ...]:
        return self.columns

    @property
    def words(self) -> str:
        return f"your function {self.name}"


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
