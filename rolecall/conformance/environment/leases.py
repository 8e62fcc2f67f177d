"""Rules of leases, which are looked at where they are short: one that is called stays, one that nobody calls ends."""

import asyncio
import time

import grpc

from rolecall.conformance.check import Verdict, failed, passed, skipped
from rolecall.conformance.environment.contract import CONTRACT
from rolecall.conformance.environment.describing import MOST_SESSIONS
from rolecall.conformance.environment.session import EnvironmentSession
from rolecall.conformance.environment.turns import REPEATED

LONGEST_LEASE_S = 10.0
"""The end of a longer lease is not waited for."""
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
    """Repeats a call for two leases. A pause of the kit's own that was longer than a lease proves nothing."""
    unseen = too_long(session)
    if unseen:
        return unseen
    lease_s, started = session.spec.lease_s, time.monotonic()
    async with session.episode(session.rows.played[0]) as episode:
        await episode.reset()
        ended_at = time.monotonic()
        while time.monotonic() < started + 2 * lease_s:
            await asyncio.sleep(lease_s / 4)
            code = await episode.reset().code()  # bounded: by the call's deadline
            paused_s = time.monotonic() - ended_at
            if code is not grpc.StatusCode.OK:
                said = f"a call {paused_s:.1f} s after the last one ended with {code.name}"
                return failed(said) if paused_s < lease_s else skipped(f"{said}, beyond its lease of {lease_s:g} s")
            ended_at = time.monotonic()
    return passed(f"{2 * lease_s:g} s")


@CONTRACT.rule(
    "session.reaped",
    "EnvironmentService",
    "One that nobody called for longer is closed within another lease_s.",
    (*REPEATED, "step.conflict", "session.unknown"),
)
async def reaped(session: EnvironmentSession) -> Verdict:
    """Leaves every place's session for two leases: they are gone, and their places are free."""
    unseen = too_long(session)
    if unseen:
        return unseen
    num = session.spec.max_sessions if session.spec.max_sessions <= MOST_SESSIONS else 1
    lease_s = session.spec.lease_s
    async with session.episodes(num or 1) as left, session.episodes(num or 1) as new:
        await asyncio.gather(*(episode.reset() for episode in left))
        await asyncio.sleep(2 * lease_s + SLACK_S)
        calls = [episode.reset() for episode in new]
        codes = [await call.code() for call in calls]  # bounded: by the calls' deadline
        if any(code is not grpc.StatusCode.OK for code in codes):
            return failed(f"{2 * lease_s + SLACK_S:g} s after the last call, places were not free: {codes[-1].name}")
        code = await left[0].act().code()  # bounded: by the call's deadline
        if code is not grpc.StatusCode.NOT_FOUND:
            return failed(f"{2 * lease_s + SLACK_S:g} s after the last call, a turn ended with {code.name}")
    return passed(f"{len(codes)} sessions were gone after {2 * lease_s + SLACK_S:g} s")
