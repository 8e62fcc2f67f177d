"""The caller's side of RewardService against a real service that lies, hangs and dies: every item ends as a Score or a
Failure.
"""

import asyncio
import math
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc
import numpy as np
import pytest

from rolecall.errors import InvalidInputError, ScorerError, UnavailableError
from rolecall.reward import SERVICE_NAME
from rolecall.scoring.breaker import FAILURES_TO_OPEN
from rolecall.scoring.client import RewardClient
from rolecall.scoring.description import component_spec
from rolecall.scoring.scores import Failure, Outcome, Score
from rolecall.settings import FEW_CALLS
from rolecall.v1 import reward_pb2, reward_pb2_grpc
from rolecall.wire import encode_tensor
from tests.contract.reward_peers import Liar, client_of, items_of, serving


@pytest.fixture
async def liar() -> Liar:
    return Liar()


@pytest.fixture
async def client(liar: Liar) -> AsyncIterator[RewardClient]:
    async with serving(liar) as address, client_of(address) as opened:
        yield opened


def failures(outcomes: list[Outcome]) -> list[Failure]:
    """The outcomes, all of which must be failures."""
    assert all(isinstance(outcome, Failure) for outcome in outcomes), outcomes
    return [outcome for outcome in outcomes if isinstance(outcome, Failure)]


async def test_an_honest_answer_is_believed(client: RewardClient) -> None:
    assert await client.score(items_of("a", "b")) == [Score(0.5), Score(0.5)]


async def test_the_scorer_is_described_once_per_connection(client: RewardClient, liar: Liar) -> None:
    await asyncio.gather(*(client.score(items_of("a")) for _ in range(5)))
    assert liar.num_described == 1


async def test_only_the_fields_it_reads_are_sent(client: RewardClient, liar: Liar) -> None:
    liar.spec = reward_pb2.DescribeResponse(
        name="liar", reads=[reward_pb2.SCORE_FIELD_GROUND_TRUTH], reward=component_spec("", 0, 1)
    )
    await client.score(items_of("secret", truth="42"))
    (sent,) = liar.requests[0].items
    assert (sent.id, sent.response_text, sent.ground_truth, sent.num_response_tokens) == ("7/0", "", "42", 3)


async def test_requests_are_cut_to_what_the_scorer_takes_and_few_are_under_way(
    client: RewardClient, liar: Liar
) -> None:
    liar.spec.max_items = 3
    liar.fail = lambda: asyncio.sleep(0.02)
    assert len(await client.score(items_of(*["a"] * 100))) == 100
    assert {len(request.items) for request in liar.requests} == {3, 1}
    assert 1 < liar.most_at_once <= FEW_CALLS


async def test_items_too_large_for_one_message_travel_in_several(client: RewardClient, liar: Liar) -> None:
    outcomes = await client.score(items_of(*["x" * 2_000_000] * 20))
    assert outcomes == [Score(0.5)] * 20
    assert len(liar.requests) == 20


async def test_groups_that_go_together_get_their_own_scores_and_one_that_spoils_its_call_fails_alone(
    liar: Liar,
) -> None:
    def spoil(response: reward_pb2.ScoreResponse) -> None:
        for result in response.results:
            result.reward.value = int(result.id.partition("/")[0]) / 100
        if any(result.id.startswith("20/") for result in response.results):
            del response.results[-1]

    liar.lie = spoil
    groups = [[reward_pb2.ScoreItem(id=f"{gid}/{i}", group=str(gid)) for i in range(4)] for gid in range(60)]
    async with serving(liar) as address, client_of(address, is_joint=True) as client:
        scored = await asyncio.gather(*(client.score(group) for group in groups))
    for gid, outcomes in enumerate(scored):
        if gid == 20:
            assert [failure.code for failure in failures(outcomes)] == [ScorerError.reason] * 4
        else:
            assert outcomes == [Score(gid / 100)] * 4
    assert liar.most_at_once <= FEW_CALLS


def drop_one(response: reward_pb2.ScoreResponse) -> None:
    del response.results[-1]


def repeat_one(response: reward_pb2.ScoreResponse) -> None:
    response.results[-1].id = response.results[0].id


def add_one(response: reward_pb2.ScoreResponse) -> None:
    response.results.add(id="7/99").reward.value = 0.5


def rename_one(response: reward_pb2.ScoreResponse) -> None:
    response.results[-1].id = "8/0"


def answer_one_twice(response: reward_pb2.ScoreResponse) -> None:
    response.results.add(id=response.results[0].id).reward.value = 0.25


@pytest.mark.parametrize("lie", [drop_one, repeat_one, add_one, rename_one, answer_one_twice])
async def test_an_answer_to_other_items_is_refused_whole(
    client: RewardClient, liar: Liar, lie: Callable[[reward_pb2.ScoreResponse], None]
) -> None:
    liar.lie = lie
    for failure in failures(await client.score(items_of("a", "b"))):
        assert (failure.code, failure.retryable) == (ScorerError.reason, False)
        assert "scorer 'it'" in failure.message
    assert len(liar.requests) == 1


def not_a_number(result: reward_pb2.ScoreResult) -> None:
    result.reward.value = math.nan


def infinite(result: reward_pb2.ScoreResult) -> None:
    result.reward.value = math.inf


def too_much(result: reward_pb2.ScoreResult) -> None:
    result.reward.value = 1.01


def undeclared_component(result: reward_pb2.ScoreResult) -> None:
    result.reward.components["bonus"] = 1.0


def undeclared_tokens(result: reward_pb2.ScoreResult) -> None:
    result.reward.token_rewards.CopyFrom(encode_tensor(np.zeros(3, np.float32)))


def nothing(result: reward_pb2.ScoreResult) -> None:
    result.ClearField("reward")


@pytest.mark.parametrize("lie", [not_a_number, infinite, too_much, undeclared_component, undeclared_tokens, nothing])
async def test_one_unbelievable_score_fails_its_own_item_only(
    client: RewardClient, liar: Liar, lie: Callable[[reward_pb2.ScoreResult], None]
) -> None:
    liar.lie = lambda response: lie(response.results[1])
    first, second, third = await client.score(items_of("a", "b", "c"))
    assert first == third == Score(0.5)
    assert isinstance(second, Failure)
    assert (second.code, second.retryable) == (ScorerError.reason, False)


async def test_components_and_token_rewards_arrive_as_declared(client: RewardClient, liar: Liar) -> None:
    liar.spec.components.append(component_spec("style", 0, 2))
    liar.spec.token_rewards = True
    rewards = np.array([1, 2, 3], np.float32)

    def detail(response: reward_pb2.ScoreResponse) -> None:
        response.results[0].reward.components["style"] = 2.0
        response.results[0].reward.token_rewards.CopyFrom(encode_tensor(rewards))

    liar.lie = detail
    (score,) = await client.score(items_of("a"))
    assert isinstance(score, Score)
    assert score.components == {"style": 2.0}
    assert score.token_rewards is not None
    assert score.token_rewards.tolist() == [1.0, 2.0, 3.0]


async def test_an_answer_beyond_the_message_limit_is_a_failure(client: RewardClient, liar: Liar) -> None:
    def bloat(response: reward_pb2.ScoreResponse) -> None:
        response.results[0].error.message = "x" * 20_000_000

    liar.lie = bloat
    (failure,) = failures(await client.score(items_of("a")))
    assert not failure.retryable


async def test_an_item_beyond_the_message_limit_fails_alone_and_says_so(client: RewardClient) -> None:
    fits, too_large = await client.score(items_of("a", "x" * 17_000_000))
    assert fits == Score(0.5)
    (failure,) = failures([too_large])
    assert not failure.retryable
    assert failure.message.startswith("scorer 'it': ")
    assert "larger than max (17000" in failure.message


async def test_a_scorers_error_keeps_its_code_and_says_who(client: RewardClient, liar: Liar) -> None:
    def refuse(response: reward_pb2.ScoreResponse) -> None:
        response.results[0].error.code, response.results[0].error.message = "BAD_GROUND_TRUTH", "it is empty"

    liar.lie = refuse
    assert failures(await client.score(items_of("a"))) == [
        Failure("BAD_GROUND_TRUTH", "scorer 'it': it is empty", False)
    ]


async def test_a_scorers_long_and_unprintable_words_are_bounded(
    client: RewardClient, liar: Liar, caplog: pytest.LogCaptureFixture
) -> None:
    def shout(response: reward_pb2.ScoreResponse) -> None:
        response.results[0].error.code = "\x1b[31mX" * 20_000
        response.results[0].error.message = "no\n" * 70_000
        response.results[0].error.retryable = True

    liar.lie = shout
    (failure,) = failures(await client.score(items_of("a")))
    assert failure.code == (" [31mX" * 20)[:64]
    assert len(failure.message) == 1000
    assert failure.message.isprintable()
    assert all(len(record.getMessage()) < 2000 for record in caplog.records)
    assert len(client.trouble) < 2000


async def test_a_description_that_leaves_things_open_is_told_once(liar: Liar, caplog: pytest.LogCaptureFixture) -> None:
    liar.spec = reward_pb2.DescribeResponse()
    async with serving(liar) as address, client_of(address, max_attempts=3, is_foreign=True) as client:
        for _ in range(3):
            assert await client.score(items_of("a")) == [Score(0.5)]
    told = [record.getMessage() for record in caplog.records]
    assert [f"at {address}" in line for line in told] == [True, True], told
    assert "names no fields" in told[0]
    assert "names no range" in told[1]


async def test_a_scorer_that_gives_no_scores_is_in_trouble_until_it_does(
    liar: Liar, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(liar) as address, client_of(address) as client:
        liar.fail = lambda: refuse("its disk is full")
        for _ in range(3):
            await client.score(items_of("a"))
        assert client.trouble.startswith(f"scorer 'it' at {address} gives no scores: UNAVAILABLE: ")
        assert client.trouble.endswith("its disk is full")
        liar.fail, liar.lie = None, first_fails
        first, second = await client.score(items_of("a", "b"))
        assert (isinstance(first, Failure), second) == (True, Score(0.5))
        assert client.trouble, "it may have had the scores that it gives"
        liar.lie = lambda response: None
        await client.score(items_of("a"))
        assert not client.trouble
    told = [record.getMessage() for record in caplog.records if record.name == "rolecall.scoring.peer"]
    assert [line.partition(address)[2].partition(":")[0] for line in told] == [" gives no scores", " answers again"]


async def test_a_scorer_that_is_away_is_told_of_twice_however_many_groups_ask_it(
    liar: Liar, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(liar) as address, client_of(address, max_attempts=3) as client:
        liar.fail = lambda: refuse("its disk is full")
        await asyncio.gather(*(client.score(items_of(f"{group}")) for group in range(20)))
    told = [(record.name, record.levelname) for record in caplog.records]
    assert told == [("rolecall.scoring.peer", "WARNING"), ("rolecall.scoring.retries", "WARNING")], caplog.text


def first_fails(response: reward_pb2.ScoreResponse) -> None:
    response.results[0].error.retryable = True


async def refuse(why: str) -> None:
    raise UnavailableError(why)


async def test_a_slow_scorer_is_a_retryable_failure_at_the_deadline(liar: Liar) -> None:
    liar.fail = lambda: asyncio.sleep(30)
    async with serving(liar) as address, client_of(address, timeout_s=0.8, max_attempts=2) as client:
        await client.describe()
        async with asyncio.timeout(30):
            (failure,) = failures(await client.score(items_of("a")))
    assert (failure.code, failure.retryable) == ("DEADLINE", True)
    assert "; a call has 0.8 s (timeout_s)" in failure.message
    assert len(liar.requests) == 2


async def test_a_scorer_that_answers_nothing_is_left_alone_until_a_probe_finds_it_back(
    liar: Liar, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolecall.scoring.breaker.FIRST_PAUSE_S", 1.5)

    def away() -> None:
        raise UnavailableError("away")

    liar.fail = away
    async with serving(liar) as address, client_of(address) as client:
        for _ in range(FAILURES_TO_OPEN):
            failures(await client.score(items_of("a")))
        liar.fail = None
        asked = len(liar.requests)
        (refused,) = failures(await client.score(items_of("a")))
        assert (refused.code, refused.retryable) == ("SCORER_UNAVAILABLE", True)
        assert "it is asked again in " in refused.message
        assert len(liar.requests) == asked, "it was not called"
        async with asyncio.timeout(30.0):
            while await client.score(items_of("a")) != [Score(0.5)]:
                await asyncio.sleep(0.05)
        assert client.trouble == ""


async def test_a_slow_call_is_made_again_where_that_is_wanted_and_the_first_answer_counts(liar: Liar) -> None:
    calls = 0

    def first_hangs() -> object:
        nonlocal calls
        calls += 1
        return asyncio.sleep(60.0) if calls == 1 else None

    liar.fail = first_hangs
    async with serving(liar) as address:
        async with client_of(address, timeout_s=50.0, hedge_after_s=0.05) as client:
            assert await client.score(items_of("a")) == [Score(0.5)]
            assert calls == 2
        async with client_of(address, timeout_s=50.0, hedge_after_s=20.0) as client:
            assert await client.score(items_of("a")) == [Score(0.5)]
            assert calls == 3, "a call that is answered in time is made once"


async def test_only_retryable_items_are_asked_again(liar: Liar) -> None:
    def sometimes(response: reward_pb2.ScoreResponse) -> None:
        if len(liar.requests) < 3:
            response.results[0].error.code, response.results[0].error.retryable = "OVERLOADED", True

    liar.lie = sometimes
    async with serving(liar) as address, client_of(address, max_attempts=3) as client:
        assert await client.score(items_of("a", "b", "c")) == [Score(0.5)] * 3
    assert [[item.id for item in request.items] for request in liar.requests] == [
        ["7/0", "7/1", "7/2"],
        ["7/0"],
        ["7/0"],
    ]


async def test_the_whole_group_of_an_item_is_asked_again_where_scores_depend_on_it(liar: Liar) -> None:
    liar.spec.whole_groups = True

    def fail_once(response: reward_pb2.ScoreResponse) -> None:
        if len(liar.requests) == 1:
            response.results[0].error.retryable = True

    liar.lie = fail_once
    items = items_of("a", "b", "c", "d")
    for item, group in zip(items, "xyxy", strict=True):
        item.group = group
    async with serving(liar) as address, client_of(address, max_attempts=2) as client:
        assert await client.score(items) == [Score(0.5)] * 4
    asked = [[(item.id, item.group) for item in request.items] for request in liar.requests]
    assert asked == [[("7/0", "x"), ("7/2", "x"), ("7/1", "y"), ("7/3", "y")], [("7/0", "x"), ("7/2", "x")]]


async def test_attempts_are_bounded(liar: Liar) -> None:
    def fail() -> None:
        raise UnavailableError("overloaded")

    liar.fail = fail
    async with serving(liar) as address, client_of(address, max_attempts=3) as client:
        (failure,) = failures(await client.score(items_of("a")))
    assert (failure.code, failure.retryable, len(liar.requests)) == ("UNAVAILABLE", True, 3)


async def test_a_refusal_is_not_repeated(liar: Liar) -> None:
    def fail() -> None:
        raise InvalidInputError("no such item")

    liar.fail = fail
    async with serving(liar) as address, client_of(address, max_attempts=3) as client:
        (failure,) = failures(await client.score(items_of("a")))
    assert (failure.code, failure.retryable, len(liar.requests)) == ("INVALID_INPUT", False, 1)


async def test_a_scorer_that_dies_and_comes_back_is_described_anew_and_believed(liar: Liar) -> None:
    async with serving(liar) as address, client_of(address, timeout_s=10.0, max_attempts=4) as client:
        assert await client.score(items_of("a")) == [Score(0.5)]
    # The channel is closed with the client: a second one lives through the restart.
    async with client_of(address, timeout_s=10.0, max_attempts=4) as client:
        async with serving(liar, bind=address):
            assert await client.score(items_of("a")) == [Score(0.5)]
        waiting = asyncio.ensure_future(client.score(items_of("a", "b")))
        await asyncio.sleep(0.3)
        described = liar.num_described
        async with serving(liar, bind=address):
            assert await waiting == [Score(0.5)] * 2
    assert liar.num_described == described + 1


async def test_nobody_there_is_a_retryable_failure_not_an_exception() -> None:
    async with serving(Liar()) as address:
        pass
    async with client_of(address, timeout_s=1.5) as client:
        (failure,) = failures(await client.score(items_of("a")))
    assert failure.retryable
    assert "Connection refused" in failure.message


async def test_many_calls_to_nobody_wait_together_not_one_after_the_other() -> None:
    async with serving(Liar()) as address:
        pass
    async with client_of(address, timeout_s=0.5) as client, asyncio.timeout(30):
        scored = await asyncio.gather(*(client.score(items_of("a")) for _ in range(32)))
    assert all(failures(outcomes)[0].retryable for outcomes in scored)


async def test_a_caller_that_gives_up_takes_no_answer_from_the_others(liar: Liar) -> None:
    async with serving(liar) as address, client_of(address) as client:
        first = asyncio.ensure_future(client.score(items_of("a")))
        second = asyncio.ensure_future(client.score(items_of("b")))
        await asyncio.sleep(0)
        first.cancel()
        assert await second == [Score(0.5)]


async def test_a_description_that_contradicts_itself_fails_every_item(client: RewardClient, liar: Liar) -> None:
    liar.spec.reward.CopyFrom(component_spec("", 2, 1))
    (failure,) = failures(await client.score(items_of("a")))
    assert "min must not exceed max" in failure.message
    assert not liar.requests


async def test_another_service_at_the_address_is_named_as_such() -> None:
    server = grpc.aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with client_of(f"127.0.0.1:{port}") as client:
            (failure,) = failures(await client.score(items_of("a")))
    finally:
        await server.stop(None)
    assert "does not serve this method" in failure.message
    assert failure.code == "VERSION_MISMATCH"


class Plain(reward_pb2_grpc.RewardServiceServicer):
    """A scorer as another language's would be: bare gRPC, plain statuses, no ErrorInfo, gRPC's default limits."""

    async def Describe(self, request: reward_pb2.DescribeRequest, context: object) -> reward_pb2.DescribeResponse:
        return reward_pb2.DescribeResponse(name="plain", reads=[reward_pb2.SCORE_FIELD_RESPONSE_TEXT])

    async def Score(self, request: reward_pb2.ScoreRequest, context: object) -> reward_pb2.ScoreResponse:
        response = reward_pb2.ScoreResponse()
        for item in reversed(request.items):
            response.results.add(id=item.id).reward.value = len(item.response_text)
        return response


async def test_a_bare_grpc_server_with_default_limits_is_a_scorer() -> None:
    server = grpc.aio.server()
    reward_pb2_grpc.add_RewardServiceServicer_to_server(Plain(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with client_of(f"127.0.0.1:{port}") as client:
            assert await client.score(items_of(*["x" * 1_000_000] * 8)) == [Score(1e6)] * 8
    finally:
        await server.stop(None)


async def test_bytes_that_are_no_message_are_a_failure() -> None:
    async def describe(request: bytes, context: object) -> bytes:
        return reward_pb2.DescribeResponse(name="noise").SerializeToString()

    async def score(request: bytes, context: object) -> bytes:
        return b"\xff" * 100

    handlers: dict[str, Any] = {
        "Describe": grpc.unary_unary_rpc_method_handler(describe),
        "Score": grpc.unary_unary_rpc_method_handler(score),
    }
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE_NAME, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with client_of(f"127.0.0.1:{port}", max_attempts=3) as client:
            (failure,) = failures(await client.score(items_of("a")))
    finally:
        await server.stop(None)
    assert not failure.retryable
