"""Rules of what an environment says of itself, and of the places that it says it has."""

import asyncio
from contextlib import suppress

import grpc

from rolecall.conformance.check import Verdict, failed, passed, said, skipped, unless
from rolecall.conformance.environment.call import HungError
from rolecall.conformance.environment.contract import CONTRACT, TURNS
from rolecall.conformance.environment.session import EnvironmentSession
from rolecall.conformance.peer import CONNECT_S
from rolecall.environment.answers import spec_problem
from rolecall.v1 import environment_pb2, environment_pb2_grpc

MOST_SESSIONS = 128
"""More sessions at a time are not tried out."""
UNLIMITED_SESSIONS = 4
"""Sessions at a time that one without a limit of its own must open."""
NUM_ASKED = 8
"""Times that Describe is asked at once, on each of two connections."""


@CONTRACT.rule(
    "describe.usable",
    "DescribeEnvironmentResponse",
    "It has a name, components and splits with names of their own, least values that do not exceed the greatest ones, "
    "a lease, and no negative number of sessions or seconds.",
)
async def usable(session: EnvironmentSession) -> Verdict:
    """Looks for a description that contradicts itself."""
    return unless(spec_problem(session.spec), f"{session.spec.name!r}")


def _too_many(session: EnvironmentSession) -> Verdict | None:
    num = session.spec.max_sessions
    return skipped(f"{num} sessions at a time are not tried out") if num > MOST_SESSIONS else None


@CONTRACT.rule(
    "describe.sessions",
    "DescribeEnvironmentResponse.max_sessions",
    "That many are opened.",
    ("describe.usable",),
)
async def sessions(session: EnvironmentSession) -> Verdict:
    """Opens as many sessions at once as it says it has places; UNLIMITED_SESSIONS where it names no limit."""
    problem = None
    with suppress(HungError):  # close.place tells it
        problem = await filled(session)
    return _too_many(session) or unless(problem, f"{_num_places(session)} at a time")


@CONTRACT.rule(
    "close.place",
    "EnvironmentService.Close",
    "Ends a session and frees its place; a call under way ends first.",
    ("describe.usable", "describe.sessions"),
)
async def place(session: EnvironmentSession) -> Verdict:
    """Opens as many once more, after all were closed."""
    if session.closes.hung:
        return failed(session.closes.hung)
    return _too_many(session) or unless(await filled(session), f"{_num_places(session)} again")


def _num_places(session: EnvironmentSession) -> int:
    return session.spec.max_sessions or UNLIMITED_SESSIONS


async def filled(session: EnvironmentSession) -> str | None:
    """Fills every place at once, or UNLIMITED_SESSIONS, and empties them; returns what went wrong."""
    async with session.episodes(_num_places(session)) as episodes:
        opening = [asyncio.create_task(session.opened(episode)) for episode in episodes]
        await asyncio.wait(opening)  # bounded: by the calls' deadline
        for number, task in enumerate(opening, 1):
            try:
                await task  # bounded: it is done
            except grpc.aio.AioRpcError as error:
                return f"{number} of {len(opening)} sessions ended with {said(error)}"
    return None


@CONTRACT.rule(
    "reset.full",
    "EnvironmentService.Reset",
    "RESOURCE_EXHAUSTED, and nothing opened, when max_sessions are; google.rpc.RetryInfo may say how long to wait.",
    (*TURNS, "session.unknown", "reset.repeated"),
)
async def full(session: EnvironmentSession) -> Verdict:
    """Asks for one session more than there are places, and again when one is free."""
    unseen = _too_many(session) if session.spec.max_sessions else skipped("it names no limit")
    if unseen:
        return unseen
    async with session.episodes(session.spec.max_sessions + 1) as (last, *others):
        for _ in range(2):  # the first to boot waits for the last one: its lease begins anew
            await asyncio.gather(*(episode.reset() for episode in others))
        code = await last.reset().status()
        if code is not grpc.StatusCode.RESOURCE_EXHAUSTED:
            return failed(f"session {len(others) + 1} of {len(others)} ended with {code.name}")
        code = await last.act().status()
        if code is not grpc.StatusCode.NOT_FOUND:
            return failed(f"a turn of the session that was refused ended with {code.name}")
        await others[0].close()
        try:
            await last.reset()
        except grpc.aio.AioRpcError as error:
            return failed(f"after one was closed, the session that was refused ended with {said(error)}")
    return passed(f"session {len(others) + 1} of {len(others)}: RESOURCE_EXHAUSTED")


@CONTRACT.rule(
    "describe.deterministic",
    "DescribeEnvironmentResponse.deterministic",
    "Whether task, seed and actions determine every answer.",
    TURNS,
)
async def deterministic(session: EnvironmentSession) -> Verdict:
    """Plays every row again. It can be held only to a promise."""
    if not session.spec.deterministic:
        return skipped("it does not say so; later plays are then not compared with earlier ones")
    plays = await session.plays()
    for play in plays:
        again = await session.play(play.row)
        if not play.is_as(again):
            return failed(f"{play.row.name} went another way the second time, by the same seed and actions")
    return passed(f"{len(plays)} episodes twice")


@CONTRACT.rule("describe.stable", "EnvironmentService.Describe", "The answer stays the same while a run uses it.")
async def stable(session: EnvironmentSession) -> Verdict:
    """Asks again after everything else, many times at once and on another connection, too."""
    question = environment_pb2.DescribeEnvironmentRequest()
    async with session.peer.open() as other:
        stubs = [session.stub, environment_pb2_grpc.EnvironmentServiceStub(other)]
        answers = await asyncio.gather(
            *(stub.Describe(question, timeout=CONNECT_S) for stub in stubs for _ in range(NUM_ASKED))
        )
    for answer in answers:
        if answer != session.spec:
            return failed(f"first {' '.join(str(session.spec).split())}; later {' '.join(str(answer).split())}")
    return passed(f"{len(answers)} answers on two connections")
