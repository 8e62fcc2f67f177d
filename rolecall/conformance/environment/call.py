"""The calls of one session, and what they tell of it besides their answers: how long nobody called it, and whether its
Close hangs. Makes no calls.
"""

import time
from collections.abc import Generator
from typing import Any

import grpc

from rolecall.conformance.check import VerdictError, skipped

HANG = (grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
"""Ends of a call whose work may go on."""


class LeftError(VerdictError):
    """A session is gone that answered no call for its lease, which proves nothing: a refused one need not keep it."""


class HungError(VerdictError):
    """A Close was not answered within its deadline."""


class Closes:
    """The time that the Closes of all sessions take."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        """Seconds of the longest one that was answered, with nothing under way in its session."""
        self.hung = ""
        """What was seen of the first such one that was not; empty: none."""


class Life:
    """A session as its calls see it."""

    def __init__(self, name: str, lease_s: float, closes: Closes) -> None:
        self.name = name
        self.lease_s = lease_s
        self.closes = closes
        self.touched_at: float | None = None
        """When the last call ended that was answered; None while it is not open."""
        self.num_under_way = 0
        self.may_work = False
        """Whether the last call but Close was left to itself."""


class Call:
    """A call that was made, to be awaited for its answer or its status."""

    def __init__(self, call: "grpc.aio.UnaryUnaryCall[Any, Any]", life: Life, close_s: float | None = None) -> None:
        """`close_s`: the deadline of a Close; None for another call."""
        self._call = call
        self._life = life
        self._close_s = close_s
        self._is_alone = life.num_under_way == 0
        self._began_at = self._ended_at = time.monotonic()
        life.num_under_way += 1
        call.add_done_callback(self._end)

    def _end(self, call: Any) -> None:
        self._ended_at = time.monotonic()
        self._life.num_under_way -= 1

    def __await__(self) -> Generator[Any, None, Any]:
        yield from self.status().__await__()
        return (yield from self._call.__await__())

    async def status(self) -> grpc.StatusCode:
        """The status it ends with. LeftError where that is NOT_FOUND, and the last call that was answered had ended a
        lease before this one began.
        """
        code, life = await self.ended(), self._life
        if code is grpc.StatusCode.NOT_FOUND and life.touched_at is not None and self._is_alone:
            left_s = self._began_at - life.touched_at  # not to its end: no lease ends while a call is under way
            if left_s >= life.lease_s:
                raise LeftError(
                    skipped(
                        f"session {life.name} is gone; its last call without an error had ended {left_s:.1f} s before, "
                        f"and its lease is {life.lease_s:g} s; serve it with a longer one to see this"
                    )
                )
        return code

    async def ended(self) -> grpc.StatusCode:
        """The status it ends with, whatever that tells."""
        code = await self._call.code()  # bounded: by the call's deadline
        life, is_answered = self._life, code is grpc.StatusCode.OK
        if self._close_s is None:
            life.may_work = code in HANG
            if is_answered:
                life.touched_at = max(life.touched_at or 0.0, self._ended_at)
            return code
        closes, waits_for_none = life.closes, self._is_alone and not life.may_work
        if is_answered:
            life.touched_at = None
        if is_answered and waits_for_none:
            closes.longest_s = max(closes.longest_s, self._ended_at - self._began_at)
        elif code is grpc.StatusCode.DEADLINE_EXCEEDED and waits_for_none:
            closes.hung = closes.hung or f"the Close of a session was not answered within {self._close_s:g} s"
        return code

    async def message(self) -> str | None:
        """Says what the server said of the code."""
        return await self._call.details()  # bounded: by the call's deadline

    def done(self) -> bool:
        """Whether it has ended."""
        return self._call.done()

    def cancel(self) -> None:
        """Leaves it to itself."""
        if self._call.cancel():
            self._life.may_work = True
