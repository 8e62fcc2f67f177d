"""Rubrics of the shape that verifiers' have: what they are shown, and that what raised is no number. The package itself
is in tests/languages.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any, TypeAlias

import pytest

from rolecall.errors import BadGroundTruthError, RoleCallError
from rolecall.reward import Item, Message, Score, all_at_once, description
from rolecall.v1 import reward_pb2
from rolecall.verifiers import READS, AskedRubric

Asked: TypeAlias = Callable[[Any], AskedRubric]


class Rubric:
    """Sums its functions, and counts one that raises as 0, as verifiers do."""

    has_group_rewards = False

    def __init__(self, *funcs: Callable[..., Any]) -> None:
        self.funcs = list(funcs)

    async def score_group(self, states: list[Any]) -> None:
        for state in states:
            found = [await self._value(function, state) for function in self.funcs]
            state["metrics"] = dict(zip([function.__name__ for function in self.funcs], found, strict=True))
            state["reward"] = sum(found)

    async def _value(self, function: Callable[..., Any], state: Any) -> float:
        try:
            return float(await function(state))
        except Exception:
            return 0.0


class Comparing(Rubric):
    """Gives the longest response of a group 1."""

    has_group_rewards = True

    async def score_group(self, states: list[Any]) -> None:
        longest = max(len(state["completion"][-1]["content"]) for state in states)
        for state in states:
            state["reward"] = float(len(state["completion"][-1]["content"]) == longest)


class Together:
    """A group of rubrics, as verifiers' RubricGroup is one: its rewards are theirs, summed."""

    has_group_rewards = False

    def __init__(self, *rubrics: Rubric) -> None:
        self.rubrics = rubrics
        self.funcs: list[Callable[..., Any]] = []

    async def score_group(self, states: list[Any]) -> None:
        for state in states:
            sums, metrics = 0.0, dict[str, float]()
            for rubric in self.rubrics:
                await rubric.score_group([state])
                sums, metrics = sums + state["reward"], {**metrics, **state["metrics"]}
            state["reward"], state["metrics"] = sums, metrics


@pytest.fixture
def asked() -> Iterator[Asked]:
    """Makes scorers of rubrics, and closes them."""
    with ExitStack() as stack:
        yield lambda rubric: stack.enter_context(AskedRubric(rubric))


def right(state: Any) -> float:
    return float(state["completion"][-1]["content"] == state["answer"])


async def hinted(state: Any) -> float:
    await asyncio.sleep(0)
    return float(state["info"]["hint"] == state["hint"] == state["prompt"][0]["content"])


def broken(state: Any) -> float:
    raise KeyError(state["answer"])


def items(*responses: str) -> list[Item]:
    return [
        Item(str(i), text, ground_truth="4", messages=(Message("user", "2 + 2"),), metadata={"hint": "2 + 2"})
        for i, text in enumerate(responses)
    ]


def test_a_rubric_is_shown_a_rollout_and_its_functions_are_components(asked: Asked) -> None:
    scorer = asked(Rubric(right, hinted))
    assert dict(scorer.components) == {"right": (None, None), "hinted": (None, None)}
    assert not scorer.whole_groups
    assert scorer(items("4", "5")) == [
        Score(2.0, {"right": 1.0, "hinted": 1.0}),
        Score(1.0, {"right": 0.0, "hinted": 1.0}),
    ]


@pytest.mark.parametrize("rubric", [Rubric(right, broken), Together(Rubric(right), Rubric(broken))])
def test_a_function_that_raises_is_an_error_and_not_the_rubrics_zero(asked: Asked, rubric: Any) -> None:
    (found,) = asked(rubric)(items("4"))
    assert isinstance(found, RoleCallError)
    assert "KeyError" in found.message


async def test_an_error_is_its_items_alone_and_says_what_it_is(asked: Asked) -> None:
    def known(state: Any) -> float:
        if state["completion"][-1]["content"] == "?":
            raise BadGroundTruthError("nothing to compare with")
        return 1.0

    scorer = asked(Rubric(known))
    spec = description("it", (0, 1), READS, scorer.components, token_rewards=False, max_items=8)
    sent = [reward_pb2.ScoreItem(id=str(i), response_text=text) for i, text in enumerate("a?b")]
    results = await all_at_once(scorer, spec)(sent)
    assert [result.reward.value for result in results if result.HasField("reward")] == [1.0, 1.0]
    assert results[1].error.code == "BAD_GROUND_TRUTH"


def test_a_rubric_that_compares_is_given_the_group(asked: Asked) -> None:
    scorer = asked(Comparing())
    assert scorer.whole_groups
    assert [answer.value for answer in scorer(items("a", "abc", "ab")) if isinstance(answer, Score)] == [0.0, 1.0, 0.0]
