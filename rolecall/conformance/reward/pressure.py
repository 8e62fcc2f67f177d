"""Rules of many calls: those at once, with figures, and those whose caller has gone."""

import asyncio
import statistics
import time
from dataclasses import dataclass, field

import grpc

from rolecall.conformance.check import Verdict, failed, passed, said, skipped
from rolecall.conformance.report import Load
from rolecall.conformance.reward.contract import ANSWERS, CONTRACT
from rolecall.conformance.reward.session import RewardSession
from rolecall.scoring.exchange import only
from rolecall.v1 import reward_pb2

LOADS = (1, 8, 64)
"""Calls at once."""
ITEMS_PER_CALL = 16
REFUSED_PAUSE_S = 0.02
"""Seconds before the next call after one that was refused."""
REFUSED_S = 10.0
"""Seconds for which a call that is timed is made again while it is refused."""
LEAST_ABANDONED, MOST_ABANDONED = 16, 256
"""Calls that are begun and given up."""
TIMES_ALONE = 4
"""A call after abandoned ones may take this many times as long as alone, and Options.slack_s."""
_REFUSALS = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)


@dataclass
class _Laps:
    """The calls of one load."""

    seconds: list[float] = field(default_factory=list)
    num_refused: int = 0
    problem: str = ""


@CONTRACT.rule(
    "calls.load",
    "RewardService",
    "Of 64 calls at once each is answered, or refused with RESOURCE_EXHAUSTED or UNAVAILABLE.",
    ANSWERS,
)
async def load(session: RewardSession) -> Verdict:
    """Keeps 1, 8 and 64 calls under way, each a second, and notes how fast they are answered."""
    if not session.options.load_s:
        return skipped("--load-seconds 0")
    request = request_of(session, ITEMS_PER_CALL)
    num_items = len(request.items)
    for num_calls in LOADS:
        laps, started = _Laps(), time.monotonic()
        until = started + session.options.load_s
        await asyncio.gather(*(_keep_calling(session, request, until, laps) for _ in range(num_calls)))
        took_s = time.monotonic() - started
        if laps.problem:
            return failed(f"{num_calls} at once: {laps.problem}")
        if not laps.seconds:
            return failed(f"{num_calls} at once: all {laps.num_refused} calls were refused")
        ms = sorted(1000 * seconds for seconds in laps.seconds)
        p99 = ms[min(len(ms) - 1, int(0.99 * len(ms)))]
        rate = num_items * len(ms) / took_s
        session.load.append(Load(num_calls, rate, statistics.median(ms), p99, laps.num_refused))
    return passed(f"{num_items} items a call, {', '.join(str(num) for num in LOADS)} calls at once: figures below")


async def _keep_calling(session: RewardSession, request: reward_pb2.ScoreRequest, until: float, laps: _Laps) -> None:
    wanted = {item.id for item in request.items}
    while not laps.problem and (not laps.seconds or time.monotonic() < until):
        started = time.monotonic()
        try:
            response = await session.stub.Score(request, timeout=session.options.timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _REFUSALS:
                laps.problem = said(error)
                return
            laps.num_refused += 1
            if time.monotonic() > until:
                return
            await asyncio.sleep(REFUSED_PAUSE_S)
            continue
        laps.seconds.append(time.monotonic() - started)
        if {result.id for result in response.results} != wanted:
            laps.problem = "an answer does not belong to its request"


@CONTRACT.rule(
    "calls.abandoned",
    "RewardService",
    "A call that was cancelled, or whose deadline has passed, is abandoned and delays no later one.",
    (*ANSWERS, "max_items.taken"),
)
async def abandoned(session: RewardSession) -> Verdict:
    """Begins many calls, leaves half of them to a short deadline and cancels the others, and times one more. Of a
    service that is fast enough to do all the work nothing can be seen.
    """
    request = request_of(session, 4 * ITEMS_PER_CALL)
    alone_s = statistics.median([await timed(session, request, session.options.timeout_s) for _ in range(3)])
    num = min(MOST_ABANDONED, max(LEAST_ABANDONED, round(session.options.abandoned_work_s / alone_s)))
    calls = [
        session.stub.Score(request, timeout=alone_s / 2 if i % 2 else session.options.timeout_s) for i in range(num)
    ]
    await asyncio.sleep(alone_s / 2)
    for call in calls[::2]:
        call.cancel()
    for call in calls:
        await call.code()  # bounded: each has a deadline, or was cancelled
    limit_s = session.options.slack_s + TIMES_ALONE * alone_s
    try:
        took_s = await timed(session, request, limit_s)
    except grpc.aio.AioRpcError as error:
        if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED:
            raise
        return failed(
            f"after {num} calls that were given up, one that takes {alone_s:.3f} s alone was not answered within "
            f"{limit_s:.1f} s"
        )
    return passed(f"{num} calls given up; the next took {1000 * took_s:.0f} ms, alone {1000 * alone_s:.0f} ms")


async def timed(session: RewardSession, request: reward_pb2.ScoreRequest, timeout_s: float) -> float:
    """Makes a call, again while it is refused, unless others were given up; the seconds that the one took which was
    answered.
    """
    until = time.monotonic() + (0.0 if session.has_given_up else REFUSED_S)
    while True:
        started = time.monotonic()
        try:
            await session.stub.Score(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() not in _REFUSALS or started > until:
                raise
            await asyncio.sleep(REFUSED_PAUSE_S)
        else:
            return time.monotonic() - started


def request_of(session: RewardSession, num: int) -> reward_pb2.ScoreRequest:
    """A request of `num` items, or as many as the service takes."""
    num = min(session.spec.max_items or num, num)
    return reward_pb2.ScoreRequest(items=[only(item, session.spec) for item in session.pool.copies(num)])
