"""A component whose scorer is an HTTP server: what every way of asking one shares.

Owns the attempts, the checks of what came back, and the order of outcomes. What is asked and how an answer is read is a
`Way`; when a call may be made, and what a status means, is rolecall/scoring/http.py's.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol, TypeAlias

from rolecall.errors import ConfigError, RoleCallError, ScorerError
from rolecall.scoring.exchange import believed, only
from rolecall.scoring.json_server import JsonServer
from rolecall.scoring.results import failure_of, result_of
from rolecall.scoring.retries import Retries
from rolecall.scoring.scores import Item, Outcome, Score
from rolecall.settings import CodeScorer, ExternalScorer, RpcSection
from rolecall.telemetry.scorers import ScorerMeter
from rolecall.v1 import reward_pb2
from services.reward.external.batches import OpenRlhf, Trl
from services.reward.external.judge import Judge
from services.reward.external.kserve import KServe
from services.reward.external.programs import Programs

Answer: TypeAlias = object | RoleCallError
"""What is believed if it is a number or a Score, or why there is none."""


class Way(Protocol):
    """One way of asking an HTTP server for scores."""

    @property
    def spec(self) -> reward_pb2.DescribeResponse:
        """The description of what it reads and returns."""
        ...

    async def look(self) -> None:
        """Returns when the server is there to score. Raises when it is not."""
        ...

    def parted(self, items: Sequence[reward_pb2.ScoreItem]) -> list[list[int]]:
        """Places of the items of each task, which is what `score` is given at once."""
        ...

    async def score(self, items: Sequence[Item]) -> Sequence[Answer]:
        """One answer per item, in order. Raises for all of them."""
        ...


class HttpComponent:
    """A named part of the reward that is asked over HTTP."""

    def __init__(self, name: str, way: Way, server: JsonServer, max_attempts: int, meter: ScorerMeter) -> None:
        self._name = name
        self._way = way
        self._server = server
        self._retries = Retries(max_attempts, meter, lambda: way.spec.whole_groups)
        self._is_known = False
        """Whether the server was there once."""

    @property
    def trouble(self) -> str:
        """The reason why it gives no scores at present; empty while it does."""
        return self._server.peer.trouble

    @property
    def described(self) -> reward_pb2.DescribeResponse | None:
        """The description; None before its server was there."""
        return self._way.spec if self._is_known else None

    async def describe(self) -> reward_pb2.DescribeResponse:
        """Returns what it reads and returns, once its server was there. Raises what the call raises."""
        if not self._is_known:
            await self._way.look()
            self._is_known = True
        return self._way.spec

    async def score(self, items: Sequence[reward_pb2.ScoreItem]) -> list[Outcome]:
        """One outcome per item, in order; retryable failures were tried max_attempts times."""
        return await self._retries.outcomes(self._attempt, items)

    async def close(self) -> None:
        """Closes the connections."""
        await self._server.close()

    async def _attempt(self, items: Sequence[reward_pb2.ScoreItem]) -> list[Outcome]:
        try:
            spec = await self.describe()
        except RoleCallError as error:
            return [self._server.peer.has_failed(error)] * len(items)
        sent = [only(item, spec) for item in items]
        parts = self._way.parted(sent)
        scored = await asyncio.gather(*(self._task([sent[place] for place in part]) for part in parts))
        outcomes = dict(
            pair for part, found in zip(parts, scored, strict=True) for pair in zip(part, found, strict=True)
        )
        return [outcomes[place] for place in range(len(items))]

    async def _task(self, items: Sequence[reward_pb2.ScoreItem]) -> list[Outcome]:
        spec = self._way.spec
        try:
            answers = await self._way.score([Item.from_proto(item) for item in items])
            results = [_result(item, answer, spec) for item, answer in zip(items, answers, strict=True)]
            return believed(reward_pb2.ScoreResponse(results=results), items, spec, self._name)
        except RoleCallError as error:
            return [self._server.peer.failure(error)] * len(items)


def open_http(
    name: str, scorer: ExternalScorer | CodeScorer, rpc: RpcSection, *, timeout_s: float, max_attempts: int
) -> HttpComponent:
    """The component `name`; close it at the end. ConfigError for an unreadable token or roots, and where either would
    not be safe on the way.
    """
    meter = ScorerMeter(name)
    way: Way
    if isinstance(scorer, CodeScorer):
        assert scorer.server is not None
        server = JsonServer(name, scorer.server, rpc, timeout_s=timeout_s)
        way = Programs(name, scorer, server, meter)
        return HttpComponent(name, way, server, max_attempts, meter)
    server = JsonServer(name, scorer, rpc, timeout_s=timeout_s)
    match scorer.kind:
        case "judge":
            way = Judge(name, scorer.asked, server, meter)
        case "openrlhf":
            way = OpenRlhf(name, scorer.range, server)
        case "trl":
            way = Trl(name, scorer.range, server)
        case "kserve":
            way = KServe(name, scorer.range, server)
        case "external":
            raise ConfigError(f"component {name!r}: an external scorer is called over gRPC")
    return HttpComponent(name, way, server, max_attempts, meter)


def _result(item: reward_pb2.ScoreItem, answer: Answer, spec: reward_pb2.DescribeResponse) -> reward_pb2.ScoreResult:
    try:
        if isinstance(answer, RoleCallError):
            raise answer
        if not isinstance(answer, int | float | Score) or isinstance(answer, bool):
            raise ScorerError(f"it answered {answer!r:.100}, which is no number")
        return result_of(item, answer, spec)
    except RoleCallError as error:
        return failure_of(item, error)
    except OverflowError:  # JSON has integers of any size
        return failure_of(item, ScorerError("it answered an integer that exceeds every float"))
