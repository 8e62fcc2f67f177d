"""Calls that go together: what is asked for while a call is under way is asked for by the next one, all at once.

A call to the store costs a thread, a round trip and an fsync, whether it is for one group or for many. When groups land
one by one each has its call at once; the more of them land at a time, the fewer calls a group takes.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from rolecall.errors import RowMissingError
from services.controller.threads import StoreThreads

T = TypeVar("T")
R = TypeVar("R")

MOST_TOGETHER = 32
"""Most items of a call: bounds what it reads into memory."""


class Together(Generic[T, R]):
    """The calls of one blocking function of many items, which may be repeated. Used from one event loop."""

    def __init__(self, threads: StoreThreads, function: Callable[[Sequence[T]], Sequence[R]]) -> None:
        """`function` returns a result for each item, in order."""
        self._threads = threads
        self._function = function
        self._waiting: list[tuple[T, asyncio.Future[R]]] = []
        self._running: asyncio.Task[None] | None = None

    async def call(self, item: T) -> R:
        """Returns what the function returns for `item`. Raises what it raises; RowMissingError only where the rows of
        `item` itself are missing.
        """
        future: asyncio.Future[R] = asyncio.get_running_loop().create_future()
        self._waiting.append((item, future))
        if self._running is None:
            self._running = asyncio.create_task(self._run())
        return await future  # bounded: by the calls before this one, of MOST_TOGETHER each, and their own deadlines

    async def _run(self) -> None:
        while self._waiting:
            asked, self._waiting = self._waiting[:MOST_TOGETHER], self._waiting[MOST_TOGETHER:]
            await self._answer([(item, future) for item, future in asked if not future.done()])  # else it was cancelled
        self._running = None

    async def _answer(self, asked: Sequence[tuple[T, "asyncio.Future[R]"]]) -> None:
        if not asked:
            return
        try:
            results = await self._threads.call(self._function, [item for item, _ in asked])
            answered = list(zip(asked, results, strict=True))
        except RowMissingError as error:
            if len(asked) > 1:
                for item, future in asked:
                    if not future.done():
                        await self._answer([(item, future)])
                return
            _fail(asked, error)
        except Exception as error:  # whoever asked is told
            _fail(asked, error)
        else:
            for (_, future), result in answered:
                if not future.done():
                    future.set_result(result)


def _fail(asked: Sequence[tuple[T, "asyncio.Future[R]"]], error: Exception) -> None:
    for _, future in asked:
        if not future.done():
            future.set_exception(error)
