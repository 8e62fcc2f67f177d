"""Every gRPC status of a scorer means what the table in reward.proto says: real servers answer with each, code by
code.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from rolecall.scoring.backoff import FIRST_PAUSE_S, LONGEST_PAUSE_S, LONGEST_RETRY_AFTER_S, RateLimit
from rolecall.scoring.scores import Failure, Outcome, Score
from rolecall.v1 import reward_pb2, reward_pb2_grpc
from tests.contract.reward_peers import client_of, items_of

PROTO = Path(__file__).parents[2] / "proto" / "rolecall" / "v1" / "reward.proto"
ROW = re.compile(r"^//   ([A-Z_]+) +\| ([A-Z_]+) +\| (yes|no) +\| (waited for|dropped)$", re.MULTILINE)
TABLE = {
    status: (code, tried == "yes", then == "waited for") for status, code, tried, then in ROW.findall(PROTO.read_text())
}
MAX_ATTEMPTS = 2
PLENTY_S = 30.0
"""Bound on what ends with an event; the machine may be busy."""


class Refusing(reward_pb2_grpc.RewardServiceServicer):
    """A scorer as another language's would be: bare gRPC. Refuses the first `times` calls of `method` with `code`."""

    def __init__(
        self, method: str, code: grpc.StatusCode, times: float = float("inf"), details: str = "not today"
    ) -> None:
        self.method, self.code, self.times, self.details = method, code, times, details
        self.retry_after_s: float | None = None
        self.calls: dict[str, list[float]] = {"Describe": [], "Score": []}
        """Times of the calls, on the event loop's clock."""

    async def Describe(
        self,
        request: reward_pb2.DescribeRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> reward_pb2.DescribeResponse:
        await self._answer("Describe", context)
        return reward_pb2.DescribeResponse(name="refusing", reads=[reward_pb2.SCORE_FIELD_RESPONSE_TEXT])

    async def Score(
        self,
        request: reward_pb2.ScoreRequest,
        context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
    ) -> reward_pb2.ScoreResponse:
        await self._answer("Score", context)
        response = reward_pb2.ScoreResponse()
        for item in request.items:
            response.results.add(id=item.id).reward.value = 0.5
        return response

    async def _answer(self, method: str, context: grpc.aio.ServicerContext) -> None:  # type: ignore[type-arg]
        self.calls[method].append(asyncio.get_running_loop().time())
        if method != self.method or len(self.calls[method]) > self.times:
            return
        if self.retry_after_s is None:
            await context.abort(self.code, self.details)
        delay = Duration()
        delay.FromMilliseconds(int(self.retry_after_s * 1000))
        status = status_pb2.Status(code=self.code.value[0], message=self.details)
        status.details.add().Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        await context.abort_with_status(rpc_status.to_status(status))


@asynccontextmanager
async def bare_server(servicer: reward_pb2_grpc.RewardServiceServicer) -> AsyncIterator[str]:
    server = grpc.aio.server()
    reward_pb2_grpc.add_RewardServiceServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(None)


async def scored_by(servicer: Refusing, max_attempts: int = MAX_ATTEMPTS) -> list[Outcome]:
    async with (
        bare_server(servicer) as address,
        client_of(address, timeout_s=PLENTY_S, max_attempts=max_attempts) as client,
    ):
        return await client.score(items_of("a", "b"))


def test_the_table_has_a_row_for_every_status() -> None:
    assert TABLE.keys() == {code.name for code in grpc.StatusCode} - {"OK"}


@pytest.mark.parametrize("method", ["Score", "Describe"])
@pytest.mark.parametrize("status", TABLE)
async def test_a_status_means_what_the_table_says(status: str, method: str) -> None:
    code, tried_again, waited_for = TABLE[status]
    servicer = Refusing(method, grpc.StatusCode[status])
    outcomes = await scored_by(servicer)
    assert [(outcome.code, outcome.retryable) for outcome in outcomes if isinstance(outcome, Failure)] == [
        (code, waited_for)
    ] * 2
    assert all("scorer 'it'" in outcome.message for outcome in outcomes if isinstance(outcome, Failure))
    assert len(servicer.calls[method]) == (MAX_ATTEMPTS if tried_again else 1)


@pytest.mark.parametrize("status", [status for status, (_, tried_again, _) in TABLE.items() if tried_again])
async def test_a_status_that_passes_costs_no_item_its_score(status: str) -> None:
    assert await scored_by(Refusing("Score", grpc.StatusCode[status], times=1)) == [Score(0.5)] * 2


@pytest.mark.parametrize(
    "details",
    [
        "SERVER: Received message larger than max (5000000 vs. 4194304)",  # gRPC's core, Go
        "gRPC message exceeds maximum size 4194304: 5000000",  # Java
        "Received message exceeds the maximum configured message size.",  # .NET
    ],
)
async def test_a_message_that_is_too_large_is_no_rate_limit(details: str) -> None:
    servicer = Refusing("Score", grpc.StatusCode.RESOURCE_EXHAUSTED, details=details)
    outcomes = await scored_by(servicer)
    assert [(outcome.code, outcome.retryable) for outcome in outcomes if isinstance(outcome, Failure)] == [
        ("EXHAUSTED", False)
    ] * 2
    assert len(servicer.calls["Score"]) == 1


@pytest.mark.parametrize(
    "details",
    ["request rate exceeds maximum of 100/s", "open sessions: 9 exceeds max_sessions 8", "larger than maxima"],
)
async def test_a_limit_of_a_servers_own_is_waited_for_however_it_is_worded(details: str) -> None:
    servicer = Refusing("Score", grpc.StatusCode.RESOURCE_EXHAUSTED, times=1, details=details)
    assert await scored_by(servicer) == [Score(0.5)] * 2


class HoldingBack(Refusing):
    """Answers no call that came before the refused one was known of: until another call than the first `size`."""

    def __init__(self, size: int) -> None:
        super().__init__("Score", grpc.StatusCode.RESOURCE_EXHAUSTED, times=1)
        self.size = size
        self.asked_again = asyncio.Event()

    async def _answer(self, method: str, context: grpc.aio.ServicerContext) -> None:  # type: ignore[type-arg]
        await super()._answer(method, context)
        if len(self.calls["Score"]) > self.size:
            self.asked_again.set()
        if method == "Score":
            await self.asked_again.wait()


async def test_a_scorer_that_says_when_to_come_back_is_left_alone_until_then() -> None:
    servicer = HoldingBack(size=8)  # as many as are under way at once
    servicer.retry_after_s = 1.5
    async with bare_server(servicer) as address, client_of(address, timeout_s=PLENTY_S, max_attempts=3) as client:
        scored = await asyncio.gather(*(client.score(items_of("a")) for _ in range(12)))
    assert scored == [[Score(0.5)]] * 12
    calls = servicer.calls["Score"]
    assert calls[8] - calls[0] > 1.4  # the first was refused, and nothing was sent until its time had come
    assert len(calls) == 12 + 1


async def test_a_limit_that_lasts_longer_than_a_call_may_is_told_and_not_asked_again() -> None:
    servicer = Refusing("Score", grpc.StatusCode.RESOURCE_EXHAUSTED)
    servicer.retry_after_s = 10_000.0
    async with bare_server(servicer) as address, client_of(address, timeout_s=1.2, max_attempts=3) as client:
        (failure,) = await client.score(items_of("a"))
        assert isinstance(failure, Failure)
        assert (failure.code, failure.retryable) == ("RATE_LIMITED", True)
        assert "is asked again in" in failure.message
        assert len(servicer.calls["Score"]) == 1
        assert address in client.trouble


async def test_an_items_own_rate_limit_pauses_the_calls_too() -> None:
    class Limited(Refusing):
        async def Score(
            self,
            request: reward_pb2.ScoreRequest,
            context: grpc.aio.ServicerContext,  # type: ignore[type-arg]
        ) -> reward_pb2.ScoreResponse:
            response = await super().Score(request, context)
            if len(self.calls["Score"]) <= 3:
                response.results[0].error.code, response.results[0].error.retryable = "RATE_LIMITED", True
            return response

    servicer = Limited("", grpc.StatusCode.OK)
    async with bare_server(servicer) as address, client_of(address, timeout_s=PLENTY_S) as client:
        for _ in range(3):  # each as soon as the one before was refused
            (failure,) = await client.score(items_of("a"))
            assert isinstance(failure, Failure)
        assert await client.score(items_of("a")) == [Score(0.5)]
    pauses = [later - earlier for earlier, later in pairwise(servicer.calls["Score"])]
    assert [pause >= 0.49 * FIRST_PAUSE_S * 2**i for i, pause in enumerate(pauses)] == [True] * 3


# --- the pauses, on a clock of the test's own -----------------------------------------------------


def test_pauses_double_to_a_bound_and_calls_that_were_under_way_together_count_once() -> None:
    now = 100.0
    limit = RateLimit(clock=lambda: now, draw=lambda low, high: high)
    assert limit.pause_s() <= 0
    for _ in range(8):
        limit.refused(called_at=99.0)
    assert limit.pause_s() == pytest.approx(FIRST_PAUSE_S)
    pauses = []
    for _ in range(12):
        now += limit.pause_s()
        limit.refused(called_at=now)
        pauses.append(limit.pause_s())
    assert pauses[:3] == pytest.approx([0.4, 0.8, 1.6])
    assert pauses[-1] == pytest.approx(LONGEST_PAUSE_S)
    limit.answered()
    now += limit.pause_s()
    limit.refused(called_at=now)
    assert limit.pause_s() == pytest.approx(LONGEST_PAUSE_S)  # half of it, doubled


def test_what_a_peer_asks_for_is_honoured_up_to_a_bound() -> None:
    limit = RateLimit(clock=lambda: 0.0)
    limit.refused(called_at=0.0, retry_after_s=42.0)
    assert limit.pause_s() == pytest.approx(42.0)
    limit.refused(called_at=0.0, retry_after_s=1e9)
    assert limit.pause_s() == pytest.approx(LONGEST_RETRY_AFTER_S)
