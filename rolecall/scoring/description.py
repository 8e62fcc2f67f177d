"""A scorer's description of itself: whether it is usable, what it leaves open, whether a reward is believable under it,
and whether a later one means the same.

The checks of rewards are used by whoever produces a score and, again, by whoever receives it.
"""

import math

import numpy as np

from rolecall.errors import InvalidInputError
from rolecall.scoring.scores import ALL_FIELDS
from rolecall.v1 import reward_pb2
from rolecall.wire import decode_tensor

_GREATEST = float(np.finfo(np.float32).max)
"""Rewards are kept as float32."""


def component_spec(name: str, low: float | None, high: float | None) -> reward_pb2.ComponentSpec:
    """Returns the description of a component by its range; None is unbounded."""
    return reward_pb2.ComponentSpec(name=name, min=low, max=high)


def problem_of(reward: reward_pb2.Reward, spec: reward_pb2.DescribeResponse, num_response_tokens: int) -> str | None:
    """Returns what makes `reward` unbelievable under `spec`, as the end of a sentence; None when nothing does."""
    return (
        value_problem(reward, spec)
        or components_problem(reward, spec)
        or token_rewards_problem(reward, spec, num_response_tokens)
    )


def value_problem(reward: reward_pb2.Reward, spec: reward_pb2.DescribeResponse) -> str | None:
    """Returns what is wrong with the value of a reward, as the end of a sentence; None when nothing is."""
    return _outside("reward", reward.value, spec.reward)


def components_problem(reward: reward_pb2.Reward, spec: reward_pb2.DescribeResponse) -> str | None:
    """Returns what is wrong with the components of a reward, as the end of a sentence; None when nothing is."""
    declared = {component.name: component for component in spec.components}
    required = {component.name for component in spec.components if not component.may_be_absent}
    if not required <= set(reward.components) <= set(declared):
        return f"returned the components {sorted(reward.components)}, it declares {sorted(declared)}"
    problems = (_outside(f"component {name!r}", value, declared[name]) for name, value in reward.components.items())
    return next((problem for problem in problems if problem), None)


def token_rewards_problem(
    reward: reward_pb2.Reward, spec: reward_pb2.DescribeResponse, num_response_tokens: int
) -> str | None:
    """Returns what is wrong with the token rewards of a reward, as the end of a sentence; None when nothing is."""
    if reward.HasField("token_rewards") != spec.token_rewards:
        return (
            "returned token_rewards it does not declare"
            if reward.HasField("token_rewards")
            else "declares token_rewards and returned none"
        )
    if not spec.token_rewards:
        return None
    try:
        rewards = decode_tensor(reward.token_rewards, "token_rewards")
    except InvalidInputError as error:
        return f"returned unreadable token_rewards ({error.message})"
    if rewards.dtype != np.float32 or rewards.shape != (num_response_tokens,):
        return (
            f"returned token_rewards of {rewards.dtype} {list(rewards.shape)}, they must be float32 "
            f"[{num_response_tokens}]"
        )
    return None if np.isfinite(rewards).all() else "returned token_rewards that are not all finite"


def spec_gaps(spec: reward_pb2.DescribeResponse) -> list[str]:
    """Returns what a scorer's description leaves open, as ends of a sentence: believed, and perhaps not meant so."""
    gaps = []
    if not spec.reads:
        gaps.append("names no fields that it reads: it is sent ids, finish reasons and lengths, and no response")
    if not spec.reward.HasField("min") and not spec.reward.HasField("max"):
        gaps.append("names no range of its reward: any finite number is believed")
    return gaps


def spec_problem(spec: reward_pb2.DescribeResponse) -> str | None:
    """Returns what makes a scorer's own description unusable; None when nothing does."""
    unknown = sorted(set(spec.reads) - set(ALL_FIELDS))
    if unknown:
        return (
            f"reads the fields {unknown}, which this release does not know; name some of its ScoreField, such as "
            "SCORE_FIELD_RESPONSE_TEXT (2)"
        )
    names = [component.name for component in spec.components]
    if len(set(names)) != len(names) or "" in names:
        return f"declares the components {names}; names must be unique and not empty"
    for component in [spec.reward, *spec.components]:
        low, high = bounds_of(component)
        if not low <= high:
            return f"declares the range [{low}, {high}] for {component.name or 'reward'!r}; min must not exceed max"
    return None if spec.max_items >= 0 else f"declares max_items {spec.max_items}; it must not be negative"


def change_of(old: reward_pb2.DescribeResponse, new: reward_pb2.DescribeResponse) -> str | None:
    """Returns what two descriptions disagree on, of that which gives a number its meaning; None when they agree.
    Components that may be absent may come and go.
    """
    if old.whole_groups != new.whole_groups:
        return f"whole_groups from {old.whole_groups} to {new.whole_groups}"
    if old.token_rewards != new.token_rewards:
        return f"token_rewards from {old.token_rewards} to {new.token_rewards}"
    before, after = (
        {"reward": spec.reward} | {f"component {part.name!r}": part for part in spec.components} for spec in (old, new)
    )
    required, still_required = (
        {part.name for part in spec.components if not part.may_be_absent} for spec in (old, new)
    )
    if required != still_required:
        return (
            f"its components from {sorted(part.name for part in old.components)} to "
            f"{sorted(part.name for part in new.components)}"
        )
    in_both = [what for what in before if what in after]
    changed = next((what for what in in_both if bounds_of(before[what]) != bounds_of(after[what])), None)
    return changed and f"the range of its {changed} from {bounds_of(before[changed])} to {bounds_of(after[changed])}"


def bounds_of(spec: reward_pb2.ComponentSpec) -> tuple[float, float]:
    """The declared range, infinite where it has no end."""
    return spec.min if spec.HasField("min") else -math.inf, spec.max if spec.HasField("max") else math.inf


def _outside(what: str, value: float, spec: reward_pb2.ComponentSpec) -> str | None:
    if not abs(value) <= _GREATEST:
        return (
            f"returned the {what} {value}, which is not "
            f"{'finite' if not math.isfinite(value) else 'a float32: it would be trained on as infinity'}"
        )
    low, high = bounds_of(spec)
    if not low <= value <= high:
        return (
            f"returned the {what} {value}, outside its declared range [{low}, {high}]; correct it, or the range "
            "(scorer.min and scorer.max of a function, range of what is served)"
        )
    return None
