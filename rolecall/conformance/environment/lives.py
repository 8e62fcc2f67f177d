"""Rules of a session's life: it begins once and ends once, shares nothing, and ends with its caller's claim."""

import asyncio
import time

import grpc

from rolecall.conformance.check import Verdict, failed, passed, skipped
from rolecall.conformance.environment.call import Call
from rolecall.conformance.environment.contract import CONTRACT, PLACES, TURNS
from rolecall.conformance.environment.session import OVER, EnvironmentSession, same, short
from rolecall.conformance.environment.turns import NUM_AT_ONCE, OTHER

CLOSED_S = 5.0
"""Seconds within which sessions of older claims must be closed."""
LOOK_S = 0.05
"""Seconds between two looks whether they are."""
UNDUE = 2**31
"""A turn that is never due: it tells whether a session is there, and does nothing."""


@CONTRACT.rule(
    "reset.repeated",
    "EnvironmentService.Reset",
    "Idempotent: named again, also while it boots or after turns were taken, a session is as it was and the answer is "
    "the first one's.",
    (*TURNS, "describe.deterministic"),
)
async def reset_again(session: EnvironmentSession) -> Verdict:
    """Calls Reset several times at once and after each turn of an episode, which goes on."""
    play = await session.longest()
    async with session.episode(play.row) as episode:
        openings, is_over = await asyncio.gather(*(episode.reset() for _ in range(NUM_AT_ONCE))), False
        for turn in range(len(play.turns) + 1):
            if turn:
                call = episode.step(turn, play.row.actions[turn - 1])
                code = await call.status()
                if code is not grpc.StatusCode.OK:
                    return failed(f"after a repeated Reset, turn {turn} ended with {code.name}")
                answer = await call  # bounded: it is done
                if not session.is_as_before(play, turn, answer):
                    return failed(f"after a repeated Reset, turn {turn} was another: {short(answer)}")
                openings.append(await episode.reset())
                is_over = answer.state in OVER
            for opening in openings:
                if not same(openings[0], opening):
                    return failed(f"after turn {turn}: first {short(openings[0])}, then {short(opening)}")
            if is_over:
                break
    return passed(f"{len(openings)} times, after up to {turn} turns")


@CONTRACT.rule(
    "session.apart",
    "EnvironmentService",
    "Sessions share nothing: what is done in one changes no answer of another.",
    (*TURNS, "describe.deterministic", "step.repeated", "action.text"),
)
async def apart(session: EnvironmentSession) -> Verdict:
    """Plays an episode again, each turn twice, beside another of the same task in which other things are said. One that
    is not deterministic is held to its own answers alone.
    """
    if session.spec.max_sessions == 1:
        return skipped("it has one session at a time")
    play = await session.longest()
    async with session.episode(play.row) as one, session.episode(play.row, one, index=1) as other:
        await asyncio.gather(one.reset(), other.reset())  # at once, as turns are: neither waits for its lease to end
        goes_on, num = True, 0
        for turn, text in enumerate(play.row.actions[: len(play.turns)], 1):
            played = [(one, text), (other, text + OTHER)] if goes_on else [(one, text)]
            answers = await asyncio.gather(*(episode.step(turn, said) for episode, said in played))
            if not session.is_as_before(play, turn, answers[0]):
                return failed(f"turn {turn} was another while a second session was played")
            goes_on = goes_on and answers[1].state not in OVER
            for (episode, said), answer in reversed([*zip(played, answers, strict=True)]):
                again = await episode.step(turn, said)
                if not same(answer, again):
                    return failed(f"turn {turn} was answered {short(answer)}, and after one of another {short(again)}")
            num = turn
            if answers[0].state in OVER:
                break
    return passed(f"{num} turns beside another session")


@CONTRACT.rule("session.name", "ResetRequest.session", "The whole of it tells sessions apart.", PLACES)
async def names(session: EnvironmentSession) -> Verdict:
    """Begins the next episode of a group and the next attempt at the first, which was closed."""
    row = session.rows.played[0]
    async with session.episode(row) as first:
        await first.reset()
        await first.close()
        for index, fence in ((1, 1), (0, 2)):
            async with session.episode(row, first, index=index, fence=fence) as other:
                what = f"after {first.name} was closed, the Reset of {other.name}"
                problem = await _ends(other.reset(), grpc.StatusCode.OK, what)
                if problem:
                    return failed(problem)
    return passed("3 of one group")


@CONTRACT.rule(
    "session.unknown",
    "EnvironmentService",
    "A session that was closed, or that the server does not know, is NOT_FOUND.",
    TURNS,
)
async def unknown(session: EnvironmentSession) -> Verdict:
    """Takes turns in a session that was never opened, and in one that was closed."""
    row = session.rows.played[0]
    async with session.episode(row) as episode:
        problem = await _ends(episode.act(), grpc.StatusCode.NOT_FOUND, "a turn of one never opened")
        if problem:
            return failed(problem)
    async with session.episode(row) as episode:
        await episode.reset()
        await episode.close()
        problem = await _ends(episode.act(), grpc.StatusCode.NOT_FOUND, "a turn of a closed one")
        return failed(problem) if problem else passed("NOT_FOUND, twice")


@CONTRACT.rule(
    "reset.closed",
    "EnvironmentService.Reset",
    "NOT_FOUND for a session that was closed, or that Close named before, for lease_s at the least: a Reset that comes "
    "late opens nothing.",
    (*PLACES, "close.unknown"),
)
async def reset_late(session: EnvironmentSession) -> Verdict:
    """Calls Reset after Close: of a session that was open, and of one that was not yet."""
    for is_open in (True, False):
        async with session.episode(session.rows.played[0]) as episode:
            if is_open:
                await episode.reset()
            await episode.close()
            what = f"a Reset after the Close of a session that was {'open' if is_open else 'not open yet'}"
            problem = await _ends(episode.reset(), grpc.StatusCode.NOT_FOUND, what)
            if problem:
                return failed(problem)
    return passed("NOT_FOUND, twice")


@CONTRACT.rule(
    "reset.fenced",
    "EnvironmentService.Reset",
    "FAILED_PRECONDITION (FENCED) for a fence lower than CloseOlder or Reset named of the group, for lease_s at the "
    "least.",
    (*PLACES, "session.name"),
)
async def fenced(session: EnvironmentSession) -> Verdict:
    """Calls Reset for claims that are older than one that was named, by numbers that text would order otherwise. The
    session of that one is closed by then, so that there is a place.
    """
    row, refused = session.rows.played[0], grpc.StatusCode.FAILED_PRECONDITION
    async with session.episode(row, fence=9) as first:
        await first.reset()
        await first.close()
        async with session.episode(row, first, fence=10) as newer:
            named_at = time.monotonic()
            problem = await _ends(newer.reset(), grpc.StatusCode.OK, "fence 10 after a Reset of fence 9")
            if problem:
                return failed(problem)
        async with session.episode(row, first, fence=8) as older:
            named_s = time.monotonic() - named_at
            problem = await _ends(older.reset(), refused, f"fence 8 {named_s:.1f} s after a Reset of fence 10")
            if problem:
                is_due = named_s < session.spec.lease_s
                return failed(problem) if is_due else skipped(f"{problem}, beyond its lease")
        await first.close_older(100)
        async with session.episode(row, first, fence=99) as older:
            problem = await _ends(older.reset(), refused, "fence 99 after CloseOlder of 100")
            if problem:
                return failed(problem)
    return passed("FAILED_PRECONDITION, twice")


@CONTRACT.rule(
    "older.closed",
    "EnvironmentService.CloseOlder",
    "Closes the sessions of a group whose fence is lower: of callers that died.",
    (*TURNS, "step.conflict", "session.unknown"),
)
async def older_closed(session: EnvironmentSession) -> Verdict:
    """Names a higher fence of the group of an open session."""
    async with session.episode(session.rows.played[0], fence=9) as episode:
        await episode.reset()
        await episode.close_older(10)
        until = time.monotonic() + CLOSED_S
        while await episode.act(UNDUE).status() is not grpc.StatusCode.NOT_FOUND:
            if time.monotonic() > until:
                return failed(f"the session was there {CLOSED_S:g} s after CloseOlder named a higher fence")
            await asyncio.sleep(LOOK_S)
    return passed("NOT_FOUND")


@CONTRACT.rule(
    "older.others",
    "EnvironmentService.CloseOlder",
    "Sessions of other groups, and those of the fence itself or higher ones, stay.",
    (*TURNS, "reset.repeated", "older.closed"),
)
async def older_others(session: EnvironmentSession) -> Verdict:
    """Names the fence of an open session, and a higher one of a group that it is not of."""
    async with session.episode(session.rows.played[0], fence=10) as episode:
        await episode.reset()
        for what, closing in (("its own fence", episode.close_older(10)), ("a lower one", episode.close_older(9))):
            if (await closing).num_closed:  # bounded: by the call's deadline
                return failed(f"CloseOlder with {what} says that it closed a session")
        async with session.episode(session.rows.played[0]) as other:
            await other.close_older(11)
        problem = await _ends(episode.reset(), grpc.StatusCode.OK, "a repeated Reset of a session that was to stay")
        return failed(problem) if problem else passed("one session stayed, thrice")


@CONTRACT.rule(
    "close.repeated",
    "EnvironmentService.Close",
    "Idempotent: a repeated Close answers as the first did, for lease_s at the least.",
    (*TURNS, "close.grade"),
)
async def close_again(session: EnvironmentSession) -> Verdict:
    """Closes an episode that goes on thrice, each time with a grade."""
    play = await session.longest()
    async with session.episode(play.row) as episode:
        await episode.reset()
        is_over = False
        if len(play.turns) > 1:
            is_over = (await episode.step(1, play.row.actions[0])).state in OVER
        first = await episode.close(grade=not is_over)
        for _ in range(2):
            call = episode.close(grade=not is_over)
            code = await call.status()
            if code is not grpc.StatusCode.OK:
                return failed(f"a repeated Close ended with {code.name}")
            again = await call  # bounded: it is done
            if not same(first, again):
                return failed(f"a Close was answered {short(first)}, repeated {short(again)}")
    return passed(f"thrice the same{', without a grade: by chance, the episode was over' if is_over else ''}")


@CONTRACT.rule(
    "close.unknown",
    "EnvironmentService.Close",
    "A session that is not known: NOT_FOUND when a grade was asked for, else it is well.",
    ("describe.usable",),
)
async def close_unknown(session: EnvironmentSession) -> Verdict:
    """Closes sessions that were never opened."""
    for grade, code in ((True, grpc.StatusCode.NOT_FOUND), (False, grpc.StatusCode.OK)):
        async with session.episode(session.rows.played[0]) as episode:
            what = f"a Close {'with' if grade else 'without'} a grade"
            problem = await _ends(episode.close(grade=grade), code, what)
            if problem:
                return failed(problem)
    return passed("NOT_FOUND with a grade, else OK")


async def _ends(call: Call, wanted: grpc.StatusCode, what: str) -> str | None:
    """Returns how a call ended that was to end with `wanted`; None where it did."""
    code = await call.status()
    return None if code is wanted else f"{what} ended with {code.name}"
