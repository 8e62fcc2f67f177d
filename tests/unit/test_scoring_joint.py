"""Groups that wait for a scorer go together where it is fast, and no group pays for another's failure."""

import asyncio
import heapq
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from itertools import cycle
from pathlib import Path

import pytest

from rolecall.scoring.joint import MAX_APART, MAX_ITEMS, JointCalls
from rolecall.scoring.scores import Failure, Outcome, Score
from rolecall.settings import FEW_CALLS
from rolecall.v1 import reward_pb2

NUM_ITEMS = 8
TIMEOUT_S = 60.0


def group(number: int) -> list[reward_pb2.ScoreItem]:
    return [reward_pb2.ScoreItem(id=f"{number}/{i}", group=str(number)) for i in range(NUM_ITEMS)]


class ScriptedScorer:
    """Answers each call after so many seconds of a clock of its own; groups in `poison` fail whole calls."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self.now = seconds, 0.0
        self.poison: dict[str, Failure] = {}
        self.calls: list[list[str]] = []

    async def call(self, items: Sequence[reward_pb2.ScoreItem]) -> list[Outcome]:
        groups = list(dict.fromkeys(item.group for item in items))
        self.calls.append(groups)
        await asyncio.sleep(0)
        self.now += self.seconds * len(items)
        failure = next((self.poison[name] for name in groups if name in self.poison), None)
        return [Score(float(item.group)) if failure is None else failure for item in items]

    def joint(self, num_calls: int = 1) -> JointCalls:
        return JointCalls(self.call, num_calls, TIMEOUT_S, lambda: self.now)


async def scored(joint: JointCalls, numbers: Sequence[int]) -> list[list[Outcome]]:
    return list(await asyncio.gather(*(joint.score(group(number)) for number in numbers)))


async def test_what_waits_for_a_fast_scorer_goes_together_and_each_group_gets_its_own() -> None:
    scorer = ScriptedScorer(0.0001)
    outcomes = await scored(scorer.joint(), range(6))
    assert scorer.calls == [["0"], ["1", "2", "3", "4", "5"]], "the first call says that the scorer is fast"
    assert outcomes == [[Score(float(number))] * NUM_ITEMS for number in range(6)]


async def test_a_scorer_that_takes_its_time_is_called_group_by_group() -> None:
    scorer = ScriptedScorer(0.1)
    await scored(scorer.joint(), range(4))
    assert scorer.calls == [["0"], ["1"], ["2"], ["3"]]


async def test_a_joint_call_holds_no_more_than_its_bound() -> None:
    scorer = ScriptedScorer(1e-9)
    await scored(scorer.joint(), range(50))
    assert [len(call) for call in scorer.calls] == [1, MAX_ITEMS // NUM_ITEMS, 49 - MAX_ITEMS // NUM_ITEMS]


@pytest.mark.parametrize(
    "failure", [Failure("BAD", "bad data"), Failure("INTERNAL", "a flaw", retryable=True, is_blamed=True)]
)
async def test_a_group_that_fails_whole_calls_fails_alone(failure: Failure) -> None:
    scorer = ScriptedScorer(0.0001)
    scorer.poison["3"] = failure
    outcomes = await scored(scorer.joint(), range(6))
    expected: list[list[Outcome]] = [[Score(float(number))] * NUM_ITEMS for number in range(6)]
    expected[3] = [failure] * NUM_ITEMS
    assert outcomes == expected
    assert sorted(scorer.calls[2:]) == [["1"], ["2"], ["3"], ["4"], ["5"]]


async def test_a_scorer_that_is_away_is_not_asked_again_for_each_group() -> None:
    scorer = ScriptedScorer(0.0001)
    away = Failure("UNAVAILABLE", "it is away", retryable=True)
    scorer.poison["1"] = away
    joint = scorer.joint()
    outcomes = await scored(joint, range(4))
    assert outcomes[1:] == [[away] * NUM_ITEMS] * 3, "whoever retries asks again"
    assert len(scorer.calls) == 2
    await scored(joint, [7, 8, 9])
    assert scorer.calls[2:] == [["7"], ["8", "9"]], "and then one group first"


async def test_a_group_whose_call_failed_holds_up_nobody_when_it_is_asked_again() -> None:
    scorer = ScriptedScorer(0.0001)
    scorer.poison["3"] = Failure("DEADLINE", "its call was held to the end", retryable=True)
    joint = scorer.joint()
    await scored(joint, range(4))
    assert scorer.calls.pop() == ["1", "2", "3"]
    await scored(joint, [7])  # the scorer is as fast as before
    scorer.calls.clear()
    outcomes = await scored(joint, [8, 3, 1, 9, 10])
    assert scorer.calls == [["8"], ["3"], ["1"], ["9", "10"]], "nor do those that failed with it"
    assert [isinstance(of_group[0], Score) for of_group in outcomes] == [True, False, True, True, True]
    scorer.poison.clear()
    await scored(joint, [3])
    scorer.calls.clear()
    await scored(joint, [8, 3, 1, 9])
    assert scorer.calls == [["8"], ["3", "1", "9"]], "once it has its scores, it is a group like the others"


async def test_only_so_many_groups_are_remembered_for_their_failures() -> None:
    scorer = ScriptedScorer(0.0001)
    names = [str(number) for number in range(MAX_APART + 1)]
    scorer.poison = dict.fromkeys(names, Failure("UNAVAILABLE", "it is away", retryable=True))
    joint = scorer.joint()
    for number in range(MAX_APART + 1):
        await joint.score(group(number))
    scorer.poison.clear()
    await scored(joint, [-1])
    scorer.calls.clear()
    await scored(joint, [-1, 0, -2, 1, -3])
    assert scorer.calls == [["-1"], ["0", "-2"], ["1"], ["-3"]], "the first is forgotten, the others are not"


class TimedScorer:
    """Works on `at_once` calls at a time, in the order in which they came, on each for `seconds` of a clock of its
    own: of a joint call on each of its groups, the next of them in turn.
    """

    def __init__(self, at_once: int, *seconds: float) -> None:
        self.now, self.is_away = 0.0, False
        self._seconds = cycle(seconds)
        self.num_running = self.most_running = self.num_calls = 0
        self.longest_s = 0.0
        self._free_at = [0.0] * at_once
        self._ends: list[tuple[float, int, asyncio.Future[None]]] = []

    async def call(self, items: Sequence[reward_pb2.ScoreItem]) -> list[Outcome]:
        self.num_calls += 1
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        began, ends = self.now, max(self.now, self._free_at[0]) + self._work(items)
        heapq.heapreplace(self._free_at, ends)
        future = asyncio.get_running_loop().create_future()
        heapq.heappush(self._ends, (ends, self.num_calls, future))
        await future
        self.num_running -= 1
        self.longest_s = max(self.longest_s, self.now - began)
        return [Failure("DEADLINE", "late", retryable=True) if self.is_away else Score(1.0)] * len(items)

    def _work(self, items: Sequence[reward_pb2.ScoreItem]) -> float:
        return sum(next(self._seconds) for _ in {item.group for item in items})

    async def score(self, joint: JointCalls, num_groups: int) -> None:
        """Scores so many groups that are there at the same time."""
        tasks = [asyncio.create_task(joint.score(group(number))) for number in range(num_groups)]
        while not all(task.done() for task in tasks):
            for _ in range(10):
                await asyncio.sleep(0)
            if self._ends:
                self.now, _, future = heapq.heappop(self._ends)
                future.set_result(None)


async def test_a_scorer_that_waits_for_others_is_given_as_many_calls_as_may_be() -> None:
    scorer = TimedScorer(100, 20.0)
    await scorer.score(JointCalls(scorer.call, 32, TIMEOUT_S, lambda: scorer.now), 600)
    assert scorer.most_running == 32
    assert scorer.now < 0.55 * 20.0 * 600 / 8, "with 8 it takes twice the time"


@pytest.mark.parametrize(
    ("at_once", "seconds"),
    [
        *[(1, [1.0]), (1, [5.0]), (2, [4.0]), (4, [8.0]), (10, [6.0])],
        *[(8, [31.0]), (8, [40.0]), (16, [35.0]), (16, [20.0])],
        (2, [0.01, 0.01, 12.0, 0.01, 0.01]),
    ],
)
async def test_a_scorer_that_answers_so_many_at_a_time_is_given_no_call_that_would_be_late(
    at_once: int, seconds: list[float]
) -> None:
    scorer = TimedScorer(at_once, *seconds)
    await scorer.score(JointCalls(scorer.call, 32, TIMEOUT_S, lambda: scorer.now), 300)
    assert scorer.longest_s < TIMEOUT_S
    assert scorer.most_running >= FEW_CALLS


async def test_a_scorer_that_gives_no_scores_is_given_few_calls_again() -> None:
    scorer = TimedScorer(100, 20.0)
    joint = JointCalls(scorer.call, 32, TIMEOUT_S, lambda: scorer.now)
    await scorer.score(joint, 100)
    scorer.is_away = True
    await scorer.score(joint, 40)
    scorer.is_away, scorer.most_running = False, 0
    await scorer.score(joint, 8 + 1)
    assert scorer.most_running == FEW_CALLS


async def test_a_fast_scorer_is_given_few_calls_however_many_wait() -> None:
    scorer = TimedScorer(100, 0.01)
    await scorer.score(JointCalls(scorer.call, 32, TIMEOUT_S, lambda: scorer.now), 300)
    assert scorer.most_running == FEW_CALLS
    assert scorer.num_calls < 100, "they went together"


async def test_who_has_left_is_not_sent_and_the_others_are() -> None:
    scorer = ScriptedScorer(0.0001)
    joint = scorer.joint()
    waiting = [asyncio.create_task(joint.score(group(number))) for number in range(4)]
    await asyncio.sleep(0)
    waiting[2].cancel()
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(outcomes[2], asyncio.CancelledError)
    assert [outcome for number, outcome in enumerate(outcomes) if number != 2] == [
        [Score(float(number))] * NUM_ITEMS for number in (0, 1, 3)
    ]
    assert scorer.calls == [["0"], ["1", "3"]]


async def test_a_call_that_everybody_has_left_ends_and_its_place_is_free() -> None:
    has_begun, ended = asyncio.Event(), list[str]()

    async def call(items: Sequence[reward_pb2.ScoreItem]) -> list[Outcome]:
        try:
            has_begun.set()
            if items[0].group != "9":
                await asyncio.Event().wait()
            return [Score(1.0)] * len(items)
        finally:
            ended.append(items[0].group)

    joint = JointCalls(call, 1, TIMEOUT_S)
    left = [asyncio.create_task(joint.score(group(number))) for number in range(2)]
    await has_begun.wait()
    for task in left:
        task.cancel()
    async with asyncio.timeout(5):
        assert await joint.score(group(9)) == [Score(1.0)] * NUM_ITEMS
    assert ended == ["0", "9"]


@pytest.mark.parametrize("error", [RuntimeError("unforeseen"), asyncio.CancelledError()])
async def test_an_unforeseen_end_of_a_call_reaches_everybody_who_waits_for_it(error: BaseException) -> None:
    async def call(items: Sequence[reward_pb2.ScoreItem]) -> list[Outcome]:
        raise error

    joint = JointCalls(call, 1, TIMEOUT_S)
    async with asyncio.timeout(5):
        outcomes = await asyncio.gather(joint.score(group(0)), joint.score(group(1)), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [type(error)] * 2


TRACED = """
import asyncio, json
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from rolecall.telemetry import tracer
from tests.unit.test_scoring_joint import ScriptedScorer, group

exporter, provider = InMemorySpanExporter(), TracerProvider()
provider.add_span_processor(SimpleSpanProcessor(exporter))
trace.set_tracer_provider(provider)

async def traced(joint, number):
    with tracer().start_as_current_span(f"group {number}"):
        await joint.score(group(number))

async def main():
    joint = ScriptedScorer(0.0001).joint()
    await asyncio.gather(*(traced(joint, number) for number in range(4)))

asyncio.run(main())
names = {span.context.span_id: span.name for span in exporter.get_finished_spans()}
print(json.dumps({
    span.name: [span.parent and names[span.parent.span_id], *sorted(names[link.context.span_id] for link in span.links)]
    for span in exporter.get_finished_spans()
}))
"""


def test_a_joint_call_is_found_from_the_trace_of_every_group_in_it() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    # a process of its own: a process has one provider of traces, for good
    done = subprocess.run(
        [sys.executable, "-c", TRACED], env=environment, capture_output=True, text=True, timeout=60, check=True
    )
    assert json.loads(done.stdout) == {
        "group 0": [None],  # was sent at once, alone
        "group 1": [None, "score together"],
        "group 2": [None, "score together"],
        "group 3": [None, "score together"],
        "score together": ["group 1", "group 1", "group 2", "group 3"],
    }


async def test_groups_with_images_go_together_as_far_as_one_request_holds_them() -> None:
    scorer = ScriptedScorer(1e-6)
    joint = scorer.joint()
    await scored(joint, [0])
    scorer.calls.clear()
    heavy = [group(number) for number in range(1, 8)]
    for items in heavy:
        items[0].images.append(bytes(2**20))
    await asyncio.gather(*(joint.score(items) for items in heavy))
    assert [len(call) for call in scorer.calls] == [1, 2, 2, 2]
