"""Answers of a scorer of many: each is checked by itself, and only what has an order is taken for them."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from rolecall.scoring.description import component_spec
from rolecall.scoring.results import call_batch_scorer
from rolecall.scoring.scores import Item, Score
from rolecall.v1 import reward_pb2

SPEC = reward_pb2.DescribeResponse(name="f", reward=component_spec("", 0, 1))
ITEMS = [reward_pb2.ScoreItem(id=str(i), num_response_tokens=2) for i in range(3)]


def answered(answers: Any) -> list[reward_pb2.ScoreResult]:
    """The results of a function that returns `answers`."""
    function: Callable[[Sequence[Item]], Any] = lambda items: answers  # noqa: E731
    return call_batch_scorer(function, ITEMS, SPEC)


@pytest.mark.parametrize(
    "odd",
    [
        Score(1.0, answer="\ud83d"),
        Score(1.0, token_rewards=[[0.0], [0.0, 1.0]]),  # type: ignore[arg-type]
        Score(1.0, components=None),  # type: ignore[arg-type]
        10**400,
    ],
    ids=["half a surrogate pair", "ragged token rewards", "no components", "beyond a float"],
)
def test_an_answer_that_is_no_score_is_an_error_of_its_item_alone(odd: object) -> None:
    results = answered([1.0, odd, 0.5])
    assert [result.WhichOneof("outcome") for result in results] == ["reward", "error", "reward"]
    assert results[1].error.code == "SCORER_EXCEPTION"
    assert not results[1].error.retryable


@pytest.mark.parametrize(
    ("answers", "found"),
    [
        ({1: 0.25, 0: 0.5, 2: 1.0}, "a dict"),
        ({0.25, 0.5, 1.0}, "a set"),
        ("101", "a str"),
        ((0.5 for _ in ITEMS), "a generator"),
        (None, "a NoneType"),
        (np.zeros((3, 1)), "a ndarray"),
        ([0.5], "1 answers"),
    ],
)
def test_what_holds_no_answer_per_item_in_order_is_refused(answers: object, found: str) -> None:
    results = answered(answers)
    assert {result.error.message for result in results} == {
        f"the scorer 'f' returned {found} to 3 items; return one per item, in order"
    }


@pytest.mark.parametrize("answers", [[0.25, 0.5, 1.0], (0.25, 0.5, 1.0), np.array([0.25, 0.5, 1.0], np.float32)])
def test_a_list_a_tuple_and_an_array_are_answers(answers: object) -> None:
    assert [result.reward.value for result in answered(answers)] == [0.25, 0.5, 1.0]
