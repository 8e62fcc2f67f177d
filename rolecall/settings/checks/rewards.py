"""The rewards as estimators, shaping and filters need them: ranges, token rewards, components."""

from rolecall.settings.algorithm.advantages import GdpoAdvantage, GrpoAdvantage, PassAtKAdvantage
from rolecall.settings.reward.components import shadows_of
from rolecall.settings.reward.scorers import FunctionScorer, LengthScorer
from rolecall.settings.run_sections import RunSections
from rolecall.settings.section import may_meet


def check_advantage(settings: RunSections) -> None:
    """ValueError where the estimator would read rewards that it cannot work with."""
    advantage = settings.algorithm.advantage
    adds_kl = _adds_kl(settings)
    if isinstance(advantage, PassAtKAdvantage) and advantage.k > settings.sampling.num_responses:
        raise ValueError(
            f"algorithm.advantage.k {advantage.k} exceeds sampling.num_responses {settings.sampling.num_responses}; "
            "lower it"
        )
    if isinstance(advantage, GrpoAdvantage) and advantage.supervision == "process":
        if not settings.reward.may_have_token_rewards:
            raise ValueError(
                "algorithm.advantage.supervision process compares rewarded steps, and no scorer gives "
                "token_rewards; use one that does, or outcome"
            )
        if adds_kl:
            raise ValueError(
                "algorithm.kl.placement reward would make a step of every token under supervision process; use "
                "placement loss"
            )
    if advantage.kind == "custom" and "token_rewards" in advantage.needs and not settings.reward.may_have_token_rewards:
        raise ValueError(
            "algorithm.advantage.columns: the estimator reads token_rewards, and no scorer gives them; use one "
            "that does, as {kind: function, token_rewards: true}, or leave the column out"
        )
    clip = settings.algorithm.shaping.clip_max
    if isinstance(advantage, PassAtKAdvantage) and clip is not None and clip < advantage.solved_at:
        raise ValueError(
            f"algorithm.shaping.clip_max {clip:g}: pass_at_k takes a response for right from "
            f"{advantage.solved_at:g} on, which none would reach; raise it"
        )
    if advantage.kind == "maxrl" and (low := _what_is_below_0(settings)):
        raise ValueError(
            f"reward.components.{low}: it may bring rewards below 0, and maxrl divides by the group's mean reward; "
            "set algorithm.shaping.clip_min: 0, or its weight to 0, or use another estimator"
        )
    if advantage.kind in ("maxrl", "pass_at_k") and (adds_kl or settings.algorithm.shaping.normalize is not None):
        what, meant = ("kl.placement reward", "kl.placement loss") if adds_kl else ("shaping.normalize", "no normalize")
        raise ValueError(
            f"algorithm.{what} moves the rewards that {advantage.kind} reads as right or wrong, from 0 up; use "
            f"{meant}, or another estimator"
        )


def check_gdpo(settings: RunSections) -> None:
    """ValueError where gdpo would weigh components that are not given, or that something does not reach."""
    advantage = settings.algorithm.advantage
    if not isinstance(advantage, GdpoAdvantage):
        return
    scorers = {name: component.scorer for name, component in settings.reward.components.items()}
    unknown = sorted(name for name in advantage.weights if scorers and _component_of(name) not in scorers)
    if unknown or not (scorers or advantage.weights):
        raise ValueError(
            f"algorithm.advantage.weights: gdpo weighs reward components, {unknown or 'none'} named, "
            f"{sorted(scorers)} under reward.components; "
            "name those that the scorers give"
        )
    shadows = shadows_of(settings.reward.components)
    weighed = sorted(name for name, weight in advantage.weights.items() if weight and _component_of(name) in shadows)
    if weighed:
        raise ValueError(
            f"algorithm.advantage.weights: gdpo weighs {weighed}, which weigh 0 under reward.components: a "
            "shadow may be absent; give them a weight there, too"
        )
    earning = sorted(
        name for name, scorer in scorers.items() if isinstance(scorer, FunctionScorer) and scorer.token_rewards
    )
    if earning:
        raise ValueError(
            f"algorithm.advantage gdpo reads the reward's components, which the token_rewards of {earning} do "
            "not reach; use another estimator, or scorers without them"
        )
    shaping = settings.algorithm.shaping.model_dump(
        include={"clip_min", "clip_max", "normalize", "overlong"}, exclude_none=True
    )
    unheard = [f"algorithm.shaping.{name}" for name in sorted(shaping)]
    unheard += ["algorithm.kl.placement reward"] if _adds_kl(settings) else []
    if unheard:
        raise ValueError(
            f"algorithm.advantage gdpo reads the reward's components, which {' and '.join(unheard)} would not reach; "
            "leave it out (KL has placement loss), or use another estimator"
        )


def check_environments(settings: RunSections) -> None:
    """ValueError where a component is what environments give, and none can play a prompt that it scores."""
    for name, component in settings.reward.components.items():
        playing = [section for section in settings.environments.values() if may_meet(component.when, section.when)]
        if component.is_given and not playing:
            raise ValueError(
                f"reward.components.{name} is what an environment gives, and there is none"
                + (" whose when agrees with its own; mend one" if settings.environments else "; add one")
                + ", as in environments: {game: {address: HOST:PORT}}"
            )


def check_shaping(settings: RunSections) -> None:
    """ValueError where shaping or a filter would undo the rewards, or have nothing to compare."""
    overlong, filters = settings.algorithm.shaping.overlong, settings.algorithm.filters
    longest = settings.sampling.max_tokens
    if overlong is not None and overlong.buffer_tokens > longest:
        raise ValueError(
            f"algorithm.shaping.overlong.buffer_tokens {overlong.buffer_tokens} exceeds the longest response, "
            f"{longest} tokens; even an empty one would "
            "be punished: lower it"
        )
    if overlong is not None and settings.algorithm.advantage.kind == "maxrl":
        raise ValueError(
            "algorithm.shaping.overlong: maxrl divides by the group's mean reward, which this would bring near "
            "0; remove one of them"
        )
    if filters.component is not None:
        names = sorted(settings.reward.components)
        if names and not {filters.component, _component_of(filters.component)} & {*names}:
            raise ValueError(
                f"algorithm.filters.component {filters.component!r}: reward.components has none of that name, it has "
                f"{names}; name one of them, or remove it"
            )
        if filters.without_signal and settings.sampling.num_responses < 2:
            raise ValueError(
                "algorithm.filters.component: a greedy response is compared by the whole reward alone, so that in a "
                "group of one response none ever differs; raise sampling.num_responses, or remove the component"
            )
    if filters.without_signal and settings.responses_per_group < 2:
        raise ValueError(
            "algorithm.filters.without_signal: a group of one response never has any; raise "
            "sampling.num_responses, or remove the filter"
        )


def _adds_kl(settings: RunSections) -> bool:
    return settings.algorithm.kl is not None and settings.algorithm.kl.placement == "reward"


def _what_is_below_0(settings: RunSections) -> str | None:
    """A component that is known to take rewards below 0, which no bound keeps there; None: there is none."""
    clip_min = settings.algorithm.shaping.clip_min
    for name, component in settings.reward.components.items() if clip_min is None or clip_min < 0 else ():
        scorer = component.scorer
        is_low = isinstance(scorer, LengthScorer) or (isinstance(scorer, FunctionScorer) and (scorer.min or 0) < 0)
        if component.weight < 0 or (component.weight > 0 and is_low):
            return name
    return None


def _component_of(name: str) -> str:
    """The component that is `name`, or has a part of that name."""
    return name.partition("/")[0]
