"""The sessions of an environment: who is in which, at which turn, and until when.

Owns what makes a call safe to repeat: a session's work is a task of its own, which a repeated call waits for, and whose
result is the recorded answer. Also leases and their reaper, places, and what is remembered of closed sessions. Knows no
servers. Bounds: max_sessions sessions, one thread each; what is remembered is forgotten after two leases.
"""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from rolecall.environment import answers
from rolecall.environment.env import Action, Agent, Env, Policy
from rolecall.errors import (
    EpisodeLostError,
    FencedError,
    InvalidInputError,
    RateLimitedError,
    RoleCallError,
    SessionLostError,
    TurnConflictError,
)
from rolecall.rpc import deadlines
from rolecall.v1 import environment_pb2

logger = logging.getLogger(__name__)
T = TypeVar("T")

MAX_NAME_CHARS = 512
"""Longest name of a session or a group."""
LOOK_S = 1.0
"""Longest pause between two looks for sessions that nobody calls."""
RETRY_AFTER_S = 1.0
"""What a caller that finds no place is told to wait."""


@dataclass(eq=False)
class _Session:
    name: str
    group: str
    fence: int
    touched_at: float
    env: Env | None = None
    """Made by its first work."""
    booting: "asyncio.Task[environment_pb2.ResetResponse]" = field(init=False)
    turn: int = 0
    """The last turn that was begun."""
    action: bytes = b""
    """Digest of its action."""
    stepping: "asyncio.Task[environment_pb2.StepResponse] | None" = None
    """The work of the last turn; done, its answer."""
    closing: "asyncio.Task[environment_pb2.CloseResponse] | None" = None
    num_calls: int = 0

    @property
    def working(self) -> "asyncio.Task[Any]":
        """The newest work in it."""
        return self.stepping or self.booting

    @property
    def failure(self) -> BaseException | None:
        """Returns why it ended before its end; None while nothing failed."""
        return self.working.exception() if self.working.done() else None

    @property
    def last(self) -> environment_pb2.StepResponse | None:
        """The answer to the last turn; None before there is one."""
        if self.stepping is None or not self.stepping.done() or self.stepping.exception() is not None:
            return None
        return self.stepping.result()  # bounded: it is done already

    @property
    def is_over(self) -> bool:
        """Whether the episode came to its end."""
        return self.last is not None and self.last.state != answers.CONTINUES


class Sessions:
    """The sessions of one environment. Used from one event loop; `run` beside it, `close` at the end."""

    def __init__(
        self,
        make: Callable[[], Env],
        spec: environment_pb2.DescribeEnvironmentResponse,
    ) -> None:
        """`make` makes the environment of one episode. `spec` has a max_sessions above 0."""
        self.spec = spec
        self._make = make
        self._open: dict[str, _Session] = {}
        self._closed: dict[str, tuple[float, asyncio.Task[environment_pb2.CloseResponse] | None]] = {}
        """Sessions that were closed: until when that is remembered, and what Close answered."""
        self._fences: dict[str, tuple[float, int]] = {}
        """The highest fence by group, and until when it is remembered."""
        self._threads = ThreadPoolExecutor(spec.max_sessions, "environment")

    @property
    def num_open(self) -> int:
        """Sessions that take a place."""
        return len(self._open)

    async def run(self) -> None:
        """Closes sessions that nobody calls, and forgets closed ones. Runs until cancelled."""
        while True:
            await asyncio.sleep(min(LOOK_S, self.spec.lease_s / 4))
            self.reap()

    def reap(self) -> None:
        """Looks once."""
        now = time.monotonic()
        for session in list(self._open.values()):
            idle = session.num_calls == 0 and session.closing is None and session.working.done()
            if idle and now - session.touched_at > self.spec.lease_s:
                logger.warning("session %s is closed: nobody called for %g s", session.name, self.spec.lease_s)
                self._begin_close(session, grade=False)
        self._closed = {name: kept for name, kept in self._closed.items() if kept[0] > now}
        self._fences = {group: kept for group, kept in self._fences.items() if kept[0] > now}

    async def close(self) -> None:
        """Closes every session. Work that does not end is left behind."""
        for session in list(self._open.values()):
            self._begin_close(session, grade=False)
        closing = [session.closing for session in self._open.values() if session.closing is not None]
        if closing:
            await asyncio.wait(closing, timeout=LOOK_S)
        self._threads.shutdown(wait=False, cancel_futures=True)

    # --- calls --------------------------------------------------------------------------------------

    async def reset(self, request: environment_pb2.ResetRequest) -> environment_pb2.ResetResponse:
        """Implements EnvironmentService.Reset."""
        _check_name(request.session, "session")
        _check_name(request.group, "group")
        session = self._open.get(request.session)
        if session is None or session.closing is not None:
            session = self._begin(request)
        if session.failure is not None:
            raise session.failure
        with self._calling(session):
            # bounded: by the caller's deadline; the work goes on without the caller
            return await asyncio.shield(session.booting)

    async def step(self, request: environment_pb2.StepRequest) -> environment_pb2.StepResponse:
        """Implements EnvironmentService.Step."""
        session = self._open.get(request.session)
        if session is None or session.closing is not None:
            raise self._lost(request.session)
        stepping = self._turn(session, request)
        with self._calling(session):
            # bounded: by the caller's deadline; the work goes on without the caller
            return await asyncio.shield(stepping)

    async def run_episode(self, request: environment_pb2.RunEpisodeRequest) -> environment_pb2.RunEpisodeResponse:
        """Implements EnvironmentService.RunEpisode."""
        session = self._open.get(request.session)
        if session is None or session.closing is not None:
            raise self._lost(request.session)
        running = self._running(session, request)
        with self._calling(session):
            # bounded: by the caller's deadline; the work goes on without the caller
            over = await asyncio.shield(running)
        return environment_pb2.RunEpisodeResponse(
            state=over.state, reward=over.reward if over.HasField("reward") else None
        )

    async def end(self, request: environment_pb2.CloseRequest) -> environment_pb2.CloseResponse:
        """Implements EnvironmentService.Close."""
        _check_name(request.session, "session")
        if (session := self._open.get(request.session)) is not None:
            closing = self._begin_close(session, request.grade)
        elif request.session in self._closed:
            kept = self._closed[request.session][1]
            if kept is None and request.grade:
                raise self._lost(request.session)
            if kept is None:
                return environment_pb2.CloseResponse()
            closing = kept
        elif request.grade:
            raise self._lost(request.session)
        else:
            self._closed[request.session] = (self._forgotten_at(), None)  # a Reset that comes late opens nothing
            return environment_pb2.CloseResponse()
        # bounded: by the caller's deadline; the work goes on without the caller
        return await asyncio.shield(closing)

    def close_older(self, request: environment_pb2.CloseOlderRequest) -> int:
        """Implements EnvironmentService.CloseOlder; how many sessions it closes."""
        _check_name(request.group, "group")
        self._note_fence(request.group, request.fence)
        older = [
            session
            for session in self._open.values()
            if session.group == request.group and session.fence < request.fence and session.closing is None
        ]
        for session in older:
            self._begin_close(session, grade=False)
        return len(older)

    # --- one session --------------------------------------------------------------------------------

    def _begin(self, request: environment_pb2.ResetRequest) -> _Session:
        if request.session in self._open or request.session in self._closed:
            raise SessionLostError(f"session {request.session} was closed; begin an episode in another")
        fence = self._note_fence(request.group, request.fence)
        if request.fence < fence:
            raise FencedError(
                f"session {request.session} has the fence {request.fence}, and a newer attempt at group "
                f"{request.group} has {fence}; leave it to that"
            )
        if len(self._open) >= self.spec.max_sessions:
            raise RateLimitedError(
                f"all {self.spec.max_sessions} sessions are open; ask again when one was closed",
                retry_after_s=str(RETRY_AFTER_S),
            )
        session = _Session(request.session, request.group, request.fence, time.monotonic())
        self._open[request.session] = session
        session.booting = self._work(session, lambda: self._boot(session, request), "reset")
        return session

    def _boot(self, session: _Session, request: environment_pb2.ResetRequest) -> environment_pb2.ResetResponse:
        session.env = env = self._make()
        if request.shows_images:  # an Env may be frozen
            env.shows_images = True
        return answers.opening_of(env.reset(answers.task_of(request.task), request.seed), self.spec)

    def _step(self, session: _Session, action: Action) -> environment_pb2.StepResponse:
        assert session.env is not None
        return answers.answer_of(session.env.step(action), self.spec)

    def _turn(
        self, session: _Session, request: environment_pb2.StepRequest
    ) -> "asyncio.Task[environment_pb2.StepResponse]":
        """The work of the turn that is asked for: begun now, under way, or done."""
        if self.spec.runs_episodes:
            raise TurnConflictError(f"environment {self.spec.name!r} runs episodes by itself; call RunEpisode")
        action = hashlib.sha256(request.action.SerializeToString(deterministic=True)).digest()
        if request.turn == session.turn and session.stepping is not None and action == session.action:
            return session.stepping
        failure = session.failure
        if failure is not None:
            raise failure
        ready = session.working.done() and not session.is_over
        if request.turn != session.turn + 1 or not ready:
            raise TurnConflictError(
                f"session {session.name} was asked for turn {request.turn} and stands after turn {session.turn}"
                f"{', its last' if session.is_over else ''}; it takes the next one, or repeats the last with the "
                "same action"
            )
        taken = answers.action_of(request.action)
        session.turn, session.action = request.turn, action
        session.stepping = self._work(session, lambda: self._step(session, taken), f"step, turn {request.turn}")
        return session.stepping

    def _running(
        self, session: _Session, request: environment_pb2.RunEpisodeRequest
    ) -> "asyncio.Task[environment_pb2.StepResponse]":
        """The work of the agent: begun now, under way, or done. It is the session's only turn."""
        if not self.spec.runs_episodes:
            raise TurnConflictError(f"environment {self.spec.name!r} runs no episodes by itself; call Step")
        asked = hashlib.sha256(request.SerializeToString(deterministic=True)).digest()
        if session.stepping is not None and session.action == asked:
            return session.stepping
        failure = session.failure
        if failure is not None:
            raise failure
        if session.stepping is not None or not session.working.done():
            raise TurnConflictError(
                f"session {session.name} {'is run already' if session.stepping else 'has not begun yet'}; its episode "
                "is run once, after Reset answered"
            )
        policy = Policy(
            request.base_url, request.api_key, request.model, request.max_calls, request.max_tokens, request.deadline_s
        )
        session.turn, session.action = 1, asked
        session.stepping = self._work(session, lambda: self._run(session, policy), "run")
        return session.stepping

    def _run(self, session: _Session, policy: Policy) -> environment_pb2.StepResponse:
        assert isinstance(session.env, Agent)
        return answers.ending_of(session.env.run(policy), self.spec)

    def _begin_close(self, session: _Session, grade: bool) -> "asyncio.Task[environment_pb2.CloseResponse]":
        if session.closing is None:
            with deadlines.without_deadline():
                session.closing = asyncio.create_task(self._end(session, grade))
            session.closing.add_done_callback(_look_at)
        return session.closing

    async def _end(self, session: _Session, grade: bool) -> environment_pb2.CloseResponse:
        """Waits for what is under way, grades, and frees the place."""
        try:
            await asyncio.wait({session.working})  # bounded: by nothing but the environment, whose place it keeps
            return await self._graded(session) if grade else environment_pb2.CloseResponse()
        finally:
            try:
                if session.env is not None:
                    await self._in_thread(session.env.close)
            except Exception:  # the entry point of code that is not ours
                logger.warning("session %s: close raised", session.name, exc_info=True)
            del self._open[session.name]
            self._closed[session.name] = (self._forgotten_at(), session.closing)

    async def _graded(self, session: _Session) -> environment_pb2.CloseResponse:
        if session.failure is not None:
            raise session.failure
        if session.is_over and session.last is not None:
            response = environment_pb2.CloseResponse()
            if session.last.HasField("reward"):
                response.reward.CopyFrom(session.last.reward)
            return response
        if not self.spec.HasField("reward"):
            return environment_pb2.CloseResponse()
        return await self._believed(session, lambda: self._grade(session), "grade")

    def _grade(self, session: _Session) -> environment_pb2.CloseResponse:
        assert session.env is not None
        response = environment_pb2.CloseResponse(reward=answers.reward_of(session.env.grade()))
        problem = answers.reward_problem(response, self.spec)
        if problem:
            raise EpisodeLostError(f"environment {self.spec.name!r} {problem}")
        return response

    def _work(self, session: _Session, call: Callable[[], T], what: str) -> "asyncio.Task[T]":
        """Begins work in the session that outlives the call it is done for."""
        with deadlines.without_deadline():
            work = asyncio.create_task(self._believed(session, call, what))
        work.add_done_callback(_look_at)
        work.add_done_callback(lambda _: self._touch(session))
        return work

    async def _believed(self, session: _Session, call: Callable[[], T], what: str) -> T:
        def work() -> T:
            try:
                return call()
            except RoleCallError:
                raise
            # the entry point of code that is not ours; the loop would end with a SystemExit that it raised
            except BaseException as error:
                logger.warning("session %s: %s raised", session.name, what, exc_info=error)
                raise EpisodeLostError(
                    f"environment {self.spec.name!r} raised {type(error).__name__} in {what}: {error}"
                ) from error

        return await self._in_thread(work)

    async def _in_thread(self, call: Callable[[], T]) -> T:
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, call)

    @contextmanager
    def _calling(self, session: _Session) -> Iterator[None]:
        session.num_calls += 1
        try:
            yield
        finally:
            session.num_calls -= 1
            self._touch(session)

    def _touch(self, session: _Session) -> None:
        session.touched_at = time.monotonic()

    def _note_fence(self, group: str, fence: int) -> int:
        """The highest fence of the group, with this one."""
        highest = max(fence, self._fences.get(group, (0.0, fence))[1])
        self._fences[group] = (self._forgotten_at(), highest)
        return highest

    def _forgotten_at(self) -> float:
        return time.monotonic() + 2 * self.spec.lease_s

    def _lost(self, name: str) -> SessionLostError:
        return SessionLostError(
            f"there is no session {name}: it was closed, nobody called for {self.spec.lease_s:g} s, or the "
            "environment was started again; begin an episode in another"
        )


def _check_name(name: str, what: str) -> None:
    if not 0 < len(name) <= MAX_NAME_CHARS or not (name.isascii() and name.isprintable()):
        raise InvalidInputError(f"{what} {name[:64]!r} is no name: 1 to {MAX_NAME_CHARS} printable ASCII characters")


def _look_at(work: "asyncio.Task[Any]") -> None:
    """Callers may have left; a failure is then nobody's."""
    if not work.cancelled():
        work.exception()
