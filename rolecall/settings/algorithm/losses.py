"""Sections of the actor's loss: the policy losses, one per method, and its entropy term.

Ratios are of the policy to the old policy, per token unless said otherwise. Defaults are the papers' where they state
them.
"""

from typing import Annotated, Literal, Self, TypeAlias

from pydantic import Field, PositiveFloat, model_validator

from rolecall.settings.plugin import PluginSection
from rolecall.settings.section import NonNegativeFloat, Section, UnitFloat


class PpoLoss(Section):
    """PPO's clipped objective (arXiv:1707.06347, eq. 7) with separate bounds (DAPO, arXiv:2503.14476, eq. 8) and dual
    clip (arXiv:1912.09729, eq. 5).
    """

    kind: Literal["ppo"] = "ppo"
    clip_eps_low: NonNegativeFloat = 0.2
    """Ratios below 1 - this are clipped."""
    clip_eps_high: NonNegativeFloat = 0.28
    """Ratios above 1 + this are clipped."""
    dual_clip: Annotated[float, Field(gt=1)] | None = None
    """Bound on the ratio where the advantage is negative; absent: none."""


class GspoLoss(Section):
    """GSPO (arXiv:2507.18071): one ratio per sequence, the geometric mean of its tokens'; in the form whose advantages
    may differ by token (section 4.3). The paper aggregates by seq_mean_token_mean.
    """

    kind: Literal["gspo"] = "gspo"
    clip_eps_low: NonNegativeFloat = 3e-4
    """Sequence ratios below 1 - this are clipped (section 5.1)."""
    clip_eps_high: NonNegativeFloat = 4e-4
    """Sequence ratios above 1 + this are clipped (section 5.1)."""


class CispoLoss(Section):
    """CISPO (MiniMax-M1, arXiv:2506.13585, eq. 4 and 5): REINFORCE weighted by a clipped ratio; no token loses its
    gradient.
    """

    kind: Literal["cispo"] = "cispo"
    clip_eps_low: UnitFloat | None = None
    """Weights are at least 1 - this; absent: not bounded from below, as in the paper."""
    clip_eps_high: NonNegativeFloat = 4.0
    """Weights are at most 1 + this. MiniMax-M1 tunes it and states no number; a bound of 5 is ScaleRL's
    (arXiv:2510.13786).
    """


class GmpoLoss(Section):
    """GMPO (arXiv:2507.20673): the geometric mean of a sequence's ratios, each clipped before. The paper aggregates by
    seq_mean_token_mean.
    """

    kind: Literal["gmpo"] = "gmpo"
    clip_eps_low: NonNegativeFloat = 0.4
    """Where the advantage is negative, ratios below e^-this are clipped."""
    clip_eps_high: NonNegativeFloat = 0.4
    """Where it is positive, ratios above e^this are clipped."""


class SapoLoss(Section):
    """SAPO (arXiv:2511.20347): a soft gate, a sigmoid of the ratio, instead of a clip."""

    kind: Literal["sapo"] = "sapo"
    tau_pos: PositiveFloat = 1.0
    """Temperature where the advantage is positive: the larger, the sooner the gradient fades away from ratio 1."""
    tau_neg: PositiveFloat = 1.05
    """Temperature where the advantage is negative."""


class ClipCovLoss(Section):
    """Clip-Cov (arXiv:2505.22617): PPO's objective, without the gradient of a few tokens drawn among those whose
    logprob and advantage vary most together.

    Drawn over the whole mini-batch with the weights of the moment, which costs a forward pass per optimizer step.
    """

    kind: Literal["clip_cov"] = "clip_cov"
    fraction: UnitFloat = 2e-4
    """Of the mini-batch's trained tokens; at least one is drawn."""
    cov_low: float = 1.0
    """Tokens are drawn whose covariance is above this."""
    cov_high: float = 5.0
    """And below this."""
    clip_eps_low: NonNegativeFloat = 1.0
    """Ratios below 1 - this are clipped; as wide as in the authors' runs, for the draw is the method's own bound."""
    clip_eps_high: NonNegativeFloat = 1.0
    """Ratios above 1 + this are clipped."""

    @model_validator(mode="after")
    def _band_is_not_empty(self) -> Self:
        if not self.cov_low < self.cov_high:
            raise ValueError(
                f"cov_low {self.cov_low:g} is not below cov_high {self.cov_high:g}: no token would be drawn; move "
                "one of them"
            )
        return self


class KlCovLoss(Section):
    """KL-Cov (arXiv:2505.22617): importance-weighted policy gradient, with a KL penalty on the tokens whose logprob and
    advantage vary most together.

    Chosen over the whole mini-batch with the weights of the moment, which costs a forward pass per optimizer step. On
    the first of a batch the penalty has no gradient: it needs num_minibatches or num_epochs above 1.
    """

    kind: Literal["kl_cov"] = "kl_cov"
    fraction: UnitFloat = 2e-3
    """Of the mini-batch's trained tokens; at least one is chosen. The paper: 2e-3 for 7B, 2e-4 for 32B."""
    kl_coef: NonNegativeFloat = 1.0
    """Weight of |log ratio|, which stands for the KL to the old policy."""


class DppoTvLoss(Section):
    """DPPO (arXiv:2602.04879) by total variation: a token that would leave the trust region has no gradient. The two
    outcomes of the divergence are the sampled token and any other. The paper puts the region around the sampler:
    correction.proximal `bypass`.
    """

    kind: Literal["dppo_tv"] = "dppo_tv"
    max_divergence: UnitFloat = 0.15
    """Bound of |pi - pi_old|, as in the authors' runs."""


class DppoKlLoss(Section):
    """As dppo_tv, by KL(pi_old || pi)."""

    kind: Literal["dppo_kl"] = "dppo_kl"
    max_divergence: PositiveFloat = 0.05
    """Bound in nats, as in the authors' runs."""


class DroLoss(Section):
    """DRO's objective (arXiv:2405.19107) token by token, as Tinker has it: policy gradient and a quadratic penalty on
    the log-ratio.
    """

    kind: Literal["dro"] = "dro"
    beta: PositiveFloat
    """Weight of half the squared log-ratio."""


class ReinforceLoss(Section):
    """Plain policy gradient, -A log pi: no ratio, nothing clipped. GPG's loss (arXiv:2504.02546) is this."""

    kind: Literal["reinforce"] = "reinforce"


class CustomLoss(PluginSection):
    """Your own loss, `def f(batch: PolicyBatch, **options) -> TokenLosses` of rolecall.algorithms.losses, called on the
    actor's ranks once per microbatch.

    examples/custom_loss shows one.
    """

    kind: Literal["custom"] = "custom"
    columns: tuple[str, ...] = ()
    """Per-token columns of the rows that it reads from `batch.columns`: token_rewards, values and returns with a
    critic, <reference>/logprobs of the KL's reference, teacher/logprobs with distillation, and what every row has
    (rolecall/trajectory.py).
    """


PolicyLossSection: TypeAlias = Annotated[
    PpoLoss
    | GspoLoss
    | CispoLoss
    | GmpoLoss
    | SapoLoss
    | ClipCovLoss
    | KlCovLoss
    | DppoTvLoss
    | DppoKlLoss
    | DroLoss
    | ReinforceLoss
    | CustomLoss,
    Field(discriminator="kind"),
]

CovarianceLoss: TypeAlias = ClipCovLoss | KlCovLoss
"""Losses that single out tokens of the whole mini-batch before each optimizer step
(rolecall/training/step/token_selection.py).
"""

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
    min_coef: NonNegativeFloat = 0.0
    """Lowest weight."""
    max_coef: PositiveFloat = 0.005
    """Highest weight."""

    @model_validator(mode="after")
    def _starts_within_its_bounds(self) -> Self:
        fields = type(self).model_fields
        if self.target is None and any(
            getattr(self, name) != fields[name].default for name in ("coef_step", "min_coef", "max_coef")
        ):
            raise ValueError(
                "coef_step, min_coef and max_coef move the weight toward a target; set target, or remove them"
            )
        if self.target is not None and not self.min_coef <= self.entropy_coef <= self.max_coef:
            raise ValueError(
                f"entropy_coef {self.entropy_coef} is not within min_coef {self.min_coef} .. max_coef "
                f"{self.max_coef}; move one of them"
            )
        return self
