"""Deadlines and a clock that stand still while the engine sleeps: a response that goes on later has had no time
meanwhile.

Knows no engine; the replica says when it sleeps.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class AwakeDeadlines:
    """The deadlines of what one replica samples. Used from one event loop."""

    def __init__(self) -> None:
        self._left: dict[asyncio.Timeout, float] = {}
        """Seconds that were left of each deadline when the engine fell asleep; while it is awake, unused."""
        self._is_awake = True
        self._asleep_at = self._asleep_s = 0.0
        """When it fell asleep last, and seconds of the sleeps that are over."""

    def time(self) -> float:
        """Seconds of a clock that stands still while the engine sleeps."""
        return (asyncio.get_running_loop().time() if self._is_awake else self._asleep_at) - self._asleep_s

    @asynccontextmanager
    async def within(self, seconds: float) -> AsyncIterator[None]:
        """Surrounds what may take so many seconds of an engine that is awake. TimeoutError past them."""
        async with asyncio.timeout(seconds if self._is_awake else None) as deadline:
            self._left[deadline] = seconds
            try:
                yield
            finally:
                del self._left[deadline]

    def stop(self) -> None:
        """The engine falls asleep. Idempotent."""
        if self._is_awake:
            self._is_awake, now = False, asyncio.get_running_loop().time()
            self._asleep_at = now
            for deadline in self._left:
                if (due := deadline.when()) is not None and not deadline.expired():
                    self._left[deadline] = due - now
                    deadline.reschedule(None)

    def go_on(self) -> None:
        """The engine is awake again. Idempotent."""
        if not self._is_awake:
            self._is_awake, now = True, asyncio.get_running_loop().time()
            self._asleep_s += now - self._asleep_at
            for deadline, seconds in self._left.items():
                if deadline.when() is None:
                    deadline.reschedule(now + seconds)
