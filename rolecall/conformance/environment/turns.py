"""Rules of turns: they are taken in order, each once however often it is asked for, and any text is a turn."""

import asyncio
import time

import grpc

from rolecall.conformance.check import Verdict, failed, passed, skipped
from rolecall.conformance.environment.call import Call
from rolecall.conformance.environment.contract import CONTRACT, TURNS
from rolecall.conformance.environment.session import OVER, EnvironmentSession, same, short
from rolecall.conformance.reward.items import UNICODE

REPEATED = (*TURNS, "describe.deterministic", "step.repeated")
NUM_AT_ONCE = 4
"""Times that a call is made at once."""
NUM_LEFT = 6
"""Calls of each kind whose caller leaves, each at another share of the time that one takes."""
LONG_WORDS = 20_000
"""Length of a long action."""
OTHER = " (something else)"


@CONTRACT.rule(
    "step.order",
    "EnvironmentService.Step",
    "The turn after the last one is taken. The first is 1.",
    ("describe.usable", "describe.sessions", "close.place"),
)
async def order(session: EnvironmentSession) -> Verdict:
    """Plays every row."""
    plays = await session.plays()
    return passed(
        f"{len(plays)} episodes of up to {max(len(play.turns) for play in plays)} turns, "
        f"{sum(play.is_over for play in plays)} to their end"
    )


@CONTRACT.rule(
    "step.repeated",
    "EnvironmentService.Step",
    "The last turn with the same action gets the answer that was given, and nothing is done again.",
    (*TURNS, "describe.deterministic"),
)
async def repeated(session: EnvironmentSession) -> Verdict:
    """Takes every turn of an episode three times."""
    play = await session.longest()
    num = 0
    async with session.episode(play.row) as episode:
        await episode.reset()
        for turn in range(1, len(play.turns) + 1):
            text = play.row.actions[turn - 1]
            first = await episode.step(turn, text)
            if not session.is_as_before(play, turn, first):
                return failed(f"after a repeated turn, turn {turn} was another than without: {short(first)}")
            for _ in range(2):
                again = await episode.step(turn, text)
                if not same(first, again):
                    return failed(f"turn {turn} was answered {short(first)}, and then {short(again)}")
            num = turn
            if first.state in OVER:
                break
    return passed(f"{num} turns three times")


@CONTRACT.rule("step.attached", "EnvironmentService.Step", "One that is still under way is waited for.", REPEATED)
async def attached(session: EnvironmentSession) -> Verdict:
    """Takes every turn of an episode several times at once."""
    play = await session.longest()
    num = 0
    async with session.episode(play.row) as episode:
        await episode.reset()
        for turn in range(1, len(play.turns) + 1):
            calls = [episode.step(turn, play.row.actions[turn - 1]) for _ in range(NUM_AT_ONCE)]
            answers = await asyncio.gather(*calls)  # bounded: by the calls' deadline
            if not session.is_as_before(play, turn, answers[0]):
                return failed(f"after turns asked for at once, turn {turn} was another: {short(answers[0])}")
            for answer in answers:
                if not same(answers[0], answer):
                    return failed(f"turn {turn} was answered {short(answers[0])} and {short(answer)} at once")
            num = turn
            if answers[0].state in OVER:
                break
    return passed(f"{num} turns, {NUM_AT_ONCE} times at once")


@CONTRACT.rule(
    "step.conflict",
    "EnvironmentService.Step",
    "Any other turn, the last with another action, and any turn after the end: FAILED_PRECONDITION (TURN_CONFLICT), "
    "and nothing is done.",
    (*TURNS, "describe.deterministic"),
)
async def conflict(session: EnvironmentSession) -> Verdict:
    """Asks for turns that are not due after each of an episode."""
    play = await session.longest()
    num, is_over = 0, False
    async with session.episode(play.row) as episode:
        await episode.reset()
        for turn, text in enumerate(play.row.actions[: len(play.turns)], 1):
            answer = await episode.step(turn, text)
            if not session.is_as_before(play, turn, answer):
                return failed(f"after turns that were not due, turn {turn} was another: {short(answer)}")
            undue = [(turn, text + OTHER), (turn + 2, text), (turn - 1, text), (-1, text)]
            is_over = answer.state in OVER
            if is_over:
                undue.append((turn + 1, text))
            for other, said in undue:
                code = await episode.step(other, said).status()
                if code is not grpc.StatusCode.FAILED_PRECONDITION:
                    what = f"turn {other}{' with another action' if other == turn else ''}"
                    return failed(f"after turn {turn}, {what} ended with {code.name}")
                num += 1
            if is_over:
                break
    return passed(f"{num} turns were refused{'' if is_over else '; no episode came to its end'}")


@CONTRACT.rule(
    "action.text",
    "Action.text",
    "Any text is answered, for what an environment cannot read is the policy's fault.",
    TURNS,
)
async def any_text(session: EnvironmentSession) -> Verdict:
    """Begins episodes with nothing, with many scripts, control characters and a long text."""
    texts = ("", " ", *UNICODE, "{", "word " * LONG_WORDS)
    for text in texts:
        async with session.episode(session.rows.played[0]) as episode:
            await episode.reset()
            call = episode.step(1, text)
            code = await call.status()
            if code is not grpc.StatusCode.OK:
                details = await call.message()
                return failed(f"{text[:40]!r} ended with {code.name}: {details}")
    return passed(f"{len(texts)} odd texts")


@CONTRACT.rule(
    "calls.abandoned",
    "EnvironmentService",
    "A call whose caller left goes on, and a repeated call gets what it came to.",
    (*REPEATED, "step.attached", "reset.repeated"),
)
async def abandoned(session: EnvironmentSession) -> Verdict:
    """Leaves Reset and the first turn at several instants, and repeats them; the second turn follows."""
    play = await session.longest()
    if not play.turns:
        return skipped("no episode has a turn")
    async with session.episode(play.row) as episode:
        reset_s = await _seconds(episode.reset())
        step_s = await _seconds(episode.step(1, play.row.actions[0]))
    for i in range(NUM_LEFT):
        share = (i + 0.5) / NUM_LEFT
        async with session.episode(play.row) as episode:
            await _left(episode.reset(), share * reset_s)
            await episode.reset()
            for turn, text in enumerate(play.row.actions[: len(play.turns)][:2], 1):
                await _left(episode.step(turn, text), share * step_s)
                call = episode.step(turn, text)
                code = await call.status()
                if code is not grpc.StatusCode.OK:
                    return failed(f"turn {turn}, repeated after its caller had left, ended with {code.name}")
                answer = await call  # bounded: it is done
                if not session.is_as_before(play, turn, answer):
                    return failed(f"turn {turn}, repeated after its caller had left, was another")
                if answer.state in OVER:
                    break
    return passed(f"{NUM_LEFT} episodes, whose callers left after shares of {1000 * step_s:.1f} ms")


async def _seconds(call: Call) -> float:
    started = time.monotonic()
    await call  # bounded: by its deadline
    return time.monotonic() - started


async def _left(call: Call, after_s: float) -> None:
    """Gives up a call some time after it was made."""
    await asyncio.sleep(after_s)
    call.cancel()
    await call.status()
