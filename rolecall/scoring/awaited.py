"""Scorers that are coroutine functions: awaited on several items at the same time, and checked as all others are.

Owns what one item's misfortune is to the others that are awaited beside it: nothing. Who gives the event loop is its
caller's business.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from rolecall.errors import ScorerError
from rolecall.scoring.results import call_batch_scorer, error_result, failure_of, result_of
from rolecall.scoring.scores import BatchFunction, Item, ScoreFunction
from rolecall.v1 import reward_pb2

TIMEOUT = "TIMEOUT"
"""Code of an item that was late: its worker was stopped or starved (worth another try), or the item takes too long by
itself.
"""
TICK_S = 1.0
"""Seconds between two looks at what is awaited."""


async def call_async_scorer(
    function: ScoreFunction, item: reward_pb2.ScoreItem, spec: reward_pb2.DescribeResponse
) -> reward_pb2.ScoreResult:
    """Awaits `function` on `item` and checks what it returns against `spec`; whatever goes wrong becomes a
    ScoreError.
    """
    try:
        return result_of(item, await _answer(function(Item.from_proto(item))), spec)
    except Exception as error:  # the entry point of code that is not ours
        return failure_of(item, error)


async def call_async_batch_scorer(
    function: BatchFunction, items: Sequence[reward_pb2.ScoreItem], spec: reward_pb2.DescribeResponse
) -> list[reward_pb2.ScoreResult]:
    """Awaits `function` on `items` at once and checks each answer against `spec`; what goes wrong becomes a ScoreError,
    of one item or of all.
    """
    try:
        answers = await _answer(function([Item.from_proto(item) for item in items]))
    except Exception as error:  # the entry point of code that is not ours
        return [failure_of(item, error) for item in items]
    return call_batch_scorer(lambda _: answers, items, spec)


async def call_together(
    function: ScoreFunction,
    items: Sequence[reward_pb2.ScoreItem],
    spec: reward_pb2.DescribeResponse,
    timeout_s: float,
) -> list[reward_pb2.ScoreResult]:
    """Awaits `function` on all `items` at the same time, on each for `timeout_s`. One that takes longer is cancelled, a
    TIMEOUT. Time in which the event loop stood still, for one of them held it, is nobody's.
    """
    tasks = [asyncio.ensure_future(call_async_scorer(function, item, spec)) for item in items]
    late, left_s = set(tasks), timeout_s
    while late and left_s > 0:
        tick_s = min(TICK_S, left_s)
        _, late = await asyncio.wait(late, timeout=tick_s)
        left_s -= tick_s
    for task in late:
        task.cancel()
    if late:
        await asyncio.wait(late)  # bounded: by the pool, which kills this process where one refuses to end
    return [
        error_result(item.id, TIMEOUT, f"the scorer took longer than {timeout_s:g} s and was cancelled", True)
        if task.cancelled()
        else task.result()
        for item, task in zip(items, tasks, strict=True)
    ]


async def _answer(awaitable: Any) -> Any:
    """Returns what `awaitable` comes to. ScorerError where it was cancelled, and its caller was not."""
    try:
        return await awaitable  # bounded: by the caller
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise ScorerError("the scorer was cancelled, by itself or by what it waits for") from error
