"""Acting in an environment, and not believing it blindly: a rollout's side of the contract.

Owns the deadlines of each call, what is repeated, the keeping of leases, and whether the environment is away. A failure
is one of two: EnvironmentAwayError, nobody is to blame and it is waited for; or EpisodeLostError, this episode is over
and nothing of it may be trained on. InvalidInputError says that the task can never be begun. Never a number in place of
a failure. Bounds: as many sessions as the caller opens, and one call of each at a time.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc

from rolecall.environment.answers import (
    believe_answer,
    believe_opening,
    believe_run,
    reward_problem,
    spec_problem,
)
from rolecall.errors import (
    DeadlineError,
    EnvironmentAwayError,
    EpisodeLostError,
    InvalidInputError,
    RateLimitedError,
    RoleCallError,
    UnauthenticatedError,
    UnavailableError,
    VersionMismatchError,
)
from rolecall.rpc import deadlines
from rolecall.rpc.channel import open_channel
from rolecall.rpc.tls import token_of
from rolecall.scoring.backoff import RateLimit
from rolecall.settings import EnvironmentSection, RpcSection
from rolecall.v1 import environment_pb2, environment_pb2_grpc, trajectory_pb2

logger = logging.getLogger(__name__)
T = TypeVar("T")

RESET_S, STEP_S, CLOSE_S = 60.0, 30.0, 10.0
"""Deadlines of an environment that names none."""
DESCRIBE_S = 5.0
"""Deadline of Describe."""
NUM_TRIES = 3
"""A call gets this share of its deadline, so that a lost reply leaves time to ask for it again."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 2.0
"""Pauses before a call is repeated double from the first to the longest."""
NOBODY_S = 30.0
"""Longest time for which a call is repeated whose connection breaks each time, before Describe says whether anybody is
there: an agent's run may take an hour, and one whose environment is away would hold its group for as long.
"""
AWAY_S = 1.0
"""Pause before an environment that is away is asked again."""
_MISPLACED = (UnauthenticatedError, VersionMismatchError)
"""Another server answers at the address, or one that does not know us."""


class EnvironmentClient:
    """A client of one environment behind one channel. Used from one event loop; `close` at the end."""

    def __init__(self, channel: grpc.aio.Channel, address: str) -> None:
        """`address` names it in messages. Closes the channel with itself."""
        self.stub = environment_pb2_grpc.EnvironmentServiceStub(channel)
        self._channel = channel
        self.address = address
        self._spec: environment_pb2.DescribeEnvironmentResponse | None = None
        self._limit = RateLimit()
        self._away_until = float("-inf")
        self._is_told_away = False
        self._sessions: set[EpisodeSession] = set()
        self._ending: set[asyncio.Task[Any]] = set()
        self._keeping: asyncio.Task[None] | None = None

    @property
    def spec(self) -> environment_pb2.DescribeEnvironmentResponse:
        """Returns what it said it is; `describe` first."""
        assert self._spec is not None, "describe first"
        return self._spec

    @property
    def max_sessions(self) -> int:
        """Sessions that it says it has at a time; 0: it names no bound, or has not described itself yet."""
        return 0 if self._spec is None else self._spec.max_sessions

    @property
    def num_open(self) -> int:
        """Sessions of this client that were begun and did not end."""
        return len(self._sessions)

    @property
    def num_ending(self) -> int:
        """Returns how many of them are being closed."""
        return len(self._ending)

    async def describe(self) -> environment_pb2.DescribeEnvironmentResponse:
        """Asks what it is. EnvironmentAwayError when nobody answers, or when it is not what it was within this run."""
        try:
            spec = await self.stub.Describe(environment_pb2.DescribeEnvironmentRequest(), timeout=DESCRIBE_S)
        except RoleCallError as error:
            raise self._is_away(f"does not describe itself: {error.message}") from error
        problem = spec_problem(spec)
        if problem:
            raise self._is_away(f"cannot be used: it {problem}")
        if self._spec is not None and _meaning(spec) != _meaning(self._spec):
            raise self._is_away("describes another environment than before; put it back, or begin another run")
        self._spec = spec
        return spec

    async def num_free(self) -> int | None:
        """Sessions that may be begun now, as far as this client knows; 0 while it is away or has refused one; None when
        it names no bound.
        """
        if time.monotonic() < self._away_until or self._limit.pause_s() > 0:
            return 0
        if self._spec is None or self._away_until > 0:
            try:
                await self.describe()
            except EnvironmentAwayError as error:
                if not self._is_told_away:  # once, not once a second for as long as it takes
                    logger.warning("%s; it is asked again until it answers", error.message)
                    self._is_told_away = True
                return 0
            self._away_until = float("-inf")
            if self._is_told_away:
                logger.warning("the environment at %s answers again", self.address)
                self._is_told_away = False
        return max(0, self.spec.max_sessions - self.num_open) if self.spec.max_sessions else None

    def session(self, name: str, group: str, fence: int) -> "EpisodeSession":
        """A session that is not begun."""
        if self._keeping is None:
            with deadlines.without_deadline():  # it outlives the call for which the first session is begun
                self._keeping = asyncio.create_task(self._keep())
        session = EpisodeSession(self, name, group, fence)
        self._sessions.add(session)
        return session

    async def close_older(self, group: str, fence: int) -> None:
        """Closes what earlier attempts at a group left open. EnvironmentAwayError, EpisodeLostError."""
        request = environment_pb2.CloseOlderRequest(group=group, fence=fence)
        closed = await self.repeated(
            lambda timeout_s: self.stub.CloseOlder(request, timeout=timeout_s), self.close_s, f"CloseOlder of {group}"
        )
        if closed.num_closed:
            logger.info("%d sessions of an earlier attempt at %s are closed", closed.num_closed, group)

    async def close(self) -> None:
        """Ends what is open, within one deadline, and the channel."""
        if self._keeping is not None:
            self._keeping.cancel()
        for session in list(self._sessions):
            session.leave()
        if self._ending:
            await asyncio.wait(self._ending, timeout=CLOSE_S)
        await self._channel.close()

    @property
    def close_s(self) -> float:
        """Deadline of a Close."""
        return self.spec.close_timeout_s or CLOSE_S

    # --- for sessions -------------------------------------------------------------------------------

    async def repeated(
        self, call: Callable[[float], Awaitable[T]], timeout_s: float, what: str, *, opens: bool = False
    ) -> T:
        """The answer to `call`, which is given its deadline and is made again while that may help, for `timeout_s`.
        `opens`: it asks for a place, so that a lack of them ends it at once. EnvironmentAwayError, EpisodeLostError,
        InvalidInputError.
        """
        ends_at, pause_s = time.monotonic() + timeout_s, FIRST_PAUSE_S
        broken_since = math.inf
        while True:
            called_at = time.monotonic()
            try:
                answer = await call(max(0.01, min(timeout_s / NUM_TRIES, ends_at - called_at)))
            except (UnavailableError, DeadlineError, RateLimitedError) as error:
                if opens and isinstance(error, RateLimitedError):
                    self._limit.refused(called_at, float(error.details.get("retry_after_s", 0.0)))
                    full = f"the environment at {self.address} is full: {error.message}"
                    raise EnvironmentAwayError(full) from error
                if time.monotonic() + pause_s >= ends_at:
                    raise await self._verdict(what, timeout_s, error) from error
                now = time.monotonic()
                broken_since = min(broken_since, now) if isinstance(error, UnavailableError) else math.inf
                if now - broken_since >= NOBODY_S:
                    await self.describe()
                    broken_since = math.inf
                await asyncio.sleep(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            except _MISPLACED as error:
                raise self._is_away(f"refused {what}: {error.message}") from error
            except InvalidInputError:
                raise
            except RoleCallError as error:
                raise EpisodeLostError(f"{what} failed at {self.address}: {error.reason}: {error.message}") from error
            else:
                if opens:
                    self._limit.answered()
                return answer

    async def _verdict(self, what: str, timeout_s: float, error: RoleCallError) -> RoleCallError:
        """Returns who is to blame for a call that was not answered in time: an environment that does not describe
        itself either is away; else this episode hangs in it.
        """
        try:
            await self.describe()
        except EnvironmentAwayError as away:
            return away
        return EpisodeLostError(f"{what} was not answered within {timeout_s:g} s: {error.message}")

    def _is_away(self, why: str) -> EnvironmentAwayError:
        self._away_until = time.monotonic() + AWAY_S
        return EnvironmentAwayError(f"the environment at {self.address} {why}")

    def ended(self, session: "EpisodeSession", closing: "asyncio.Task[Any] | None" = None) -> None:
        """A session is no more, once `closing` is done."""
        if closing is None:
            self._sessions.discard(session)
            return
        self._ending.add(closing)
        closing.add_done_callback(self._ending.discard)
        closing.add_done_callback(lambda _: self._sessions.discard(session))

    async def _keep(self) -> None:
        """Keeps the leases of sessions that no call was made of for a third of one, for as long as the client lives."""
        while True:
            await asyncio.sleep(min(1.0, self.spec.lease_s / 6) if self._spec is not None else 1.0)
            for session in list(self._sessions):
                session.keep()


class EpisodeSession:
    """One episode. `reset`, then `step` by step, then `close`; `leave` ends it wherever it is, without waiting."""

    def __init__(self, client: EnvironmentClient, name: str, group: str, fence: int) -> None:
        self.name = name
        self._client = client
        self._group = group
        self._fence = fence
        self._turn = 0
        self._last: Callable[[float], Awaitable[Any]] | None = None
        """The last call, which may be made again to keep the lease; None while one is under way."""
        self._called_at = time.monotonic()
        self._kept: asyncio.Task[None] | None = None
        self._opening: environment_pb2.ResetResponse | None = None
        """The answer to Reset, until the next call."""
        self._is_replaced = False
        """Whether the environment has begun another episode under this name."""
        self._is_begun = False
        self._is_ended = False

    async def reset(
        self, task: environment_pb2.Task, seed: int, *, shows_images: bool = False
    ) -> environment_pb2.ResetResponse:
        """Begins the episode; `shows_images`: the policy is shown those that are answered. Errors as
        EnvironmentClient.repeated.
        """
        request = environment_pb2.ResetRequest(
            session=self.name,
            group=self._group,
            fence=self._fence,
            task=task,
            seed=seed,
            shows_images=shows_images,
        )
        self._is_begun = True
        client, spec = self._client, self._client.spec
        opening = await self._call(
            lambda timeout_s: client.stub.Reset(request, timeout=timeout_s),
            spec.reset_timeout_s or RESET_S,
            "Reset",
            opens=True,
        )
        believe_opening(opening, spec)
        self._opening = opening
        return opening

    async def step(
        self, text: str, *, is_cut: bool, tool_calls: Sequence[environment_pb2.ToolCall] = ()
    ) -> environment_pb2.StepResponse:
        """Takes the next turn. Errors as EnvironmentClient.repeated."""
        self._turn += 1
        action = environment_pb2.Action(text=text, is_cut=is_cut, tool_calls=tool_calls)
        request = environment_pb2.StepRequest(session=self.name, turn=self._turn, action=action)
        client, spec = self._client, self._client.spec
        answer = await self._call(
            lambda timeout_s: client.stub.Step(request, timeout=timeout_s),
            spec.step_timeout_s or STEP_S,
            f"turn {self._turn}",
        )
        believe_answer(answer, spec)
        return answer

    async def run(self, request: environment_pb2.RunEpisodeRequest) -> environment_pb2.RunEpisodeResponse:
        """Has the environment's agent run the episode; waits for a Close's time longer than request.deadline_s. Errors
        as EnvironmentClient.repeated.
        """
        client = self._client
        request.session = self.name
        answer = await self._call(
            lambda timeout_s: client.stub.RunEpisode(request, timeout=timeout_s),
            request.deadline_s + client.close_s,
            "the run",
        )
        believe_run(answer, client.spec)
        return answer

    async def grade(self) -> trajectory_pb2.EpisodeReward | None:
        """Ends the episode where it stands and returns its reward; None from an environment without rewards. Errors as
        EnvironmentClient.repeated.
        """
        request = environment_pb2.CloseRequest(session=self.name, grade=True)
        client = self._client
        answer: environment_pb2.CloseResponse = await self._call(
            lambda timeout_s: client.stub.Close(request, timeout=timeout_s), client.close_s, "its grade"
        )
        self._is_ended = True
        client.ended(self)
        problem = reward_problem(answer, client.spec)
        if problem:
            raise EpisodeLostError(f"environment {client.spec.name!r} {problem}")
        return answer.reward if answer.HasField("reward") else None

    def leave(self) -> None:
        """Has the session closed, beside whatever comes next. Idempotent."""
        if self._is_ended:
            self._client.ended(self)
            return
        self._is_ended = True
        if not self._is_begun:
            self._client.ended(self)
            return
        with deadlines.without_deadline():  # who left may have had no time any more
            closing = asyncio.create_task(self._close())
        self._client.ended(self, closing)

    async def _close(self) -> None:
        request = environment_pb2.CloseRequest(session=self.name)
        try:
            await self._client.repeated(
                lambda timeout_s: self._client.stub.Close(request, timeout=timeout_s),
                self._client.close_s,
                "Close",
            )
        except RoleCallError as error:
            logger.warning("session %s is left to its lease: %s", self.name, error.message)

    async def _call(
        self, call: Callable[[float], Awaitable[T]], timeout_s: float, what: str, *, opens: bool = False
    ) -> T:
        self._last = None
        if self._kept is not None:
            await asyncio.wait({self._kept})  # bounded: by the deadline that the call was given
        if self._is_replaced:
            raise EpisodeLostError(
                f"environment {self._client.spec.name!r} was started again, and began {self.name} anew with another "
                "opening"
            )
        self._opening = None
        try:
            return await self._client.repeated(call, timeout_s, f"{what} of {self.name}", opens=opens)
        finally:
            self._last, self._called_at = call, time.monotonic()

    def keep(self) -> None:
        """Makes the last call again, whose answer is known, where a third of the lease is over since."""
        due = self._called_at + self._client.spec.lease_s / 3
        if self._last is None or self._is_ended or time.monotonic() < due:
            return
        self._called_at = time.monotonic()
        self._kept = asyncio.create_task(self._heard(self._last(DESCRIBE_S)))

    async def _heard(self, call: Awaitable[Any]) -> None:
        """Waits for an answer that says nothing new; what is wrong, the next call says. A Reset may find no session, in
        an environment that was started again, and begin another episode.
        """
        try:
            answer = await call  # bounded: by the deadline that the call was given
        except RoleCallError as error:
            logger.debug("a lease is not kept: %s", error.message)
            return
        self._is_replaced = self._opening is not None and answer != self._opening


def _meaning(spec: environment_pb2.DescribeEnvironmentResponse) -> Sequence[Any]:
    """Returns what gives its answers their meaning."""
    parts = {part.name: part.SerializeToString(deterministic=True) for part in spec.components}
    return (
        spec.reward.SerializeToString(deterministic=True),
        parts,
        spec.turn_rewards,
        spec.runs_episodes,
        tuple(spec.roles),
    )


def open_environment(section: EnvironmentSection, rpc: RpcSection) -> EnvironmentClient:
    """Opens a client of an environment of the run. ConfigError as environment_channel."""
    return EnvironmentClient(environment_channel(section, rpc), section.address)


def environment_channel(section: EnvironmentSection, rpc: RpcSection) -> grpc.aio.Channel:
    """A channel to an environment of the run. ConfigError for one beyond this machine without TLS or a mesh, and for an
    unreadable token or roots.
    """
    return open_channel(
        section.address,
        rpc,
        tls=True if section.tls else None,
        bearer_token=token_of(section.bearer_token_file),
        ca_file=None if section.ca_file == "system" else section.ca_file,
        ours=False,
    )
