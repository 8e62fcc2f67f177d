"""Deadlines that pass from a call to the calls made on its behalf.

The server's interceptor notes when its caller stops waiting; channels then give a child call min(its own timeout, what
is left). Work that outlives its RPC (a detached Train) runs inside `without_deadline`.
"""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_DEADLINE: ContextVar[float | None] = ContextVar("rolecall_deadline", default=None)
"""Monotonic time at which the caller of the RPC being served stops waiting."""


def inherit(time_remaining_s: float | None) -> None:
    """Notes, for the rest of this task, that the caller waits `time_remaining_s` more; None: for ever."""
    _DEADLINE.set(None if time_remaining_s is None else time.monotonic() + time_remaining_s)


def remaining_s() -> float | None:
    """Seconds the caller still waits, 0 or less when it has stopped; None outside an RPC or when it named no
    deadline.
    """
    deadline = _DEADLINE.get()
    return None if deadline is None else deadline - time.monotonic()


def child_timeout_s(own_s: float) -> float:
    """Timeout of a call made now: the smaller of its own and what the caller has left."""
    left = remaining_s()
    return own_s if left is None else min(own_s, left)


@contextmanager
def without_deadline() -> Iterator[None]:
    """Calls made inside, and tasks created inside, do not inherit the deadline of the RPC being served."""
    token = _DEADLINE.set(None)
    try:
        yield
    finally:
        _DEADLINE.reset(token)
