"""Sections of the actor's loss: the policy losses, one per method, and its entropy term.

Ratios are of the policy to the old policy, per token unless said otherwise. Defaults are the papers' where they state
them.
"""

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, PositiveFloat, model_validator

from rolecall.settings.plugin import PluginSection
from rolecall.settings.section import NonNegativeFloat, Section, UnitFloat


class ClippedLoss(Section):
    """A loss that clips the ratio of the policy to the old policy.

    - `ppo`: PPO's objective (arXiv:1707.06347, eq. 7) with separate bounds (DAPO, arXiv:2503.14476, eq. 8) and dual
      clip (arXiv:1912.09729, eq. 5).
    - `gspo`: GSPO (arXiv:2507.18071): one ratio per sequence, the geometric mean of its tokens'; in the form whose
      advantages may differ by token (section 4.3). The paper aggregates by seq_mean_token_mean.
    - `cispo`: CISPO (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5): REINFORCE weighted by the clipped ratio; no token
      loses its gradient. The paper states no number for the upper bound; a weight of 5 is ScaleRL's
      (arXiv:2510.13786).
    - `gmpo`: GMPO (arXiv:2507.20673): the geometric mean of a sequence's ratios, each clipped before. The paper
      aggregates by seq_mean_token_mean.
    """

    kind: Literal["ppo", "gspo", "cispo", "gmpo"] = "ppo"
    """The loss that this section chooses."""
    clip_eps_low: NonNegativeFloat = 0.2
    """Ratios below 1 - this are clipped; gmpo: below e^-this, where the advantage is negative. Absent: the papers': ppo
    0.2, gspo 3e-4 (section 5.1), cispo 1, which bounds nothing, gmpo 0.4.
    """
    clip_eps_high: NonNegativeFloat = 0.28
    """Ratios above 1 + this are clipped; gmpo: above e^this, where the advantage is positive. Absent: ppo 0.28, gspo
    4e-4, cispo 4, gmpo 0.4.
    """
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound on the ratio where the advantage is negative, of ppo alone; absent: none."""

    @model_validator(mode="before")
    @classmethod
    def _bounds_of_the_method(cls, given: object) -> object:
        low, high = _CLIP_EPS.get(given.get("kind", "ppo"), (0.2, 0.28)) if isinstance(given, dict) else (0.2, 0.28)
        return {"clip_eps_low": low, "clip_eps_high": high, **given} if isinstance(given, dict) else given

    @model_validator(mode="after")
    def _dual_clip_has_an_effect(self) -> Self:
        if self.dual_clip is not None and self.kind != "ppo":
            raise ValueError(f"dual_clip: {self.kind} has none; remove it, or use kind: ppo")
        return self


_CLIP_EPS = {"ppo": (0.2, 0.28), "gspo": (3e-4, 4e-4), "cispo": (1.0, 4.0), "gmpo": (0.4, 0.4)}


class SapoLoss(Section):
    """SAPO (arXiv:2511.20347): a soft gate, a sigmoid of the ratio, instead of a clip."""

    kind: Literal["sapo"] = "sapo"
    """The loss that this section chooses."""
    tau_pos: PositiveFloat = 1.0
    """Temperature where the advantage is positive: the larger, the sooner the gradient fades away from ratio 1."""
    tau_neg: PositiveFloat = 1.05
    """Temperature where the advantage is negative."""


class CovarianceLoss(Section):
    """A loss that singles out tokens whose logprob and advantage vary most together (arXiv:2505.22617).

    They are chosen over the whole mini-batch with the weights of the moment, before each optimizer step, which costs a
    forward pass (rolecall/training/step/token_selection.py).

    - `clip_cov`: PPO's objective, without the gradient of a few tokens drawn among those within the bounds.
    - `kl_cov`: importance-weighted policy gradient, with a KL penalty on the tokens that covary most. On the first step
      of a batch the penalty has no gradient: it needs num_minibatches or num_epochs above 1.
    """

    kind: Literal["clip_cov", "kl_cov"]
    """The loss that this section chooses."""
    fraction: UnitFloat = 2e-4
    """Share of the mini-batch's trained tokens; at least one is chosen. Absent: clip_cov 2e-4, kl_cov 2e-3, the paper's
    for 7B (for 32B 2e-4).
    """
    cov_low: float = 1.0
    """Tokens are drawn whose covariance is above this; of clip_cov alone."""
    cov_high: float = 5.0
    """Tokens are drawn whose covariance is below this; of clip_cov alone."""
    clip_eps_low: NonNegativeFloat = 1.0
    """Ratios below 1 - this are clipped, of clip_cov alone; as wide as in the authors' runs, for the draw is the
    method's own bound.
    """
    clip_eps_high: NonNegativeFloat = 1.0
    """Ratios above 1 + this are clipped, of clip_cov alone."""
    kl_coef: NonNegativeFloat = 1.0
    """Weight of |log ratio|, which stands for the KL to the old policy; of kl_cov alone."""

    @model_validator(mode="before")
    @classmethod
    def _fraction_of_the_method(cls, given: object) -> object:
        is_kl = isinstance(given, dict) and given.get("kind") == "kl_cov"
        return {"fraction": 2e-3, **given} if is_kl and isinstance(given, dict) else given

    @model_validator(mode="after")
    def _fields_have_an_effect(self) -> Self:
        others = {"kl_coef"} if self.kind == "clip_cov" else {"cov_low", "cov_high", "clip_eps_low", "clip_eps_high"}
        fields = type(self).model_fields  # a resolved file names them all
        if idle := sorted(name for name in others if getattr(self, name) != fields[name].default):
            raise ValueError(f"{idle} mean nothing to {self.kind}; remove them, or use the other kind")
        if not self.cov_low < self.cov_high:
            raise ValueError(
                f"cov_low {self.cov_low:g} is not below cov_high {self.cov_high:g}: no token would be drawn; move "
                "one of them"
            )
        return self


class DppoLoss(Section):
    """DPPO (arXiv:2602.04879): a token that would leave the trust region has no gradient. The region is measured by
    total variation, |pi - pi_old| (`dppo_tv`), or by KL(pi_old || pi) (`dppo_kl`). The two outcomes of the divergence
    are the sampled token and any other. The paper puts the region around the sampler: correction.proximal `bypass`.
    """

    kind: Literal["dppo_tv", "dppo_kl"]
    """Measure of the trust region."""
    max_divergence: PositiveFloat = 0.15
    """Bound of the divergence: dppo_tv a difference of probabilities, up to 1; dppo_kl nats. Absent: 0.15 and 0.05, as
    in the authors' runs.
    """

    @model_validator(mode="before")
    @classmethod
    def _bound_of_the_measure(cls, given: object) -> object:
        is_kl = isinstance(given, dict) and given.get("kind") == "dppo_kl"
        return {"max_divergence": 0.05, **given} if is_kl and isinstance(given, dict) else given

    @model_validator(mode="after")
    def _bound_is_one_of_probabilities(self) -> Self:
        if self.kind == "dppo_tv" and self.max_divergence > 1:
            raise ValueError(f"max_divergence {self.max_divergence:g}: probabilities differ by 1 at most; lower it")
        return self


class DroLoss(Section):
    """DRO's objective (arXiv:2405.19107) token by token, as Tinker has it: policy gradient and a quadratic penalty on
    the log-ratio.
    """

    kind: Literal["dro"] = "dro"
    """The loss that this section chooses."""
    beta: PositiveFloat
    """Weight of half the squared log-ratio."""


class ReinforceLoss(Section):
    """Plain policy gradient, -A log pi: no ratio, nothing clipped. GPG's loss (arXiv:2504.02546) is this."""

    kind: Literal["reinforce"] = "reinforce"
    """The loss that this section chooses."""


class CustomLoss(PluginSection):
    """Your own loss, `def f(batch: PolicyBatch, **options) -> TokenLosses` of rolecall.algorithms.losses, called on the
    actor's ranks once per microbatch.

    examples/custom_loss shows one.
    """

    kind: Literal["custom"] = "custom"
    """The loss that this section chooses."""
    columns: tuple[str, ...] = ()
    """Per-token columns of the rows that it reads from `batch.columns`: token_rewards, values and returns with a
    critic, <reference>/logprobs of the KL's reference, teacher/logprobs with distillation, and what every row has
    (rolecall/columns.py).
    """


PolicyLossSection: TypeAlias = Annotated[
    ClippedLoss | SapoLoss | CovarianceLoss | DppoLoss | DroLoss | ReinforceLoss | CustomLoss,
    Field(discriminator="kind"),
]

Aggregation: TypeAlias = Literal[
    "token_mean", "token_sum", "seq_mean_token_sum", "seq_mean_token_mean", "seq_mean_token_sum_norm"
]
"""How token losses become one number (rolecall/algorithms/aggregation.py)."""


class EntropySection(Section):
    """The entropy term of the loss, with a fixed weight or one that follows the entropy toward a target (Skywork-OR1,
    arXiv:2505.22312).
    """

    entropy_coef: NonNegativeFloat
    """Weight of the bonus; with `target`, the one to start from."""
    target: PositiveFloat | None = None
    """Entropy to be held, nats per trained token: below it the weight rises, above it the weight falls and the bonus is
    not applied. Absent: a fixed weight.
    """
    coef_step: PositiveFloat = 0.0001
    """How far the weight moves in a step."""
    max_coef: PositiveFloat = 0.005
    """Highest weight; the lowest is 0."""

    @model_validator(mode="after")
    def _starts_within_its_bounds(self) -> Self:
        fields = type(self).model_fields
        if self.target is None and any(
            getattr(self, name) != fields[name].default for name in ("coef_step", "max_coef")
        ):
            raise ValueError("coef_step and max_coef move the weight toward a target; set target, or remove them")
        if self.target is not None and self.entropy_coef > self.max_coef:
            raise ValueError(f"entropy_coef {self.entropy_coef} is above max_coef {self.max_coef}; move one of them")
        return self
