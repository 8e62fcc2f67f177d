"""A kit's connection to one RewardService: what it says of itself, the calls, and the first answer to every item, with
which later ones are compared.
"""

import asyncio
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import grpc

from rolecall.conformance.check import VerdictError, said, skipped
from rolecall.conformance.peer import CONNECT_S, Peer, told
from rolecall.conformance.report import Load
from rolecall.conformance.reward.pool import Pool
from rolecall.errors import RateLimitedError, RoleCallError
from rolecall.rpc import status
from rolecall.scoring.backoff import RateLimit
from rolecall.scoring.exchange import cut, only
from rolecall.v1 import reward_pb2, reward_pb2_grpc

Items = Sequence[reward_pb2.ScoreItem]
MAX_ATTEMPTS = 6
"""Times in a row that a call is refused for now before it has failed, while no other is answered."""
AWAY_PAUSE_S = 0.1
"""The first pause after UNAVAILABLE, each shortened at random by up to half. They double up to a call's last attempt,
so that one waits 3 s at most while nobody is answered.
"""

UNANSWERED_S = 120.0
"""A call that fails by UNAVAILABLE is made again while others are under way, until none was answered for this long."""

LONGEST_PAUSE_S = 20.0
"""A call that is to wait for longer is made again then. So one is given up within some two minutes while no other is
answered.
"""


@dataclass(frozen=True)
class Options:
    """Choices of whoever runs the kit."""

    timeout_s: float = 10.0
    """Deadline of one call."""
    tolerance: float = 1e-6
    """Largest difference of two scores that are the same, relative to the larger of 1 and the score."""
    load_s: float = 1.0
    """Seconds of load at each number of calls; 0 leaves it out."""
    abandoned_work_s: float = 3.0
    """Seconds of work that are begun and given up, as far as a bounded number of calls holds them."""
    slack_s: float = 1.0
    """Seconds that a call after abandoned ones may take beside four times as long as alone."""
    drain_pid: int | None = None
    """Process of the server, which is ended by SIGTERM to see how."""


class RewardSession:
    """A session with one RewardService. `open` before anything else, `close` at the end."""

    def __init__(self, peer: Peer, pool: Pool, options: Options) -> None:
        self.peer = peer
        self.pool = pool
        self.options = options
        self.failed: set[str] = set()
        self.load: list[Load] = []
        self.spec = reward_pb2.DescribeResponse()
        self._channel = peer.open()
        self.stub = reward_pb2_grpc.RewardServiceStub(self._channel)
        self._limit = RateLimit()
        self._num_under_way = 0
        self._num_answered = 0
        self._answered_at = 0.0
        self._given_up_after = -1
        self._first: list[tuple[Items, reward_pb2.ScoreResponse]] = []

    async def open(self) -> None:
        """Asks what the service is; a RoleCallError when it does not say so within seconds."""
        self.spec = await told(
            self.stub.Describe(reward_pb2.DescribeRequest(), timeout=CONNECT_S), self.peer.address, "Describe"
        )
        self.pool = self.pool.for_scorer(self.spec)

    async def close(self) -> None:
        """Closes the connection."""
        await self._channel.close(grace=0.0)

    async def is_there(self) -> bool:
        """Whether Describe is answered, asked within CONNECT_S."""
        try:
            await self.stub.Describe(reward_pb2.DescribeRequest(), timeout=CONNECT_S)
        except grpc.aio.AioRpcError as error:
            return error.code() is not grpc.StatusCode.UNAVAILABLE
        return True

    @property
    def channel(self) -> grpc.aio.Channel:
        """The connection."""
        return self._channel

    def chunks(self, items: Items) -> list[list[reward_pb2.ScoreItem]]:
        """`items` with the fields that the service reads, cut into requests that it takes."""
        return cut([only(item, self.spec) for item in items], self.spec)

    async def score(self, items: Items) -> reward_pb2.ScoreResponse:
        """One call with exactly these items. While the service refuses it for now, the call waits and is repeated. Once
        one was given up, others are made once until one is answered: VerdictError where it is refused, too.
        """
        request = reward_pb2.ScoreRequest(items=items)
        loop = asyncio.get_running_loop()
        num_left, num_answered, begun_at = MAX_ATTEMPTS, self._num_answered, loop.time()
        while True:
            if not self.has_given_up:
                await asyncio.sleep(min(LONGEST_PAUSE_S, max(0.0, self._limit.pause_s())))
            called_at = loop.time()
            try:
                response = await self._call(request)
            except grpc.aio.AioRpcError as error:
                known = self._error(error, "Score")
                is_limited = isinstance(known, RateLimitedError)
                if not is_limited and error.code() is not grpc.StatusCode.UNAVAILABLE:
                    raise
                num_left = num_left - 1 if self._num_answered == num_answered else MAX_ATTEMPTS
                num_answered = self._num_answered
                is_unanswered = loop.time() - max(begun_at, self._answered_at) > UNANSWERED_S
                if not is_limited and self._num_under_way and not is_unanswered:  # the service may be at work on them
                    num_left = max(1, num_left)
                elif self.has_given_up:
                    raise VerdictError(skipped(f"since a call was given up, all are refused: {said(error)}")) from error
                elif not num_left:
                    self._given_up_after = num_answered
                    raise
                if is_limited:
                    self._limit.refused(called_at, float(known.details.get("retry_after_s", 0.0)))
                    continue
                pause_s = AWAY_PAUSE_S * 2 ** (MAX_ATTEMPTS - 1 - min(num_left, MAX_ATTEMPTS - 1))
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
                continue
            self._limit.answered()
            self._num_answered += 1
            self._answered_at = loop.time()
            return response

    @property
    def has_given_up(self) -> bool:
        """Whether a call was refused to the end, and none was answered since."""
        return self._given_up_after == self._num_answered

    async def _call(self, request: reward_pb2.ScoreRequest) -> reward_pb2.ScoreResponse:
        self._num_under_way += 1
        try:
            return await self.stub.Score(request, timeout=self.options.timeout_s)
        finally:
            self._num_under_way -= 1

    async def results(self, chunks: Iterable[Items]) -> dict[str, reward_pb2.ScoreResult]:
        """The results of several calls, one after the other, by id."""
        responses = [await self.score(chunk) for chunk in chunks]
        return {result.id: result for response in responses for result in response.results}

    async def first(self) -> list[tuple[Items, reward_pb2.ScoreResponse]]:
        """The pool's requests with their first answers."""
        if not self._first:
            self._first = [(chunk, await self.score(chunk)) for chunk in self.chunks(self.pool.items)]
        return self._first

    async def first_results(self) -> dict[str, reward_pb2.ScoreResult]:
        """The first results of the pool, by id."""
        return {result.id: result for _, response in await self.first() for result in response.results}

    def unseen(self) -> str:
        """Says what nothing was seen of, with the remedy, by the answers so far; empty: there were scores."""
        outcomes = [result.WhichOneof("outcome") for _, response in self._first for result in response.results]
        if not outcomes or set(outcomes) != {"error"}:
            return ""
        return (
            "every item was answered by an error, so nothing of its scores was seen; give --items FILE with items that "
            "it can score"
        )

    def _error(self, error: grpc.aio.AioRpcError, method: str) -> RoleCallError:
        return status.to_error(
            error.code(), error.details(), error.trailing_metadata(), target=self.peer.address, method=method
        )
