"""Threads for blocking store calls, so that the event loop never waits for the store.

Bounded: NUM_THREADS calls at a time, the rest queue here; what may queue is bounded by the callers (one call per scoring task, per publish, per admission).
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

NUM_THREADS = 8


class StoreThreads:
    """A small pool. Every store call has its own deadline (the client's socket timeout), so waiting for one needs none."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="store")

    async def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The result of `function`, run in a thread."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Waits for calls under way."""
        self._pool.shutdown(wait=True, cancel_futures=True)
