"""The catalog of local scorers: from a component's configuration to what it is (`describe`) and to the function that
scores (`bind`).

`describe` is cheap and runs in the service; `bind` imports scorers, users' modules among them, and runs only in worker
processes.
"""

import re
from typing import TypeAlias

from rolecall.errors import BadGroundTruthError
from rolecall.plugins import load_function
from rolecall.scoring.scores import ALL_FIELDS, Item, Score, ScoreFunction, component_spec
from rolecall.settings import (
    AnswerScorer,
    FunctionScorer,
    JsonScorer,
    LengthScorer,
    PatternScorer,
)
from rolecall.v1 import reward_pb2
from services.reward.scorers.boxed import boxed_answer, boxed_match
from services.reward.scorers.exact_match import exact_match, whole_answer
from services.reward.scorers.format import matches_format
from services.reward.scorers.json_ import is_json
from services.reward.scorers.length import length_cost
from services.reward.scorers.regex import regex_answer, regex_match

LocalScorer: TypeAlias = AnswerScorer | PatternScorer | JsonScorer | LengthScorer | FunctionScorer
"""Every scorer that runs in a worker process: all but the external one."""

COMPARES = (reward_pb2.SCORE_FIELD_RESPONSE_TEXT, reward_pb2.SCORE_FIELD_GROUND_TRUTH)


def describe(name: str, scorer: LocalScorer) -> reward_pb2.DescribeResponse:
    """Returns what the component `name` reads and returns."""
    if isinstance(scorer, FunctionScorer):
        components = [component_spec(part, None, None) for part in scorer.components]
        reward = component_spec("", scorer.min, scorer.max)
        return reward_pb2.DescribeResponse(
            name=name, reads=ALL_FIELDS, reward=reward, components=components, token_rewards=scorer.token_rewards
        )
    if isinstance(scorer, LengthScorer):
        return reward_pb2.DescribeResponse(name=name, reward=component_spec("", -1.0, 0.0))
    reads = (reward_pb2.SCORE_FIELD_RESPONSE_TEXT,) if scorer.kind in ("json", "format") else COMPARES
    return reward_pb2.DescribeResponse(name=name, reads=reads, reward=component_spec("", 0.0, 1.0))


def bind(scorer: LocalScorer) -> ScoreFunction:
    """The function of `scorer`, its imports done. ConfigError when a user's function is not there."""
    match scorer:
        case AnswerScorer(kind="exact_match"):
            ignore_case = scorer.ignore_case
            return lambda item: Score(
                exact_match(item.response_text, _truth(item), ignore_case=ignore_case),
                answer=whole_answer(item.response_text, ignore_case=ignore_case),
            )
        case PatternScorer(kind="regex"):
            pattern = re.compile(scorer.pattern)
            return lambda item: Score(
                regex_match(item.response_text, _truth(item), pattern), answer=regex_answer(item.response_text, pattern)
            )
        case AnswerScorer(kind="boxed"):
            return lambda item: Score(
                boxed_match(item.response_text, _truth(item)), answer=boxed_answer(item.response_text)
            )
        case AnswerScorer():
            from services.reward.scorers.math import math_equal  # sympy: half a second, and only in the extra `reward`

            return lambda item: _math_score(*math_equal(item.response_text, _truth(item)))
        case JsonScorer():
            return lambda item: is_json(item.response_text, scorer.required_keys)
        case PatternScorer():
            whole = re.compile(scorer.pattern, re.DOTALL)
            return lambda item: matches_format(item.response_text, whole)
        case LengthScorer():
            return lambda item: length_cost(item.num_response_tokens, scorer.max_tokens)
        case FunctionScorer():
            return load_function(scorer.target, "the scorer's target")


def _math_score(value: float, answer: str | None) -> Score:
    return Score(value, answer=answer)


def _truth(item: Item) -> str:
    if not item.ground_truth:
        raise BadGroundTruthError(
            f"item {item.id} has no ground truth to compare with; give every prompt one, or use a scorer that needs "
            "none"
        )
    return item.ground_truth
