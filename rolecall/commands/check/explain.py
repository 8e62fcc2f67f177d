"""The words of `rolecall check` on what a configuration's algorithm computes: a sentence per stage, in order.

Every kind of every section has its words here (an estimator's stand in its section), and a type checker finds one
without.
"""

from collections.abc import Iterator
from typing import assert_never

from rolecall.settings import (
    AlgorithmSection,
    ClippedLoss,
    CorrectionSection,
    CovarianceLoss,
    CurriculumSection,
    CustomLoss,
    DistillationSection,
    DppoLoss,
    DroLoss,
    EntropySection,
    FiltersSection,
    KlSection,
    PolicyLossSection,
    ReinforceLoss,
    RewardComponent,
    RunSettings,
    SapoLoss,
    ShapingSection,
)

_AGGREGATIONS = {
    "token_mean": "every trained token of a mini-batch counts the same",
    "token_sum": "token losses add up, so that the gradient grows with the batch",
    "seq_mean_token_sum": "token losses of a response add up, and responses count the same",
    "seq_mean_token_mean": "every response counts the same, its tokens share that",
}

_DIVERGENCES = {
    "dppo_tv": "|probability - old probability|",
    "dppo_kl": "the token's KL from the old policy",
}


def explain(settings: RunSettings) -> Iterator[str]:
    """A line per stage, from the prompts to the loss."""
    algorithm = settings.algorithm
    if algorithm.curriculum is not None:
        yield f"prompts: {_curriculum(algorithm.curriculum, algorithm.filters.component)}"
    if dropped := _filters(algorithm.filters, settings.reward.solved_at):
        yield (
            f"groups: dropped and replaced when {'; or '.join(dropped)}; at most "
            f"{algorithm.max_dropped_per_step} a step (algorithm.filters.max_dropped_per_step)"
        )
    yield f"reward: {'; then '.join(_reward(settings))}"
    yield f"advantages: {_advantages(algorithm)}"
    if settings.critic is not None and settings.critic.warmup_steps:
        yield f"  the critic learns alone for the first {settings.critic.warmup_steps} steps; the policy stays as it is"
    yield f"loss: {_loss(algorithm.policy_loss)}; {_aggregation(settings)}"
    if _ratio_is_one(algorithm):
        yield (
            "  one update per batch, so the ratio is 1 and what bounds or penalises it does nothing; "
            "num_minibatches or num_epochs above 1 make it count"
        )
    yield from _terms(algorithm)
    yield f"correction: {_correction(algorithm.correction)}"


def _curriculum(section: CurriculumSection, component: str | None) -> str:
    band = f"{section.min_success_rate:g} to {section.max_success_rate:g}"
    rate = "success rate" if component is None else f"success rate in {component}"
    return f"those whose {rate} is within {band} in every epoch, the others in one of {section.revisit_epochs}"


def _filters(section: FiltersSection, solved_at: float) -> list[str]:
    dropped = []
    what, reach = "rewards", f"reach {solved_at:g}"
    if section.component is not None:
        what, reach = f"values of {section.component}", f"{reach} in {section.component}"
    if section.without_signal:
        dropped.append(f"all {what} are equal (dynamic sampling)")
    if section.min_success_rate > 0:
        dropped.append(f"fewer than {100 * section.min_success_rate:g}% of the responses {reach}")
    if section.max_success_rate < 1:
        dropped.append(f"more than {100 * section.max_success_rate:g}% of the responses {reach}")
    if section.all_truncated:
        dropped.append("every response was cut off")
    if section.max_mean_tokens is not None:
        dropped.append(f"responses are longer than {section.max_mean_tokens} tokens in the mean")
    return dropped


def _reward(settings: RunSettings) -> Iterator[str]:
    components = settings.reward.components
    yield (
        " + ".join(f"{part.weight:g} x {name}{_where(part)}" for name, part in components.items())
        if components
        else "what the scorer says"
    )
    shaping, kl = settings.algorithm.shaping, settings.algorithm.kl
    yield from _shaping(shaping, settings.sampling.max_tokens)
    if kl is not None and kl.placement == "reward":
        yield (
            f"minus {_coefficient(kl)} x KL to {kl.reference} ({kl.estimator}) on each token{_pass(settings.algorithm)}"
        )


def _where(component: RewardComponent) -> str:
    """The prompts that a component scores, where that is not all."""
    fields = [
        f"{field} is {' or '.join(map(str, wanted if isinstance(wanted, tuple) else (wanted,)))}"
        for field, wanted in component.when.items()
    ]
    return f" (where {' and '.join(fields)})" if fields else ""


def _shaping(section: ShapingSection, longest: int) -> Iterator[str]:
    if section.clip_min is not None or section.clip_max is not None:
        low, high = ("-" if bound is None else f"{bound:g}" for bound in (section.clip_min, section.clip_max))
        yield f"bounded to {low} .. {high}"
    if section.normalize is not None:
        yield (
            "normalised by mean and standard deviation of "
            f"{'the batch' if section.normalize == 'batch' else 'all rewards so far'}"
        )
    if section.overlong is not None:
        free = longest - section.overlong.buffer_tokens
        yield f"up to {section.overlong.penalty:g} less from {free} to {longest} tokens"
    if section.mask_truncated:
        yield "no token of a response that was cut off is trained"


def _advantages(algorithm: AlgorithmSection) -> str:
    distillation = algorithm.distillation
    task = algorithm.advantage.words
    if distillation is None or (distillation.placement == "loss" and distillation.task_coef == 1):
        return task
    words = [f"{distillation.task_coef:g} x ({task})"] if distillation.task_coef else ["rewards teach nothing"]
    if distillation.placement == "advantage":
        words.append(
            f"minus {distillation.coef:g} x log(policy / {_teachers(distillation)}) of each token"
            f"{_held(distillation)}{_pass(algorithm)}"
        )
    return ", ".join(words)


def _pass(algorithm: AlgorithmSection) -> str:
    return "" if algorithm.sampler_is_old else ", after a pass of the actor over the batch"


def _loss(section: PolicyLossSection) -> str:
    match section:
        case ClippedLoss():
            return _clipped(section)
        case SapoLoss():
            return (
                f"a sigmoid gate on the ratio, temperatures {section.tau_pos:g} and {section.tau_neg:g} by the "
                "advantage's sign (SAPO)"
            )
        case CovarianceLoss(kind="clip_cov"):
            return (
                f"PPO's, and {100 * section.fraction:g}% of the mini-batch's tokens, drawn among those whose "
                "covariance of logprob and advantage is within "
                f"{section.cov_low:g} .. {section.cov_high:g}, without gradient (Clip-Cov)"
            )
        case CovarianceLoss():
            penalised = (
                f"{section.kl_coef:g} x |log ratio| on the {100 * section.fraction:g}% of tokens that covary most"
            )
            return f"importance-weighted policy gradient, and {penalised} (KL-Cov)"
        case DppoLoss():
            return (
                f"ratio x advantage while {_DIVERGENCES[section.kind]} stays within "
                f"{section.max_divergence:g}{' nats' if section.kind == 'dppo_kl' else ''} (DPPO)"
            )
        case DroLoss():
            return f"policy gradient and {section.beta:g} / 2 x the squared log-ratio (DRO)"
        case ReinforceLoss():
            return "plain policy gradient, nothing clipped (REINFORCE)"
        case CustomLoss():
            return f"your function {section.name}"
        case _:
            assert_never(section)


def _clipped(section: ClippedLoss) -> str:
    low, high = section.clip_eps_low, section.clip_eps_high
    match section.kind:
        case "ppo":
            dual = (
                f", at most {section.dual_clip:g} times a negative advantage" if section.dual_clip is not None else ""
            )
            return f"ratio to the old policy x advantage, the ratio clipped to {_band(low, high)}{dual} (PPO)"
        case "gspo":
            return f"one ratio per response, the geometric mean of its tokens', clipped to {_band(low, high)} (GSPO)"
        case "cispo":
            return (
                f"policy gradient weighted by the ratio within {_band(low, high)}; no token loses its gradient (CISPO)"
            )
        case "gmpo":
            band = f"e^-{low:g} .. e^{high:g}"
            return f"the geometric mean of a response's ratios, each clipped to {band}, x advantage (GMPO)"


def _ratio_is_one(algorithm: AlgorithmSection) -> bool:
    """Whether every update is a batch's first, and the ratio is to the policy that makes it."""
    first = algorithm.num_minibatches == algorithm.num_epochs == 1
    return first and not algorithm.sampler_is_old and not isinstance(algorithm.policy_loss, ReinforceLoss | CustomLoss)


def _band(low: float, high: float) -> str:
    return f"{1 - low:g} .. {1 + high:g}"


def _aggregation(settings: RunSettings) -> str:
    algorithm = settings.algorithm
    if algorithm.aggregation == "seq_mean_token_sum_norm":
        length = settings.sampling.max_tokens
        return f"token losses of a response add up, over the constant {length}, and responses count the same"
    return _AGGREGATIONS[algorithm.aggregation]


def _terms(algorithm: AlgorithmSection) -> Iterator[str]:
    kl, entropy, distillation = algorithm.kl, algorithm.entropy, algorithm.distillation
    if kl is not None and kl.placement == "loss":
        gradient = ", with k2's gradient" if kl.gradient == "k2" else ""
        if kl.estimator == "k1" and not gradient:
            gradient = ", whose own gradient is 0 on average: gradient: k2 has the KL's"
        yield f"  plus {_coefficient(kl)} x KL to {kl.reference} ({kl.estimator}{gradient})"
    if distillation is not None and distillation.placement == "loss":
        yield f"  plus {distillation.coef:g} x {_divergence(distillation)}"
    if entropy is not None:
        yield f"  minus {_entropy(entropy)} x entropy"


def _coefficient(section: KlSection) -> str:
    return (
        f"{section.kl_coef:g}"
        if section.adaptive is None
        else f"{section.kl_coef:g} (adapted to keep the KL at {section.adaptive.target:g})"
    )


def _entropy(section: EntropySection) -> str:
    return (
        f"{section.entropy_coef:g}"
        if section.target is None
        else f"{section.entropy_coef:g} (adapted to keep the entropy at {section.target:g})"
    )


def _divergence(section: DistillationSection) -> str:
    if section.top_k is not None:
        return f"KL from {_teachers(section)} to the policy over the teacher's {section.top_k} likeliest tokens"
    return f"KL from the policy to {_teachers(section)}, of the sampled tokens{_held(section)}"


def _held(section: DistillationSection) -> str:
    return "" if section.max_log_ratio is None else f", held within +-{section.max_log_ratio:g}"


def _teachers(section: DistillationSection) -> str:
    if not section.teachers:
        return f"teacher {section.teacher!r}"
    named = ", ".join(f"{name} for {value!r}" for value, name in sorted(section.teachers.items()))
    return f"teacher by {section.field} ({named}{f', else {section.teacher}' if section.teacher else ''})"


def _correction(section: CorrectionSection | None) -> str:
    if section is None:
        return "none; how far sampler and trainer are apart is only shown"
    if section.proximal == "bypass":
        words = ["the sampler is the old policy, so the ratio corrects for it"]
    else:
        words = [_weight(section)]
    for rule in section.reject:
        what = (
            f"{rule.kind} above {rule.high:g}"
            if rule.kind != "ratio"
            else f"ratios outside {rule.low:g} .. {rule.high:g}"
        )
        words.append(
            f"{'tokens' if rule.over == 'token' else 'responses'} rejected by {what} ({rule.over.replace('_', ' ')})"
        )
    return "; ".join(words)


def _weight(section: CorrectionSection) -> str:
    weight = section.weight
    if weight is None:
        return "tokens are not weighed"
    normalized = ", over their mean in the step, after a pass over its first mini-batch" if weight.normalize else ""
    if weight.kind == "icepop":
        band = f"{weight.low:g} .. {weight.cap:g}"
        return f"tokens weighed by trainer / sampler within {band}, and by 0 outside (IcePop){normalized}"
    what = "tokens" if weight.kind == "token" else "responses"
    return f"{what} weighed by trainer / sampler{_capped(weight.cap)}{normalized}"


def _capped(cap: float | None) -> str:
    return "" if cap is None else f", at most {cap:g}"
