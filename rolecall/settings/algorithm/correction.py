"""The section of the off-policy correction: what a token weighs for having been sampled by another policy than the one
that is trained.
"""

from typing import Literal, Self, TypeAlias

from pydantic import PositiveFloat, model_validator

from rolecall.settings.section import NonNegativeFloat, Section

Over: TypeAlias = Literal["token", "sequence_mean", "sequence_sum", "sequence_max"]
"""What is held against a bound: each token's number, to reject tokens; or the mean, sum or largest over a response's
trained tokens, to reject responses.
"""


class ImportanceWeight(Section):
    """The importance weight of a token by its ratio trainer / sampler.

    - `token`: truncated importance sampling, min(ratio, cap) of each token (https://fengyao.notion.site/off-policy-rl;
      the clip of AIPO, arXiv:2505.24034). Low variance, biased: it corrects each token as if those before it had been
      drawn from the trainer. 2 to 5 are usual caps.
    - `sequence`: the same of the product of a response's ratios, for all its tokens. Unbiased but for the cap, and of a
      variance that grows with the length: for short responses. 2 to 10 are usual caps.
    - `icepop`: IcePop (Ring-1T, arXiv:2510.18855): the token's ratio within low .. cap, 0 elsewhere. Made for experts,
      whose routing flips between engines.
    """

    kind: Literal["token", "sequence", "icepop"] = "token"
    """The weight that this section chooses."""
    low: NonNegativeFloat = 0.5
    """Ratios below this weigh 0; of icepop alone."""
    cap: PositiveFloat | None = 2.0
    """Upper bound of the weight, beyond which icepop's is 0; null: none, plain importance sampling. Absent: 2, and 5
    for icepop.
    """
    normalize: bool = False
    """Divide the weights by their mean over the trained tokens of the step (of kind sequence: over its responses), of
    all mini-batches and before anything is rejected: self-normalised importance sampling. The gradient keeps its size
    where the weights are small as a whole, at the price of a bias that falls with the batch; a weight may then exceed
    cap. Costs one forward pass of the actor over the first mini-batch, whose weights are known only then.
    """

    @model_validator(mode="before")
    @classmethod
    def _cap_of_the_method(cls, given: object) -> object:
        is_icepop = isinstance(given, dict) and given.get("kind") == "icepop"
        return {"cap": 5.0, **given} if is_icepop and isinstance(given, dict) else given

    @model_validator(mode="after")
    def _band_is_whole(self) -> Self:
        if self.kind != "icepop":
            if self.low != type(self).model_fields["low"].default:
                raise ValueError(f"low: {self.kind} is bounded from above alone; remove it, or use kind: icepop")
        elif self.cap is None:
            raise ValueError("cap: icepop needs both ends of its band; give a number")
        else:
            _check_band(self.low, self.cap)
        return self


class Rejection(Section):
    """A bound by which tokens or responses are rejected.

    - `ratio`: trainer / sampler (k1): of tokens, or of responses by the geometric mean (`sequence_mean`), the product
      (`sequence_sum`), or any token's (`sequence_max`). The geometric mean does not depend on the length, and wants a
      band near 1.
    - `k2`, `k3`: an estimate of the divergence in nats, (log ratio)^2 / 2 or ratio - 1 - log ratio; the mean of k3 is
      KL(sampler || trainer).
    """

    kind: Literal["ratio", "k2", "k3"]
    """The number that is held against the bounds."""
    over: Over
    """Tokens or responses, and how a response's tokens become one number."""
    low: NonNegativeFloat = 0.0
    """Less than this is rejected; of `ratio` alone."""
    high: PositiveFloat
    """More than this is rejected."""

    @model_validator(mode="after")
    def _is_not_empty(self) -> Self:
        if self.low and self.kind != "ratio":
            raise ValueError(f"low: {self.kind} is bounded from above alone; remove it, or use kind: ratio")
        _check_band(self.low, self.high)
        return self


def _check_band(low: float, high: float) -> None:
    if not low < high:
        raise ValueError(f"low {low} is not below high {high}: everything would be rejected")


class CorrectionSection(Section):
    """Off-policy correction of the policy loss (docs/adr/0028-corrected-by-default.md).

    Sampler and trainer compute the same policy with other kernels (in bfloat16 rare tokens differ widely) and, with
    max_staleness, other weights. By default tokens are weighed, up to 2: what a clip of 0.28 may raise a ratio by in
    three steps, so that a staleness of 1 to 4 passes and a broken token counts at most twice. In float32 and in step
    the weights are 1. Nothing is rejected; a rejected token would weigh 0 and still count in the loss's normaliser.
    """

    weight: ImportanceWeight | None = ImportanceWeight()
    """Importance weight of the sampler's tokens; null: 1."""
    reject: tuple[Rejection, ...] = ()
    """What is left out; a token must pass all of them."""
    proximal: Literal["recompute", "bypass"] = "recompute"
    """The policy that the loss's ratio is against. `recompute`: the trainer before the batch's first update; its pass
    costs nothing with one mini-batch and one epoch. `bypass`: the sampler itself: no pass, the ratio is the importance
    weight and the loss's clip its bound; `weight` has nothing left to correct.
    """

    @property
    def corrects(self) -> bool:
        """Whether anything is weighed, left out or bounded by how the sampler differs from the trainer."""
        return self.weight is not None or bool(self.reject) or self.proximal == "bypass"

    @model_validator(mode="before")
    @classmethod
    def _bypass_weighs_once(cls, given: object) -> object:
        if not isinstance(given, dict) or given.get("proximal") != "bypass":
            return given
        if given.get("weight") is not None:
            raise ValueError(
                "weight corrects the proximal policy for the sampler, and proximal: bypass makes them one; remove "
                "weight, or use proximal: recompute"
            )
        return {**given, "weight": None}
