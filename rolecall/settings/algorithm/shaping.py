"""Sections of data shaping: what becomes of a reward before advantages, which groups are dropped, which prompts are
visited less often.
"""

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from rolecall.settings.section import Section


class OverlongSection(Section):
    """DAPO's soft overlong punishment (arXiv:2503.14476, eq. 13), added to the reward: 0 up to
    sampling.max_tokens - buffer_tokens, then linear to -penalty at sampling.max_tokens, the paper's L_max.
    """

    buffer_tokens: PositiveInt
    """Length over which it grows; the paper's L_cache."""
    penalty: Annotated[float, Field(gt=0)] = 1.0
    """What the longest response loses; the paper's is 1."""


class ShapingSection(Section):
    """The steps from the raw reward to the one that advantages are computed from, in this order. The rows keep the raw
    reward, and accuracy, filters and the curriculum read that one.
    """

    clip_min: float | None = None
    """Lower rewards count as this; absent: no bound."""
    clip_max: float | None = None
    """Higher rewards count as this; absent: no bound."""
    normalize: Literal["batch", "running"] | None = None
    """Subtract the mean and divide by the standard deviation of the batch's rewards, or of all rewards of the run so
    far, these included.
    """
    overlong: OverlongSection | None = None
    """Soft punishment of long responses, after normalisation; absent: none."""
    mask_truncated: bool = False
    """Train no token of a truncated response: one cut off at sampling.max_tokens, or an episode that anything but its
    environment's own end ended (DAPO's overlong filtering). Its reward still counts in its group.
    """

    @model_validator(mode="after")
    def _bounds_are_ordered(self) -> Self:
        if self.clip_min is not None and self.clip_max is not None and self.clip_min >= self.clip_max:
            raise ValueError(
                f"clip_min {self.clip_min:g} is not below clip_max {self.clip_max:g}; every reward would count the same"
            )
        return self


class FiltersSection(Section):
    """The scored groups that are dropped. Each gives its place back to admission, so another prompt is sampled instead
    and batches stay full: with without_signal this is DAPO's dynamic sampling. All read raw rewards. A group is
    counted under the first that applies, in this order.
    """

    component: str | None = None
    """Part of the reward that without_signal and the success rates, also those of a `curriculum`, read in place of the
    whole: a name under reward.components, or of a part of one (NAME/PART); of weight 0 it is for them alone. Responses
    that it does not apply to are left out, and a group of nothing else is judged by its whole reward. Absent: the whole
    reward.
    """
    without_signal: bool = False
    """Drop groups whose rewards are all equal, with what tokens or turns earned and without (`without_signal`;
    arXiv:2503.14476, eq. 11).
    """
    min_success_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Drop groups in which a smaller share of the responses reaches reward.solved_at (`too_hard`)."""
    max_success_rate: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Drop groups in which a greater share does (`too_easy`)."""
    all_truncated: bool = False
    """Drop groups whose responses were all truncated, as in shaping.mask_truncated (`all_truncated`)."""
    max_mean_tokens: PositiveInt | None = None
    """Drop groups whose responses are longer than this in the mean (`too_long`); absent: no bound."""
    max_dropped_per_step: PositiveInt | None = None
    """Budget of groups dropped by all filters within one step; spent, the run stops. Absent: 32 batches, and at least
    1024 groups, so that a run goes on until about one group of 33 is kept.
    """

    @model_validator(mode="after")
    def _something_reads_the_component(self) -> Self:
        read = self.without_signal or self.min_success_rate > 0 or self.max_success_rate < 1
        if self.component is not None and not read:
            raise ValueError(
                "component: no filter reads it; set without_signal, min_success_rate or max_success_rate, or remove it"
            )
        return self

    @model_validator(mode="after")
    def _some_rate_passes(self) -> Self:
        if self.min_success_rate > self.max_success_rate:
            raise ValueError(
                f"min_success_rate {self.min_success_rate:g} exceeds max_success_rate {self.max_success_rate:g}; no "
                "group would be left; move one of them"
            )
        return self


class CurriculumSection(Section):
    """Prompts whose recent success rate, by `filters.component` where that is set, is outside a band are visited less
    often. A prompt that was never scored counts as inside.
    """

    min_success_rate: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Below it a prompt is too hard at present."""
    max_success_rate: Annotated[float, Field(ge=0, le=1)] = 1.0
    """Above it a prompt is solved."""
    revisit_epochs: Annotated[int, Field(ge=2)] = 4
    """A prompt outside the band is visited in one epoch of this many; which one depends on the run's seed and the
    prompt.
    """

    @model_validator(mode="after")
    def _some_rate_is_inside(self) -> Self:
        if self.min_success_rate > self.max_success_rate:
            raise ValueError(
                f"min_success_rate {self.min_success_rate:g} exceeds max_success_rate {self.max_success_rate:g}; "
                "all prompts would be outside; move one of them"
            )
        if self.min_success_rate == 0 and self.max_success_rate == 1:
            raise ValueError(
                "every success rate is within 0 .. 1, so that no prompt is visited less often; set "
                "min_success_rate or max_success_rate"
            )
        return self
