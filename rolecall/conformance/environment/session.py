"""A kit's connection to one EnvironmentService: what it says of itself, the sessions that are opened in it and closed
again, and the first play of every row, with which later ones are compared.
"""

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import Message

from rolecall.conformance.check import VerdictError, failed, said, skipped
from rolecall.conformance.environment.call import Call, Closes, HungError, LeftError, Life
from rolecall.conformance.environment.policy import MODEL, PolicyEndpoint, Script
from rolecall.conformance.environment.rows import Row, Rows
from rolecall.conformance.peer import CONNECT_S, Peer, told
from rolecall.environment.answers import CONTINUES
from rolecall.environment.client import CLOSE_S, RESET_S, STEP_S
from rolecall.errors import ConfigError
from rolecall.v1 import environment_pb2, environment_pb2_grpc

T = TypeVar("T")
Turns: TypeAlias = Sequence[environment_pb2.StepResponse]
NOWHERE = "http://127.0.0.1:1/v1"
"""A URL on this machine where nobody listens."""
RUN_S = 30.0
"""Seconds that an agent has for an episode."""
MAX_CALLS = 16
"""Calls of the policy that it has."""
MAX_TOKENS = 100_000
"""Tokens of a conversation that it is told; none are counted here."""
HUNG_S = 1.0
"""Least deadline of the Close at a session's end once one has hung; twice as long as any that was answered took."""
OVER = (environment_pb2.EPISODE_STATE_TERMINATED, environment_pb2.EPISODE_STATE_TRUNCATED)


@dataclass(frozen=True)
class Play:
    """An episode as it went."""

    row: Row
    opening: environment_pb2.ResetResponse
    turns: Turns
    """What each action of the row was answered, up to the end of the episode."""

    @property
    def is_over(self) -> bool:
        """Whether the environment ended it."""
        return bool(self.turns) and self.turns[-1].state in OVER

    def is_as(self, other: "Play") -> bool:
        """Whether both went the same way, to the bit."""
        return same(self.opening, other.opening) and list(map(_bytes, self.turns)) == list(map(_bytes, other.turns))


@dataclass(frozen=True)
class Run:
    """An episode that its agent ran."""

    row: Row
    answer: environment_pb2.RunEpisodeResponse
    script: Script
    """The policy that it asked."""


class Episode:
    """A session that the kit names and perhaps opens. Each method but `turn` makes one call."""

    def __init__(self, session: "EnvironmentSession", row: Row, group: str, fence: int, name: str) -> None:
        self.row = row
        self.group = group
        self.fence = fence
        self.name = name
        self._session = session
        self._life = Life(name, session.spec.lease_s, session.closes)

    def reset(self) -> Call:
        """Calls Reset."""
        request = environment_pb2.ResetRequest(
            session=self.name, group=self.group, fence=self.fence, task=self.row.task, seed=self.row.seed
        )
        return Call(self._session.stub.Reset(request, timeout=self._session.reset_s), self._life)

    def turn(self, turn: int, text: str) -> environment_pb2.StepRequest:
        """The request of a turn."""
        return environment_pb2.StepRequest(session=self.name, turn=turn, action=environment_pb2.Action(text=text))

    def step(self, turn: int, text: str) -> Call:
        """Calls Step."""
        return Call(self._session.stub.Step(self.turn(turn, text), timeout=self._session.step_s), self._life)

    def run(self, script: Script, *, longer_s: float = 0.0) -> Call:
        """Calls RunEpisode, for a policy by its key, with so much time more than runs have."""
        return self._run(self._session.policy.base_url, script.key, script.max_calls, longer_s)

    def run_nowhere(self) -> Call:
        """Calls RunEpisode with an endpoint where nobody listens."""
        return self._run(NOWHERE, "nobody", MAX_CALLS, 0.0)

    def _run(self, base_url: str, key: str, max_calls: int, longer_s: float) -> Call:
        deadline_s = self._session.run_s + longer_s
        request = environment_pb2.RunEpisodeRequest(
            session=self.name,
            base_url=base_url,
            api_key=key,
            model=MODEL,
            max_calls=max_calls,
            max_tokens=MAX_TOKENS,
            deadline_s=deadline_s,
        )
        return Call(self._session.stub.RunEpisode(request, timeout=deadline_s + self._session.close_s), self._life)

    def act(self, turn: int = 1) -> Call:
        """Takes a turn, or runs the episode without a policy: tells whether the session is there."""
        return self.run_nowhere() if self._session.spec.runs_episodes else self.step(turn, "hello")

    def close(self, *, grade: bool = False) -> Call:
        """Calls Close. VerdictError once one has hung."""
        if self._session.closes.hung:
            raise VerdictError(skipped(f"{self._session.closes.hung}, and no other is waited for"))
        return self.end(self._session.close_s, grade=grade)

    def end(self, timeout_s: float, *, grade: bool = False) -> Call:
        """Calls Close with this deadline, whatever has hung."""
        request = environment_pb2.CloseRequest(session=self.name, grade=grade)
        return Call(self._session.stub.Close(request, timeout=timeout_s), self._life, timeout_s)

    def close_older(self, fence: int) -> "grpc.aio.UnaryUnaryCall[Any, Any]":
        """Calls CloseOlder for its group."""
        request = environment_pb2.CloseOlderRequest(group=self.group, fence=fence)
        return self._session.stub.CloseOlder(request, timeout=self._session.close_s)


class EnvironmentSession:
    """A session with one EnvironmentService. `open` before anything else, `close` at the end."""

    def __init__(self, peer: Peer, rows: Rows, run_s: float = RUN_S) -> None:
        """`run_s`: seconds that an agent has for an episode."""
        self.peer = peer
        self.run_s = run_s
        self.rows = rows
        self.failed: set[str] = set()
        self.spec = environment_pb2.DescribeEnvironmentResponse()
        self.channel = peer.open()
        self.stub = environment_pb2_grpc.EnvironmentServiceStub(self.channel)
        self._run = f"conformance-{secrets.token_hex(8)}"
        self._numbers = itertools.count()
        self._plays: list[Play] = []
        self._graded: list[environment_pb2.CloseResponse | str] = []
        self.closes = Closes()
        self._runs: list[Run] = []
        self.policy = PolicyEndpoint()

    async def open(self) -> None:
        """Asks what the environment is; a RoleCallError when it does not say so within seconds."""
        call = self.stub.Describe(environment_pb2.DescribeEnvironmentRequest(), timeout=CONNECT_S)
        self.spec = await told(call, self.peer.address, "Describe")
        if self.spec.runs_episodes:
            self.policy.start()

    async def close(self) -> None:
        """Closes the connection, and the endpoint of the policy."""
        await self.channel.close(grace=0.0)
        await asyncio.to_thread(self.policy.close)

    async def is_there(self) -> bool:
        """Whether Describe is answered, asked within CONNECT_S."""
        call = self.stub.Describe(environment_pb2.DescribeEnvironmentRequest(), timeout=CONNECT_S)
        return await call.code() is not grpc.StatusCode.UNAVAILABLE  # bounded: by the call's deadline

    @property
    def reset_s(self) -> float:
        """Deadline of a Reset."""
        return self.spec.reset_timeout_s or RESET_S

    @property
    def step_s(self) -> float:
        """Deadline of a Step."""
        return self.spec.step_timeout_s or STEP_S

    @property
    def close_s(self) -> float:
        """Deadline of a Close."""
        return self.spec.close_timeout_s or CLOSE_S

    @asynccontextmanager
    async def episode(
        self, row: Row, of: Episode | None = None, *, index: int = 0, fence: int = 1
    ) -> AsyncIterator[Episode]:
        """A session for `row`, which is closed in the end: of the group of another one or its own, named as a run does,
        by its index in the group and the claim.
        """
        episode = self._named(row, of, index, fence)
        async with self._ending([episode]):
            yield episode

    @asynccontextmanager
    async def episodes(self, num: int) -> AsyncIterator[list[Episode]]:
        """Names `num` sessions of the first row, each in a group of its own, and closes them in the end."""
        async with self._ending([self._named(self.rows.played[0]) for _ in range(num)]) as episodes:
            yield episodes

    def _named(self, row: Row, of: Episode | None = None, index: int = 0, fence: int = 1) -> Episode:
        group = of.group if of is not None else f"{self._run}/{next(self._numbers)}"
        return Episode(self, row, group, fence, f"{group}/{index}/kit-{fence}")

    @asynccontextmanager
    async def _ending(self, episodes: list[Episode]) -> AsyncIterator[list[Episode]]:
        """Closes sessions in the end, all at once. HungError where that is the first Close that hangs."""
        try:
            yield episodes
        finally:
            hung_before = self.closes.hung
            timeout_s = max(HUNG_S, 2 * self.closes.longest_s) if hung_before else self.close_s
            for call in [episode.end(timeout_s) for episode in episodes]:
                await call.ended()
        if self.closes.hung != hung_before:
            raise HungError(failed(self.closes.hung))

    async def opened(self, episode: Episode) -> environment_pb2.ResetResponse:
        """Calls Reset. ConfigError where the environment can never begin the row: then the kit has nothing to play."""
        try:
            opening: environment_pb2.ResetResponse = await episode.reset()
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:
                raise
            raise ConfigError(
                f"the environment refuses {episode.row.name} ({error.details()}); give --items with rows of its data "
                "set, and mark those that it cannot begin with cannot_begin"
            ) from error
        return opening

    async def play(self, row: Row) -> Play:
        """Plays a row to the end of the episode or of its actions, and closes it without a grade."""
        async with self.episode(row) as episode:
            opening = await self.opened(episode)
            turns: list[environment_pb2.StepResponse] = []
            for turn, text in enumerate(row.actions, 1):
                turns.append(await episode.step(turn, text))
                if turns[-1].state != CONTINUES:
                    break
            return Play(row, opening, turns)

    async def plays(self) -> Sequence[Play]:
        """The first play of every row."""
        for row in self.rows.played[len(self._plays) :]:
            self._plays.append(await _in_time(self.play, row))
        return self._plays

    def script(self, row: Row, *, max_calls: int | None = None, status: int = 0, is_held: bool = False) -> Script:
        """A policy that says the actions of a row."""
        return self.policy.script(row.actions, max_calls=max_calls or MAX_CALLS, status=status, is_held=is_held)

    async def runs(self) -> Sequence[Run]:
        """The first run of every row."""
        for row in self.rows.played[len(self._runs) :]:
            self._runs.append(await _in_time(self._ran, row))
        return self._runs

    async def _ran(self, row: Row) -> Run:
        script = self.script(row)
        async with self.episode(row) as episode:
            await self.opened(episode)
            return Run(row, await episode.run(script), script)

    async def longest(self) -> Play:
        """The first play that has most turns."""
        return max(await self.plays(), key=lambda play: len(play.turns))

    async def graded(self) -> Sequence[environment_pb2.CloseResponse | str]:
        """Closes an episode without a turn, and one that goes on after its first, with a grade each; the answers, or
        the statuses they end with.
        """
        if not self._graded:
            longest = await self.longest()
            for num_turns in (0, 1) if len(longest.turns) > 1 else (0,):
                async with self.episode(longest.row) as episode:
                    await episode.reset()
                    if num_turns and (await episode.step(1, longest.row.actions[0])).state in OVER:
                        break  # it ended by chance, and what is over has no grade
                    try:
                        self._graded.append(await episode.close(grade=True))
                    except grpc.aio.AioRpcError as error:
                        self._graded.append(said(error))
                        break
        return self._graded

    def unseen(self) -> str:
        """Says what nothing was seen of, with the remedy, by the plays so far; empty: an episode came to its end."""
        if not self._plays or any(play.is_over for play in self._plays):
            return ""
        return (
            "no episode came to its end, so nothing of that and of its reward was seen; give --items FILE with actions "
            "that end one"
        )

    def is_as_before(self, play: Play, turn: int, answer: environment_pb2.StepResponse) -> bool:
        """Whether a turn was answered as in an earlier play; nothing can be said of one that chance decides."""
        return self.goes_by_chance or same(play.turns[turn - 1], answer)

    @property
    def goes_by_chance(self) -> bool:
        """Whether the same actions may be answered otherwise, so that an episode may end at any turn."""
        return not self.spec.deterministic or "describe.deterministic" in self.failed


async def _in_time(play: Callable[[Row], Awaitable[T]], row: Row) -> T:
    """Plays a row, and once more where a lease ended between two of its calls. They follow each other at once, so a
    pause of the kit's own explains it the first time. VerdictError, failed, for the second: nobody can play there.
    """
    with suppress(LeftError):
        return await play(row)
    try:
        return await play(row)
    except LeftError as left:
        raise VerdictError(
            failed(f"{row.name} was played twice, each call at once after the last: {left.verdict.seen}")
        ) from left


def same(one: Any, other: Any) -> bool:
    """Whether two messages are the same to the bit; NaN is as NaN."""
    return _bytes(one) == _bytes(other)


def _bytes(message: Any) -> bytes:
    return bytes(message.SerializeToString(deterministic=True))


def short(answer: Message) -> str:
    """An answer on one line, for people."""
    text = " ".join(str(answer).split())
    return f"{text[:120]}..." if len(text) > 120 else text or "nothing"
