"""The gate that everything sampled passes on its way out of the process: shut unless the weights are attested.

Owns who is on the way out, so that shutting it is a promise: when shut() has returned nothing leaves until it is opened
again. It knows no engine and no versions. Bound: as many wait here as requests are in flight, each under its caller's
deadline.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from rolecall.errors import DeadlineError, UnavailableError

SHUT_TIMEOUT_S = 30.0
"""Most seconds that what is already on its way out (a commit in the store) may take."""


class Gate:
    """The way out for everything sampled, shut at first. Used from one event loop."""

    def __init__(self) -> None:
        self._changed = asyncio.Condition()
        self._open = False
        self._num_leaving = 0
        self._num_given_up = 0
        self._is_given_up = False
        """Whether nothing is kept until the gate opens again."""

    @property
    def is_open(self) -> bool:
        """Whether things may leave now."""
        return self._open

    async def wait(self) -> None:
        """Returns while the gate is open. UnavailableError when what is kept is given up instead."""
        async with self._changed:  # bounded: the lock is free while anyone waits; the wait is the callers'
            await self._wait()

    async def wait_open(self) -> None:
        """Returns while the gate is open, whatever is given up in between: for those who hold nothing."""
        async with self._changed:
            await self._changed.wait_for(
                lambda: self._open
            )  # bounded: by nothing, on purpose: the pull loop waits for weights until it is drained

    @asynccontextmanager
    async def leaving(self) -> AsyncIterator[None]:
        """Waits as wait() does, and the gate does not shut while inside. Stay for one bounded store call or so."""
        async with self._changed:  # bounded: the lock is free while anyone waits; the wait is the callers'
            await self._wait()
            self._num_leaving += 1
        try:
            yield
        finally:
            self._num_leaving -= 1
            async with self._changed:
                self._changed.notify_all()

    async def open(self) -> None:
        """Opens: what waits may leave."""
        async with self._changed:
            self._open, self._is_given_up = True, False
            self._changed.notify_all()

    async def shut(self) -> None:
        """Returns when nothing leaves any more. DeadlineError (and the gate shut) when something stays inside for
        SHUT_TIMEOUT_S.
        """
        self._open = False
        try:
            async with asyncio.timeout(SHUT_TIMEOUT_S), self._changed:
                await self._changed.wait_for(lambda: self._num_leaving == 0)
        except TimeoutError as error:
            raise DeadlineError(
                f"{self._num_leaving} commits did not end within {SHUT_TIMEOUT_S:.0f} s; look at the store"
            ) from error

    async def give_up(self) -> None:
        """Turns away everyone who waits, and who comes until the gate opens again: what they hold would be kept for
        nobody knows how long.
        """
        async with self._changed:
            self._num_given_up += 1
            self._is_given_up = True
            self._changed.notify_all()

    async def _wait(self) -> None:
        before = self._num_given_up

        def decided() -> bool:
            return self._open or self._is_given_up or self._num_given_up != before

        # bounded: by keep_timeout_s, past which what is kept is given up; while the engine sleeps, by the controller
        await self._changed.wait_for(decided)
        if not self._open or self._num_given_up != before:
            raise UnavailableError(
                "what was sampled is discarded: the engine's weights tore or it was put to sleep; ask again"
            )
