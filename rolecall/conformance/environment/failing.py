"""Rules of what cannot be begun and of what fails, which only rows that are marked show."""

import grpc

from rolecall.conformance.check import Verdict, failed, passed, skipped
from rolecall.conformance.environment.contract import CONTRACT, PLACES, TURNS
from rolecall.conformance.environment.rows import Row
from rolecall.conformance.environment.session import OVER, EnvironmentSession, Episode, short

OK = grpc.StatusCode.OK
_ENDED = skipped("by chance, every episode of a row marked fails came to its end before it failed")


@CONTRACT.rule(
    "reset.task",
    "EnvironmentService.Reset",
    "INVALID_ARGUMENT for a task that it cannot begin however often it is asked.",
    PLACES,
)
async def task(session: EnvironmentSession) -> Verdict:
    """Begins the rows that are marked cannot_begin."""
    rows = session.rows.cannot_begin
    if not rows:
        return skipped("no --items with a row marked cannot_begin")
    for row in rows:
        async with session.episode(row) as episode:
            for _ in range(2):
                code = await episode.reset().status()
                if code is not grpc.StatusCode.INVALID_ARGUMENT:
                    return failed(f"{row.name} ended with {code.name}")
    return passed(f"{len(rows)} rows")


@CONTRACT.rule(
    "failure.status",
    "EnvironmentService",
    "A failure is a gRPC status, never a reward and never an observation.",
    TURNS,
)
async def as_status(session: EnvironmentSession) -> Verdict:
    """Plays the rows that are marked fails, and asks for their grade."""
    rows = session.rows.fails
    if not rows:
        return skipped("no --items with a row marked fails")
    num = 0
    for row in rows:
        async with session.episode(row) as episode:
            turn, is_over = await _failing_turn(episode, row)
            if turn is None:
                if is_over and session.goes_by_chance:
                    continue
                until = "came to its end" if is_over else "was answered to its last action"
                return failed(f"{row.name} {until}, and is marked fails")
            grade = episode.close(grade=True)
            if await grade.status() is OK and (await grade).HasField("reward"):  # bounded: it is done
                return failed(f"{row.name} failed, and its grade is {short(await grade)}")  # bounded: it is done
        num += 1
    return passed(f"{num} rows") if num else _ENDED


@CONTRACT.rule(
    "failure.final",
    "EnvironmentService",
    "It ends the session: its later calls but Close and CloseOlder fail, too.",
    (*TURNS, "failure.status"),
)
async def for_good(session: EnvironmentSession) -> Verdict:
    """Calls on after a failure."""
    rows = session.rows.fails
    if not rows:
        return skipped("no --items with a row marked fails")
    num = 0
    for row in rows:
        async with session.episode(row) as episode:
            turn, _ = await _failing_turn(episode, row)
            if turn is None:
                continue
            text = row.actions[turn - 1] if turn else ""
            later = {
                "Reset": episode.reset(),
                "the same turn": episode.step(max(turn, 1), text),
                "the next turn": episode.step(turn + 1, "hello"),
            }
            for what, call in later.items():
                if await call.status() is OK:
                    return failed(f"{row.name}: after its failure, {what} was answered")
            code = await episode.close().status()
            if code is not OK:
                return failed(f"{row.name}: after its failure, Close ended with {code.name}")
        num += 1
    return passed(f"{num} rows") if num else _ENDED


async def _failing_turn(episode: Episode, row: Row) -> tuple[int | None, bool]:
    """Plays until a call fails: its turn, 0 for Reset, None where none does; and whether an episode in which none does
    came to its end before its last action.
    """
    if await episode.reset().status() is not OK:
        return 0, False
    for turn, text in enumerate(row.actions, 1):
        call = episode.step(turn, text)
        if await call.status() is not OK:
            return turn, False
        if (await call).state in OVER and turn < len(row.actions):  # bounded: it is done
            return None, True
    return None, False
