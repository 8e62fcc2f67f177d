"""Rules of leases, which are looked at where they are short: one that is called stays, one that nobody calls ends."""

import asyncio
import time
from collections.abc import Callable

import grpc
from google.protobuf.message import Message

from rolecall.conformance.check import Status, Verdict, failed, passed, skipped
from rolecall.conformance.environment.call import Call, LeftError
from rolecall.conformance.environment.contract import CONTRACT
from rolecall.conformance.environment.describing import MOST_SESSIONS
from rolecall.conformance.environment.session import OVER, EnvironmentSession, same, short
from rolecall.conformance.environment.turns import REPEATED

LONGEST_LEASE_S = 10.0
"""The end of a longer lease is not waited for."""
PAUSE = 0.5
"""The share of a lease between two calls that keep it: the longest pause of RoleCall's own client."""
SLACK_S = 1.0
"""Seconds after a session must have ended that it may take on a busy machine."""


def too_long(session: EnvironmentSession) -> Verdict | None:
    """Skipped where a lease is too long to be waited for."""
    lease_s = session.spec.lease_s
    if lease_s <= LONGEST_LEASE_S:
        return None
    return skipped(f"its lease is {lease_s:g} s; serve it with one of at most {LONGEST_LEASE_S:g} s to see this")


@CONTRACT.rule(
    "session.lease",
    "EnvironmentService",
    "A session is not closed for its lease while a call of it is under way, or within lease_s after one ended, a "
    "repeated one too.",
    (*REPEATED, "reset.repeated"),
)
async def lease(session: EnvironmentSession) -> Verdict:
    """Repeats Reset for two leases."""
    unseen = too_long(session)
    if unseen:
        return unseen
    async with session.episode(session.rows.played[0]) as episode:
        return await _repeated(session.spec.lease_s, await episode.reset(), episode.reset)


@CONTRACT.rule(
    "step.kept",
    "EnvironmentService.Step",
    "Its answer is kept for as long as the session, whose caller asks again to keep the lease.",
    (*REPEATED, "session.lease"),
)
async def kept(session: EnvironmentSession) -> Verdict:
    """Repeats a turn for two leases, and takes the next one."""
    unseen = too_long(session)
    if unseen:
        return unseen
    play = await session.longest()
    if len(play.turns) < 2:
        return skipped("no episode has two turns")
    text, next_text, *_ = play.row.actions
    async with session.episode(play.row) as episode:
        await episode.reset()
        first = await episode.step(1, text)
        verdict = await _repeated(session.spec.lease_s, first, lambda: episode.step(1, text))
        if verdict.status is not Status.PASSED or first.state in OVER:
            return verdict
        answer = await episode.step(2, next_text)
        if not session.is_as_before(play, 2, answer):
            return failed(f"after a turn was repeated for {verdict.seen}, the next one was another: {short(answer)}")
    return verdict


async def _repeated(lease_s: float, first: Message, call: Callable[[], Call]) -> Verdict:
    """Repeats for two leases a call that was answered `first`. It has nothing to do, so one that ended beyond a lease
    proves nothing: it may have come as late.
    """
    started = ended_at = time.monotonic()
    while time.monotonic() < started + 2 * lease_s:
        await asyncio.sleep(PAUSE * lease_s)
        repeated = call()
        code = await repeated.status()
        paused_s = time.monotonic() - ended_at
        if code is not grpc.StatusCode.OK:
            said = f"a call {paused_s:.1f} s after the last one ended with {code.name}"
            return failed(said) if paused_s < lease_s else skipped(f"{said}, beyond its lease of {lease_s:g} s")
        again = await repeated  # bounded: it is done
        if not same(first, again):
            return failed(f"first {short(first)}, and repeated {paused_s:.1f} s after the last time {short(again)}")
        ended_at = time.monotonic()
    return passed(f"{2 * lease_s:g} s")


@CONTRACT.rule(
    "session.reaped",
    "EnvironmentService",
    "One that nobody called for longer is closed within another lease_s.",
    (*REPEATED, "step.conflict", "session.unknown"),
)
async def reaped(session: EnvironmentSession) -> Verdict:
    """Leaves every place's session for two leases and the time of a Close: they are gone, and their places are free."""
    unseen = too_long(session)
    if unseen:
        return unseen
    num = session.spec.max_sessions if session.spec.max_sessions <= MOST_SESSIONS else 1
    left_s = 2 * session.spec.lease_s + SLACK_S + session.closes.longest_s
    async with session.episodes(num or 1) as left, session.episodes(num or 1) as new:
        await asyncio.gather(*(episode.reset() for episode in left))
        await asyncio.sleep(left_s)
        calls = [episode.reset() for episode in new]
        codes = [await call.status() for call in calls]
        if any(code is not grpc.StatusCode.OK for code in codes):
            return failed(f"{left_s:.1f} s after the last call, places were not free: {codes[-1].name}")
        try:
            code = await left[0].act().status()
        except LeftError:
            return passed(f"{len(codes)} sessions were gone after {left_s:.1f} s")
    return failed(f"{left_s:.1f} s after the last call, a turn ended with {code.name}")
