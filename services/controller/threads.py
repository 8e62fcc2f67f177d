"""Threads for blocking store calls, so that the event loop never waits for the store. A call outlives a caller that is
cancelled.

Bounded: NUM_THREADS calls at a time, the rest queue here; what may queue is bounded by the callers (one call per
scoring task, per publish, per admission).
"""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

NUM_THREADS = 8

SETTLE_S = 30.0
"""Longest wait for calls whose callers have left; the client's own deadlines end each sooner, but not a commit's."""


class StoreThreads:
    """A small pool. Every store call has its own deadline (the client's socket timeout), so waiting for one needs
    none; a storage of checkpoints has none, and may hold a thread for ever.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="store")
        self._under_way: set[asyncio.Future[Any]] = set()
        self._is_held = False
        """Whether a call went on for longer than `settle` waited."""

    async def call(self, function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The result of `function`, run in a thread."""
        future = asyncio.get_running_loop().run_in_executor(self._pool, lambda: function(*args, **kwargs))
        self._under_way.add(future)
        future.add_done_callback(self._ended)
        return await asyncio.shield(future)  # bounded: by the store's retry_s and socket timeout

    def _ended(self, future: "asyncio.Future[R]") -> None:
        self._under_way.discard(future)
        if not future.cancelled():
            future.exception()  # the caller may have left

    async def settle(self) -> None:
        """Returns when no call is under way: what comes next sees all that the cancelled ones did."""
        if self._under_way:
            _, held = await asyncio.wait(self._under_way, timeout=SETTLE_S)
            self._is_held = bool(held)

    def close(self) -> None:
        """Waits for calls under way, but not for one that `settle` gave up."""
        self._pool.shutdown(wait=not self._is_held, cancel_futures=True)
