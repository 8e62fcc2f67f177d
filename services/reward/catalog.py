"""The catalog of local scorers: from a component's configuration to what it is (`describe`) and to the function that
scores (`bind`).

`describe` is cheap and runs in the service; `bind` imports scorers, users' modules among them, and runs only in worker
processes.
"""

import asyncio
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

from rolecall.errors import ScorerError
from rolecall.plugins import is_async, load_function
from rolecall.sandbox import sandbox_of
from rolecall.scoring.awaited import call_async_batch_scorer, call_together
from rolecall.scoring.description import component_spec
from rolecall.scoring.items import groups_of
from rolecall.scoring.results import call_batch_scorer, call_scorer
from rolecall.scoring.scores import ALL_FIELDS, TEXT_FIELDS, Item, Score, ScoreFunction
from rolecall.settings import (
    AnswerScorer,
    ChoiceScorer,
    CodeScorer,
    FunctionScorer,
    InstructionScorer,
    JsonScorer,
    LengthScorer,
    NumberScorer,
    PatternScorer,
    PresetScorer,
)
from rolecall.v1 import reward_pb2
from services.reward.presets import bind_preset, bind_qa, comparing, truths
from services.reward.scorers.boxed import boxed_answer, boxed_match
from services.reward.scorers.code import CodeJudge, task_of
from services.reward.scorers.dapo_math import dapo_answer, dapo_match
from services.reward.scorers.exact_match import exact_match, whole_answer
from services.reward.scorers.format import matches_format
from services.reward.scorers.hendrycks_math import hendrycks_answer, hendrycks_match
from services.reward.scorers.json_ import is_json
from services.reward.scorers.length import length_cost
from services.reward.scorers.minerva_math import minerva_answer, minerva_match
from services.reward.scorers.regex import regex_answer, regex_match

LocalScorer: TypeAlias = (
    AnswerScorer | PatternScorer | JsonScorer | LengthScorer | FunctionScorer | PresetScorer | CodeScorer
)
"""Every scorer that runs in a worker process: all but the external one."""

ScoreMany: TypeAlias = Callable[[Sequence[reward_pb2.ScoreItem]], list[reward_pb2.ScoreResult]]

_READS = {
    "json": (reward_pb2.SCORE_FIELD_RESPONSE_TEXT,),
    "format": (reward_pb2.SCORE_FIELD_RESPONSE_TEXT,),
    "ifeval": (reward_pb2.SCORE_FIELD_RESPONSE_TEXT, reward_pb2.SCORE_FIELD_METADATA),
    "code": (reward_pb2.SCORE_FIELD_RESPONSE_TEXT, reward_pb2.SCORE_FIELD_METADATA),
}
_GIVEN = (reward_pb2.SCORE_FIELD_ENVIRONMENT_REWARD,)
_COMPARES = (reward_pb2.SCORE_FIELD_RESPONSE_TEXT, reward_pb2.SCORE_FIELD_GROUND_TRUTH)
"""Fields that every other kind reads."""


def describe(name: str, scorer: LocalScorer) -> reward_pb2.DescribeResponse:
    """Returns what the component `name` reads and returns."""
    if isinstance(scorer, FunctionScorer):
        components = [component_spec(part, None, None) for part in scorer.components]
        reward = component_spec("", scorer.min, scorer.max)
        return reward_pb2.DescribeResponse(
            name=name,
            reads=_GIVEN if scorer.kind == "environment" else ALL_FIELDS if scorer.images else TEXT_FIELDS,
            reward=reward,
            components=components,
            token_rewards=scorer.token_rewards,
            whole_groups=scorer.scope == "group",
        )
    if isinstance(scorer, LengthScorer):
        return reward_pb2.DescribeResponse(name=name, reward=component_spec("", -1.0, 0.0))
    reads = _READS.get(scorer.kind, _COMPARES)
    return reward_pb2.DescribeResponse(name=name, reads=reads, reward=component_spec("", 0.0, 1.0))


@dataclass(frozen=True)
class Bound:
    """A scorer that can score."""

    score: ScoreMany
    """Scores the items of one task (`parted`)."""
    is_awaited: bool = False
    """Whether it takes several items that are scored each by itself, for it awaits them at the same time."""


def bind_many(
    scorer: LocalScorer, spec: reward_pb2.DescribeResponse, timeout_s: float, runner: asyncio.Runner
) -> Bound:
    """Binds the function of `scorer`, checked against its description `spec`. A coroutine function is awaited by
    `runner`, and one of an item for `timeout_s`. ConfigError as `bind`.
    """
    if isinstance(scorer, FunctionScorer) and scorer.target is not None:
        mine, is_awaited = _function(scorer, scorer.target)
        if scorer.takes_many and is_awaited:
            return Bound(lambda items: runner.run(call_async_batch_scorer(mine, items, spec)))
        if scorer.takes_many:
            return Bound(lambda items: call_batch_scorer(mine, items, spec))
        if is_awaited:
            return Bound(lambda items: runner.run(call_together(mine, items, spec, timeout_s)), is_awaited=True)
    function = bind(scorer)
    return Bound(lambda items: [call_scorer(function, item, spec) for item in items])


def parted(scorer: LocalScorer, items: Sequence[reward_pb2.ScoreItem], *, is_awaited: bool) -> list[list[int]]:
    """Places of the items of each task: one item each, batches for a function of many or one that is awaited, whole
    groups for one that compares.
    """
    if not isinstance(scorer, FunctionScorer) or not (scorer.takes_many or is_awaited):
        return [[place] for place in range(len(items))]
    if scorer.scope == "group":
        return groups_of(items)
    places = list(range(len(items)))
    return [places[start : start + scorer.max_items] for start in range(0, len(places), scorer.max_items)]


def bind(scorer: LocalScorer) -> ScoreFunction:
    """The function of `scorer`, its imports done. ConfigError when a user's function is not there."""
    match scorer:
        case AnswerScorer(kind="exact_match"):
            ignore_case = scorer.ignore_case
            return comparing(
                partial(exact_match, ignore_case=ignore_case), partial(whole_answer, ignore_case=ignore_case)
            )
        case PatternScorer(kind="qa_exact_match" | "qa_f1"):
            return bind_qa(scorer)
        case PatternScorer(kind="regex"):
            pattern = re.compile(scorer.pattern or "")  # its settings want one
            return comparing(partial(regex_match, pattern=pattern), partial(regex_answer, pattern=pattern))
        case AnswerScorer(kind="boxed"):
            return comparing(boxed_match, boxed_answer)
        case AnswerScorer(kind="hendrycks_math"):
            return comparing(hendrycks_match, hendrycks_answer)
        case AnswerScorer(kind="minerva_math"):
            return comparing(minerva_match, minerva_answer)
        case AnswerScorer(kind="dapo_math"):
            return comparing(dapo_match, dapo_answer)
        case AnswerScorer():
            from services.reward.scorers.math import math_equal  # sympy: half a second, and only in the extra `reward`

            return lambda item: _math_score(math_equal(item.response_text, truth) for truth in truths(item))
        case JsonScorer():
            return lambda item: is_json(item.response_text, scorer.required_keys)
        case PatternScorer():
            whole = re.compile(scorer.pattern or "", re.DOTALL)
            return lambda item: matches_format(item.response_text, whole)
        case LengthScorer():
            return lambda item: length_cost(item.num_response_tokens, scorer.max_tokens)
        case FunctionScorer():
            return _given if scorer.target is None else _function(scorer, scorer.target)[0]
        case CodeScorer():
            judge = CodeJudge(scorer, sandbox_of(scorer))
            return lambda item: judge.score(*task_of(item, scorer))
        case NumberScorer() | ChoiceScorer() | InstructionScorer():
            return bind_preset(scorer)


def _function(scorer: FunctionScorer, target: str) -> tuple[Callable[..., Any], bool]:
    """The function at `target` with its options, and whether it is awaited."""
    function = load_function(
        target, "the scorer's target", first=scorer.takes, options=scorer.options, may_be_async=True
    )
    return partial(function, **scorer.options), is_async(function)


def _given(item: Item) -> Score:
    if item.environment_reward is None:
        raise ScorerError(f"item {item.id} has no reward of an environment; one that gives none needs other scorers")
    return item.environment_reward


def _math_score(found: Iterable[tuple[float, str | None]]) -> Score:
    """The best of a response beside each truth; none behind one that it equals is looked at."""
    last: tuple[float, str | None] = (0.0, None)
    for last in found:
        if last[0] == 1.0:
            break
    return Score(last[0], answer=last[1])
