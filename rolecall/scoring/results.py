"""The results of a scorer's function on items: whatever it returns or raises becomes one, checked against the scorer's
description. awaited.py has those of coroutine functions.
"""

import logging
from collections.abc import Sequence, ValuesView
from numbers import Real
from typing import Any

import numpy as np

from rolecall.errors import RoleCallError, ScorerError
from rolecall.scoring.description import problem_of
from rolecall.scoring.scores import (
    MAX_CODE_CHARS,
    MAX_MESSAGE_CHARS,
    BatchFunction,
    Item,
    Score,
    ScoreFunction,
    printable,
)
from rolecall.v1 import reward_pb2
from rolecall.wire import encode_tensor

logger = logging.getLogger(__name__)


def call_scorer(
    function: ScoreFunction, item: reward_pb2.ScoreItem, spec: reward_pb2.DescribeResponse
) -> reward_pb2.ScoreResult:
    """Calls `function` on `item` and checks what it returns against `spec`; whatever goes wrong becomes a
    ScoreError.
    """
    try:
        return result_of(item, function(Item.from_proto(item)), spec)
    except Exception as error:  # the entry point of code that is not ours
        return failure_of(item, error)


def call_batch_scorer(
    function: BatchFunction, items: Sequence[reward_pb2.ScoreItem], spec: reward_pb2.DescribeResponse
) -> list[reward_pb2.ScoreResult]:
    """Calls `function` on `items` at once and checks each answer against `spec`; what goes wrong becomes a ScoreError,
    of one item or of all.
    """
    try:
        answers: Any = function([Item.from_proto(item) for item in items])
        if not _is_row(answers) or len(answers) != len(items):
            found = f"{len(answers)} answers" if _is_row(answers) else f"a {type(answers).__name__}"
            raise ScorerError(
                f"the scorer {spec.name!r} returned {found} to {len(items)} items; return one per item, in order"
            )
    except Exception as error:  # the entry point of code that is not ours
        return [failure_of(item, error) for item in items]
    return [_checked(item, answer, spec) for item, answer in zip(items, answers, strict=True)]


def _is_row(answers: Any) -> bool:
    """Whether what a function of many returned has an order that it meant: a dict has keys, a set its hashes'."""
    if isinstance(answers, Sequence | ValuesView):
        return not isinstance(answers, str | bytes)
    return np.ndim(answers) == 1


def _checked(item: reward_pb2.ScoreItem, answer: object, spec: reward_pb2.DescribeResponse) -> reward_pb2.ScoreResult:
    if isinstance(answer, RoleCallError):
        return failure_of(item, answer)
    try:
        return result_of(item, answer, spec)
    except Exception as error:  # the answer of code that is not ours, in which anything may stand
        return failure_of(item, error)


def result_of(item: reward_pb2.ScoreItem, answer: object, spec: reward_pb2.DescribeResponse) -> reward_pb2.ScoreResult:
    """The result that a scorer's return value stands for. ScorerError when it is not a believable score under
    `spec`.
    """
    score = answer if isinstance(answer, Score) else Score(_number(answer))
    reward = reward_pb2.Reward(
        value=_number(score.value), components={name: _number(part) for name, part in score.components.items()}
    )
    if score.token_rewards is not None:
        reward.token_rewards.CopyFrom(encode_tensor(np.asarray(score.token_rewards, np.float32)))
    if score.answer is not None:
        if not isinstance(score.answer, str):
            raise ScorerError(
                f"the scorer {spec.name!r} returned an answer that is {type(score.answer).__name__}; it must be a "
                "str, or None"
            )
        reward.answer = score.answer
    problem = problem_of(reward, spec, item.num_response_tokens)
    if problem:
        raise ScorerError(f"the scorer {spec.name!r} {problem}")
    return reward_pb2.ScoreResult(id=item.id, reward=reward)


def failure_of(item: reward_pb2.ScoreItem, error: Exception) -> reward_pb2.ScoreResult:
    """The ScoreError that an exception stands for; one that is not a RoleCallError is logged with its traceback."""
    if isinstance(error, RoleCallError):
        return error_result(item.id, error.reason, error.message, error.retryable)
    logger.warning("scorer raised on item %s", item.id, exc_info=error)
    return error_result(item.id, "SCORER_EXCEPTION", f"{type(error).__name__}: {error}", False)


def error_result(item_id: str, code: str, message: str, retryable: bool) -> reward_pb2.ScoreResult:
    """Returns a result that is an error in place of a score."""
    error = reward_pb2.ScoreError(
        code=printable(code, MAX_CODE_CHARS), message=printable(message, MAX_MESSAGE_CHARS), retryable=retryable
    )
    return reward_pb2.ScoreResult(id=item_id, error=error)


def _number(value: object) -> float:
    if not isinstance(value, Real | np.bool_):
        raise ScorerError(f"the scorer returned {type(value).__name__}; return a number or a rolecall.reward.Score")
    return float(value)
