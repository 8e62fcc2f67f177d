"""How the responses to a held-out set reach the scorer: how many at a time, what is asked again, what is given up."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

from rolecall.data.images.files import ImageFile
from rolecall.scoring.joint import JointCalls
from rolecall.scoring.scores import Failure, Outcome, Score
from rolecall.settings import FEW_CALLS, ControllerSection, RunSettings
from rolecall.v1 import reward_pb2, rollout_pb2, trajectory_pb2
from services.controller.evaluation import scoring
from services.controller.evaluation.responses import Response
from services.controller.evaluation.scoring import SCORE_CHUNK, TRIES, CallSize, HeldOutScorer
from tests.waiting import until

TIMEOUT_S = 0.2
LATE = Failure("DEADLINE", "late", retryable=True)
AWAY = Failure("UNAVAILABLE", "it restarts", retryable=True)


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scoring, "PAUSE_S", 0.01)
    monkeypatch.setattr(scoring, "APART_S", 0.0)


class Scorer:
    """Scores each response by the place of its prompt, after it was let."""

    def __init__(self, max_items: int = 0, *reads: "reward_pb2.ScoreField.ValueType") -> None:
        self.described = reward_pb2.DescribeResponse(max_items=max_items, reads=reads)
        self.calls: list[list[str]] = []
        """Prompts of each call."""
        self.num_bytes: list[int] = []
        """Bytes of the images under way when each began."""
        self.num_running = self.most_running = 0
        self._bytes_running = 0

    async def describe(self) -> reward_pb2.DescribeResponse:
        """RewardClient.describe."""
        return self.described

    async def score(self, items: Sequence[reward_pb2.ScoreItem]) -> list[Outcome]:
        """RewardClient.score."""
        shown = sum(len(image) for item in items for image in item.images)
        prompts = [item.group.rpartition("/")[2] for item in items]
        self.calls.append(list(dict.fromkeys(prompts)))
        self.num_running, self._bytes_running = self.num_running + 1, self._bytes_running + shown
        self.most_running = max(self.most_running, self.num_running)
        self.num_bytes.append(self._bytes_running)
        try:
            failure = await self.failure(self.calls[-1])
        finally:
            self.num_running, self._bytes_running = self.num_running - 1, self._bytes_running - shown
        return [Score(float(prompt)) if failure is None else failure for prompt in prompts]

    async def failure(self, prompts: Sequence[str]) -> Failure | None:
        """What a call ends with; None: all is scored."""
        return None


def responses(num_prompts: int, num_responses: int = 1, images: tuple[ImageFile, ...] = ()) -> list[Response]:
    found = []
    for place in range(num_prompts):
        prompt = trajectory_pb2.Prompt(uid=str(place), token_ids=np.ones(2, "<i4").tobytes())
        for index in range(num_responses):
            meta = trajectory_pb2.TrajectoryMeta(id=f"eval/4/held/{place}/{index}", prompt=prompt, num_prompt_tokens=2)
            answer = rollout_pb2.GenerateResponse(meta=meta, response_token_ids=np.ones(3, "<i4").tobytes())
            found.append(Response(prompt, answer, images))
    return found


def held_out(make_settings: Callable[..., RunSettings], scorer: Any, **sections: Any) -> HeldOutScorer:
    return HeldOutScorer(make_settings(reward={"address": "scorer:1", "timeout_s": TIMEOUT_S}, **sections), scorer)


async def test_calls_go_out_several_at_a_time_and_scores_come_back_in_the_order_of_the_prompts(
    make_settings: Callable[..., RunSettings],
) -> None:
    class Overtaking(Scorer):
        async def failure(self, prompts: Sequence[str]) -> None:
            await asyncio.sleep(0.1 if "0" in prompts else 0.05)

    scorer = Overtaking()
    scores = await held_out(make_settings, scorer).score(responses(3 * SCORE_CHUNK, 2), asyncio.sleep)
    assert scorer.most_running == FEW_CALLS
    assert [len(prompts) for prompts in scorer.calls[:FEW_CALLS]] == [SCORE_CHUNK // FEW_CALLS // 2] * FEW_CALLS
    assert list(scores) == [f"eval/4/held/{i}/{j}" for i in range(3 * SCORE_CHUNK) for j in range(2)]
    assert [score.value for score in scores.values()] == [float(i) for i in range(3 * SCORE_CHUNK) for _ in range(2)]


async def test_a_small_set_is_shared_among_the_calls_and_no_call_has_more_than_a_request(
    make_settings: Callable[..., RunSettings],
) -> None:
    small, narrow = Scorer(), Scorer(4)
    await held_out(make_settings, small).score(responses(20), asyncio.sleep)
    assert [len(prompts) for prompts in small.calls] == [3] * 6 + [2]
    await held_out(make_settings, narrow).score(responses(100), asyncio.sleep)
    assert {len(prompts) for prompts in narrow.calls} == {4}


async def test_a_scorer_that_answers_long_before_its_deadline_gets_larger_calls_and_the_next_set_begins_with_them(
    make_settings: Callable[..., RunSettings],
) -> None:
    scorer, most = Scorer(), SCORE_CHUNK
    whole = held_out(make_settings, scorer)
    assert len(await whole.score(responses(20 * most), asyncio.sleep)) == 20 * most
    assert max(len(prompts) for prompts in scorer.calls) == most
    scorer.calls.clear()
    await whole.score(responses(20 * most), asyncio.sleep)
    assert [len(prompts) for prompts in scorer.calls] == [most] * 20


async def test_a_scorer_that_is_late_gets_smaller_calls_and_is_late_for_no_more_than_a_few(
    make_settings: Callable[..., RunSettings],
) -> None:
    class Slow(Scorer):
        async def failure(self, prompts: Sequence[str]) -> Failure | None:
            await asyncio.sleep(min(len(prompts) * TIMEOUT_S / 10, TIMEOUT_S))
            return None if len(prompts) < 10 else LATE

    scorer = Slow()
    scores = await held_out(make_settings, scorer).score(responses(640), asyncio.sleep)
    assert len(scores) == 640
    late = [len(prompts) for prompts in scorer.calls if len(prompts) >= 10]
    assert late[:FEW_CALLS] == [32] * FEW_CALLS
    assert late[FEW_CALLS:] in ([16], [16] * FEW_CALLS), "one call at a time while it gives no scores"


async def test_calls_grow_again_after_a_scorer_was_away(make_settings: Callable[..., RunSettings]) -> None:
    class Hanging(Scorer):
        num_hangs = 3 * FEW_CALLS

        async def failure(self, prompts: Sequence[str]) -> Failure | None:
            if self.num_hangs == 0:
                return None
            self.num_hangs -= 1
            await asyncio.sleep(TIMEOUT_S / 4 if self.num_hangs else TIMEOUT_S)
            return LATE

    scorer = Hanging()
    scores = await held_out(make_settings, scorer).score(responses(20 * SCORE_CHUNK), asyncio.sleep)
    assert len(scores) == 20 * SCORE_CHUNK
    assert max(len(prompts) for prompts in scorer.calls) == SCORE_CHUNK


async def test_a_scorer_that_gives_no_scores_is_asked_by_one_call_at_a_time_and_nothing_is_given_up(
    make_settings: Callable[..., RunSettings],
) -> None:
    class Restarting(Scorer):
        is_back = False
        num_refused = 0

        async def failure(self, prompts: Sequence[str]) -> Failure | None:
            await asyncio.sleep(0)
            if len(self.calls) <= 2 * FEW_CALLS or self.is_back:
                return None
            self.num_refused += 1
            if self.num_refused > 2 * FEW_CALLS:
                assert self.num_running == 1
            return AWAY

    scorer = Restarting()
    running = asyncio.create_task(held_out(make_settings, scorer).score(responses(1000), asyncio.sleep))
    await until(lambda: scorer.num_refused > 40 * TRIES)
    assert not running.done()
    scorer.is_back = True
    async with asyncio.timeout(60):
        assert len(await running) == 1000
    assert len(scorer.calls) < 2 * FEW_CALLS + scorer.num_refused + 60, "prompts do not go alone from here on"


@pytest.mark.parametrize("num_calls", [1, 5, 7])
async def test_a_scorer_that_goes_away_costs_no_response_however_few_are_left_and_whatever_failed_before(
    make_settings: Callable[..., RunSettings], num_calls: int
) -> None:
    class Leaving(Scorer):
        is_back = False

        async def score(self, items: Sequence[reward_pb2.ScoreItem]) -> list[Outcome]:
            outcomes = await super().score(items)
            number = len(self.calls)
            await asyncio.sleep(0)
            if number > num_calls and not self.is_back:
                return [AWAY] * len(items)
            return [AWAY if number == 1 and not place else each for place, each in enumerate(outcomes)]

    scorer = Leaving()
    running = asyncio.create_task(held_out(make_settings, scorer).score(responses(20), asyncio.sleep))
    await until(lambda: running.done() or len(scorer.calls) > 40 * TRIES)
    assert not running.done()
    scorer.is_back = True
    async with asyncio.timeout(60):
        assert len(await running) == 20


@pytest.mark.parametrize("num_prompts", [3, 100, 1000])
@pytest.mark.parametrize("bad", [{"1"}, {"0", "2"}])
async def test_responses_that_are_never_scored_cost_no_others_theirs(
    make_settings: Callable[..., RunSettings], num_prompts: int, bad: set[str]
) -> None:
    class Partly(Scorer):
        async def failure(self, prompts: Sequence[str]) -> Failure | None:
            await asyncio.sleep(0)
            return None if bad.isdisjoint(prompts) else AWAY  # a call that one item ends gives no scores at all

    scorer = Partly()
    async with asyncio.timeout(60):
        scores = await held_out(make_settings, scorer).score(responses(num_prompts, 2), asyncio.sleep)
    assert {id.split("/")[3] for id in scores} == {str(place) for place in range(num_prompts)} - bad
    assert [prompts for prompts in scorer.calls if not bad.isdisjoint(prompts)][-1] in [[each] for each in bad]


async def test_a_prompt_that_fails_each_time_makes_calls_smaller_until_it_counts(
    make_settings: Callable[..., RunSettings],
) -> None:
    class Slow(Scorer):
        bad = "0"

        async def failure(self, prompts: Sequence[str]) -> Failure | None:
            await asyncio.sleep(TIMEOUT_S / 2)  # none is so fast that calls grow again
            return AWAY if self.bad in prompts else None

    scorer = Slow()
    whole, most = held_out(make_settings, scorer), SCORE_CHUNK // FEW_CALLS
    assert len(await whole.score(responses(SCORE_CHUNK), asyncio.sleep)) == SCORE_CHUNK - 1
    scorer.bad = ""
    scorer.calls.clear()
    await whole.score(responses(SCORE_CHUNK), asyncio.sleep)
    assert [len(prompts) for prompts in scorer.calls] == [most // 4] * 4 * FEW_CALLS


@pytest.mark.parametrize("num_prompts", [8, 200])
async def test_a_prompt_that_ends_the_scorer_each_time_takes_no_other_along(
    make_settings: Callable[..., RunSettings], num_prompts: int
) -> None:
    class Ending(Scorer):
        num_ends = 0
        is_up = True

        async def failure(self, prompts: Sequence[str]) -> Failure | None:
            if not self.is_up:
                return AWAY
            num_ends = self.num_ends
            if "4" in prompts:
                self.num_ends, self.is_up = num_ends + 1, False
                asyncio.get_running_loop().call_later(0.05, self.start)
            await asyncio.sleep(0.005)
            return None if self.num_ends == num_ends else AWAY

        def start(self) -> None:
            self.is_up = True

    async with asyncio.timeout(60):
        scores = await held_out(make_settings, Ending()).score(responses(num_prompts), asyncio.sleep)
    assert {id.split("/")[3] for id in scores} == {str(place) for place in range(num_prompts)} - {"4"}


async def test_a_response_that_fails_beside_scored_ones_each_time_is_given_up(
    make_settings: Callable[..., RunSettings],
) -> None:
    class Partly(Scorer):
        async def score(self, items: Sequence[reward_pb2.ScoreItem]) -> list[Outcome]:
            outcomes = await super().score(items)
            return [AWAY if item.id.endswith("7/1") else each for item, each in zip(items, outcomes, strict=True)]

    scorer = Partly()
    async with asyncio.timeout(60):
        scores = await held_out(make_settings, scorer).score(responses(200, 2), asyncio.sleep)
    assert len(scores) == 400 - 20
    assert sum("7" in prompts for prompts in scorer.calls) <= 1 + TRIES


async def test_what_failed_while_a_judge_behind_the_scorer_started_again_is_not_given_up_at_once(
    make_settings: Callable[..., RunSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "APART_S", 60.0)

    class Judge(Scorer):
        is_back = False

        async def score(self, items: Sequence[reward_pb2.ScoreItem]) -> list[Outcome]:
            outcomes = await super().score(items)
            return [each if self.is_back or each.value % 2 else AWAY for each in outcomes if isinstance(each, Score)]

    scorer = Judge()
    running = asyncio.create_task(held_out(make_settings, scorer).score(responses(200), asyncio.sleep))
    await until(lambda: running.done() or len(scorer.calls) > 100 * TRIES)
    assert not running.done()
    scorer.is_back = True
    async with asyncio.timeout(60):
        assert len(await running) == 200


@pytest.mark.parametrize("ends", ["cancelled", "failed"])
async def test_whatever_ends_it_ends_all_calls(make_settings: Callable[..., RunSettings], ends: str) -> None:
    class Hanging(Scorer):
        fails = asyncio.Event()

        async def failure(self, prompts: Sequence[str]) -> None:
            if "0" in prompts:
                await self.fails.wait()
                raise RuntimeError("broken")
            await asyncio.Event().wait()

    scorer = Hanging()
    running = asyncio.create_task(held_out(make_settings, scorer).score(responses(1000), asyncio.sleep))
    await until(lambda: scorer.num_running == FEW_CALLS)
    if ends == "cancelled":
        running.cancel()
    else:
        scorer.fails.set()
    async with asyncio.timeout(60):
        with pytest.raises(asyncio.CancelledError if ends == "cancelled" else RuntimeError):
            await running
    assert scorer.num_running == 0


async def test_images_of_so_many_bytes_are_under_way_at_a_time(
    make_settings: Callable[..., RunSettings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scoring, "CHUNK_IMAGE_BYTES", 35)
    monkeypatch.setattr(scoring, "CALL_BYTES", 14)

    class Seeing(Scorer):
        async def failure(self, prompts: Sequence[str]) -> None:
            await asyncio.sleep(0.2)

    scorer = Seeing(0, reward_pb2.SCORE_FIELD_IMAGES)
    shows = {"train": "train.jsonl", "images_field": "images"}
    picture = (ImageFile(7, data=b"picture"),)
    scores = await held_out(make_settings, scorer, data=shows).score(responses(40, images=picture), asyncio.sleep)
    assert len(scores) == 40
    assert 14 < max(scorer.num_bytes) <= 35 < FEW_CALLS * 7


async def test_a_group_that_is_trained_on_waits_for_few_calls_of_an_evaluation_and_that_goes_on_beside_many(
    make_settings: Callable[..., RunSettings],
) -> None:
    class Slow(Scorer):
        async def failure(self, prompts: Sequence[str]) -> None:
            await asyncio.sleep(0.05)

    slow = Slow()
    joint = JointCalls(slow.score, FEW_CALLS, TIMEOUT_S)

    class Client:
        described = None
        score = staticmethod(joint.score)

    running = asyncio.create_task(held_out(make_settings, Client()).score(responses(4000), asyncio.sleep))
    await until(lambda: slow.num_running == FEW_CALLS)

    room = asyncio.Semaphore(ControllerSection.max_score_calls)

    async def trained_on(number: int) -> int:
        """Calls that began before the group was scored."""
        async with room:
            num_before = len(slow.calls)
            await joint.score([reward_pb2.ScoreItem(id=f"{number}/{i}", group=str(number)) for i in range(8)])
            return len(slow.calls) - num_before

    assert await trained_on(-1) <= 3 * FEW_CALLS
    num_calls, num_groups = len(slow.calls), 160
    await asyncio.gather(*(trained_on(-2 - number) for number in range(num_groups)))
    beside = [prompts for prompts in slow.calls[num_calls:] if not prompts[0].startswith("-")]
    assert len(beside) >= num_groups / ControllerSection.max_score_calls * FEW_CALLS / 2
    async with asyncio.timeout(60):
        assert len(await running) == 4000


async def test_the_loop_goes_on_while_the_items_of_a_large_set_are_made(
    make_settings: Callable[..., RunSettings],
) -> None:
    num_looks, looks_when_scored = 0, list[int]()

    class Counting(Scorer):
        async def score(self, items: Sequence[reward_pb2.ScoreItem]) -> list[Outcome]:
            looks_when_scored.append(num_looks)
            return await super().score(items)

    async def look() -> None:
        nonlocal num_looks
        while True:
            await asyncio.sleep(0.001)
            num_looks += 1

    looking = asyncio.create_task(look())
    await held_out(make_settings, Counting()).score(responses(1) * 20_000, asyncio.sleep)
    looking.cancel()
    assert looks_when_scored[0] > 5


def test_full_calls_that_are_sure_raise_the_size_and_calls_that_fail_together_halve_it_once() -> None:
    size = CallSize(60.0)
    start = size.most
    for num_items, seconds in ((start, 1.0), (start // 2, 1.0), (start, 40.0), (start, 1.0)):
        for _ in range(FEW_CALLS - 1):
            size.was_answered(num_items, seconds)
            assert size.most == start, "too few, too small or too late"
    size.was_answered(start, 1.0)
    assert size.most == 2 * start
    size.was_silent(2 * start)
    size.was_silent(2 * start)
    assert size.most == start
    for _ in range(10):
        size.was_silent(size.most)
    assert size.most == 1
    for _ in range(10 * FEW_CALLS):
        size.was_answered(size.most, 1.0)
    assert size.most == SCORE_CHUNK
