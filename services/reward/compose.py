"""The composition of components to one reward: their weighted sum, and the description of that sum. Pure functions.

A component that is itself composed (an external scorer with components, a function that returns some) reports them as
`<component>/<part>`.
"""

import math
from collections.abc import Collection, Mapping

import numpy as np

from rolecall.scoring.description import bounds_of, component_spec
from rolecall.scoring.results import error_result
from rolecall.scoring.scores import Failure, Outcome, Score
from rolecall.v1 import reward_pb2
from rolecall.wire import encode_tensor

NOT_APPLICABLE = "NOT_APPLICABLE"
"""Code of an item that no component scores."""


def compose_spec(
    name: str,
    specs: Mapping[str, reward_pb2.DescribeResponse],
    weights: Mapping[str, float],
    routed: Collection[str] = (),
    shadows: Collection[str] = (),
) -> reward_pb2.DescribeResponse:
    """Returns what the weighted sum of the components `specs` reads and returns. A range is bounded when every
    component with a weight is. Those in `routed` apply to some items alone, which their metadata says; items may lack
    the `shadows`, whose own ranges and token rewards are no part of it: they may change.
    """
    lows, highs, components = [], [], []
    for part, spec in specs.items():
        ends = [_scaled(weights[part], bound) for bound in bounds_of(spec.reward)] + [0.0] * (part in routed)
        lows.append(min(ends))
        highs.append(max(ends))
        parts = [_named(part, spec.reward, may_be_absent=part in routed)]
        parts += [
            _named(f"{part}/{inner.name}", inner, may_be_absent=part in routed or inner.may_be_absent)
            for inner in spec.components
        ]
        components += [
            reward_pb2.ComponentSpec(name=each.name, may_be_absent=True) if part in shadows else each for each in parts
        ]
    low, high = math.fsum(lows), math.fsum(highs)  # rounded once, as `compose` does: no sum of parts exceeds them
    reads = {field for spec in specs.values() for field in spec.reads}
    return reward_pb2.DescribeResponse(
        name=name,
        reads=sorted(reads | ({reward_pb2.SCORE_FIELD_METADATA} if routed else set())),
        reward=component_spec("", low if math.isfinite(low) else None, high if math.isfinite(high) else None),
        components=components,
        token_rewards=any(spec.token_rewards for part, spec in specs.items() if part not in shadows),
        whole_groups=any(spec.whole_groups for spec in specs.values()),
    )


def compose(
    item: reward_pb2.ScoreItem,
    outcomes: Mapping[str, Outcome],
    weights: Mapping[str, float],
    *,
    token_rewards: bool = False,
) -> reward_pb2.ScoreResult:
    """The item's result: the weighted sum in the order of `outcomes`, which are of the components that apply to it, or
    the error of those that failed, never a partial sum. The answer is that of the first component that reads one.
    token_rewards: the sum has them, zeros where no component that applies gives any.
    """
    if not outcomes:
        return error_result(
            item.id,
            NOT_APPLICABLE,
            "no component applies to the item's fields; widen a when of reward.components, or add one without",
            retryable=False,
        )
    failures = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Failure)}
    if failures:
        return _failed(item, failures)
    scores = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Score)}
    components: dict[str, float] = {}
    for name, score in scores.items():
        components[name] = score.value
        components.update({f"{name}/{inner}": value for inner, value in score.components.items()})
    reward = reward_pb2.Reward(
        value=math.fsum(_scaled(weights[name], score.value) for name, score in scores.items()), components=components
    )
    answers = [score.answer for score in scores.values() if score.answer is not None]
    if answers:
        reward.answer = answers[0]
    per_token = [
        np.float32(weights[name]) * score.token_rewards
        for name, score in scores.items()
        if score.token_rewards is not None
    ]
    if token_rewards and not per_token:
        per_token = [np.zeros(item.num_response_tokens, np.float32)]
    if per_token:
        reward.token_rewards.CopyFrom(encode_tensor(np.stack(per_token).sum(axis=0, dtype=np.float32)))
    return reward_pb2.ScoreResult(id=item.id, reward=reward)


def _failed(item: reward_pb2.ScoreItem, failures: Mapping[str, Failure]) -> reward_pb2.ScoreResult:
    """The first lasting failure is the one to tell: asking again helps only when every failure may pass."""
    name, failure = min(failures.items(), key=lambda pair: pair[1].retryable)
    others = f" (also failed: {', '.join(sorted(failures.keys() - {name}))})" if len(failures) > 1 else ""
    return error_result(item.id, failure.code, f"component {name!r}: {failure.message}{others}", failure.retryable)


def _scaled(weight: float, value: float) -> float:
    return weight * value if weight else 0.0  # 0 times an unbounded end is 0: the component is only reported


def _named(name: str, spec: reward_pb2.ComponentSpec, *, may_be_absent: bool) -> reward_pb2.ComponentSpec:
    named = reward_pb2.ComponentSpec()
    named.CopyFrom(spec)
    named.name, named.may_be_absent = name, may_be_absent
    return named
