"""Sections of the advantage estimators, one per method."""

from typing import Annotated, Literal, TypeAlias

from pydantic import Field

from rolecall.settings.section import Section, UnitFloat


class GrpoAdvantage(Section):
    """GRPO: reward minus the group's mean, over its standard deviation (arXiv:2402.03300, eq. 4 text)."""

    kind: Literal["grpo"] = "grpo"
    normalize_std: bool = True
    """Divide by the group's standard deviation; false is Dr.GRPO's centring (arXiv:2503.20783)."""


class RlooAdvantage(Section):
    """RLOO: reward minus the mean of the group's other rewards (arXiv:2402.14740)."""

    kind: Literal["rloo"] = "rloo"


class RemaxAdvantage(Section):
    """ReMax: reward minus the reward of a greedy response to the same prompt, which the rollouts sample beside the others (arXiv:2310.10505)."""

    kind: Literal["remax"] = "remax"


class GaeAdvantage(Section):
    """GAE over the critic's values (arXiv:1506.02438, eq. 16), whitened over the batch. Needs the `critic` section."""

    kind: Literal["gae"] = "gae"
    gamma: UnitFloat = 1.0
    """Discount per token."""
    gae_lambda: UnitFloat = 1.0
    """Trace decay per token."""
    whiten: bool = True
    """Subtract the batch's mean and divide by its standard deviation, over trained tokens."""


AdvantageSection: TypeAlias = Annotated[GrpoAdvantage | RlooAdvantage | RemaxAdvantage | GaeAdvantage, Field(discriminator="kind")]
