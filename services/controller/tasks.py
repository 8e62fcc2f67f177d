"""Calls at once, and one error out of many: what a TaskGroup raises, reduced to the leaf that caused the rest."""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


async def at_once(calls: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Returns what `calls` return; the first error ends the others."""
    try:
        async with asyncio.TaskGroup() as tasks:
            running = [tasks.create_task(call) for call in calls]
    except BaseExceptionGroup as group:
        raise first_error(group) from group
    return [task.result() for task in running]


def first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first leaf of `group` that is not a mere cancellation; the others are its consequences and stay in its
    traceback.
    """
    leaves: list[BaseException] = []
    pending: list[BaseException] = [group]
    while pending:
        error = pending.pop(0)
        if isinstance(error, BaseExceptionGroup):
            pending += error.exceptions
        else:
            leaves.append(error)
    return next((leaf for leaf in leaves if not isinstance(leaf, asyncio.CancelledError)), leaves[0])
