"""Room for the images of the groups that are being scored: so many bytes of them are in memory at a time.

How many a group has is known when they were read. So one group at a time is read and weighed, and the next one waits
until there is room for that.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

T = TypeVar("T")


class ImageRoom:
    """Room for `max_bytes`; what has more bytes has it alone. Used from one event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        """Bytes that are held."""
        self._turn = asyncio.Lock()
        self._freed = asyncio.Event()

    @asynccontextmanager
    async def holding(self, read: Callable[[], Awaitable[tuple[T, int]]]) -> AsyncIterator[T]:
        """Gives what `read` returns beside its bytes, which are held until the end of the block."""
        async with self._turn:  # bounded: by the groups before it, as the wait for room
            found, num_bytes = await read()
            while self._num_bytes and self._num_bytes + num_bytes > self._max_bytes:
                self._freed.clear()
                await self._freed.wait()  # bounded: whoever holds some is being scored, and every call has a deadline
            self._num_bytes += num_bytes
        try:
            yield found
        finally:
            self._num_bytes -= num_bytes
            self._freed.set()
