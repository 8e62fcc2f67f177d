"""The section of the algorithm: what a batch is and what is computed from it. Its parts have files of their own."""

from typing import Self

from pydantic import PositiveInt, model_validator

from rolecall.columns import TEACHER, TOPK_IDS, TOPK_LOGPROBS, reference_column
from rolecall.settings.algorithm.advantages import AdvantageSection, GrpoAdvantage
from rolecall.settings.algorithm.correction import CorrectionSection
from rolecall.settings.algorithm.distillation import DistillationSection
from rolecall.settings.algorithm.kl import KlSection
from rolecall.settings.algorithm.losses import (
    Aggregation,
    ClippedLoss,
    CovarianceLoss,
    CustomLoss,
    EntropySection,
    PolicyLossSection,
    ReinforceLoss,
)
from rolecall.settings.algorithm.shaping import CurriculumSection, FiltersSection, ShapingSection
from rolecall.settings.section import NonNegativeInt, Section

DROPPED_PER_BATCH, LEAST_DROPPED = 32, 1024
"""Groups that the filters may drop for each one of a batch, and in any case: where chance alone, of few groups or of
prompts that are mostly solved by now, does not spend the budget. verl's DAPO gives up at ten rounds of three batches
(filter_groups.max_num_gen_batches).
"""


class AlgorithmSection(Section):
    """The algorithm: what a batch is and what is computed from it."""

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
    policy_loss: PolicyLossSection = ClippedLoss()
    """Loss of the actor."""
    aggregation: Aggregation = "token_mean"
    """How the actor's token losses become one number, normalised (token_sum: not) by the whole mini-batch's own counts;
    seq_mean_token_sum_norm also by the constant sampling.max_tokens.
    """
    entropy: EntropySection | None = None
    """Entropy bonus; absent: none."""
    kl: KlSection | None = None
    """KL to a reference; absent: none, and no reference is asked."""
    correction: CorrectionSection | None = CorrectionSection()
    """Off-policy correction of the loss; null: metrics only."""
    distillation: DistillationSection | None = None
    """Teachers of the policy on its own samples; absent: none."""
    shaping: ShapingSection = ShapingSection()
    """Shaping of the raw reward to the one that advantages are computed from."""
    filters: FiltersSection = FiltersSection()
    """Scored groups that are dropped and replaced; by default none."""
    curriculum: CurriculumSection | None = None
    """Prompts by their success rate; absent: every prompt once an epoch."""

    @property
    def wants_greedy_response(self) -> bool:
        """Whether every group has a greedy response beside its sampled ones."""
        return self.advantage.wants_greedy_response

    @property
    def max_dropped_per_step(self) -> int:
        """Groups that the filters may drop within a step: as set, else by the batch."""
        by_batch = max(LEAST_DROPPED, DROPPED_PER_BATCH * self.groups_per_batch)
        return self.filters.max_dropped_per_step or by_batch

    @property
    def sampler_is_old(self) -> bool:
        """Whether the sampler's logprobs stand for the old policy's."""
        return self.correction is not None and self.correction.proximal == "bypass"

    @property
    def loss_columns(self) -> dict[str, str]:
        """Columns that the actor's loss reads beside those of every loss: the setting that asks for each, by name."""
        kl, distillation, loss = self.kl, self.distillation, self.policy_loss
        asked: dict[str, str] = {}
        if kl is not None and kl.placement == "loss":
            asked[reference_column(kl.reference)] = "algorithm.kl"
        if distillation is not None and distillation.placement != "advantage":
            taught = (reference_column(TEACHER),) if distillation.top_k is None else (TOPK_IDS, TOPK_LOGPROBS)
            asked |= dict.fromkeys(taught, "algorithm.distillation")
        if isinstance(loss, CustomLoss):
            for name in loss.columns:
                asked.setdefault(name, "algorithm.policy_loss")
        return asked

    @property
    def sees_trajectories(self) -> bool:
        """Whether something in the loss of a token depends on other tokens of its trajectory, so that a trajectory must
        be in one microbatch.
        """
        correction = self.correction
        weighs = correction is not None and correction.weight is not None and correction.weight.kind == "sequence"
        rejects = correction is not None and any(each.over != "token" for each in correction.reject)
        of_ratio = self.policy_loss.kind in ("gspo", "gmpo", "custom")
        return weighs or rejects or of_ratio or self.aggregation == "seq_mean_token_mean"

    @property
    def compares_tokens(self) -> bool:
        """Whether the loss chooses among the tokens of a mini-batch by what they are beside each other: then its rows
        are drawn freely, from as many prompts as there are.
        """
        return isinstance(self.policy_loss, CovarianceLoss)

    @model_validator(mode="after")
    def _bypass_has_a_ratio(self) -> Self:
        if self.sampler_is_old and isinstance(self.policy_loss, ReinforceLoss):
            raise ValueError(
                "correction.proximal bypass leaves the correction to the loss's ratio, and policy_loss reinforce "
                "has none; use proximal: recompute, which "
                "weighs tokens, or another loss"
            )
        return self
