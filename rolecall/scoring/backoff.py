"""The pause after which a peer that limits its callers' rate may be called again: one for all calls to it, not one per
call.
"""

import random
import time
from collections.abc import Callable

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 60.0
"""Pauses double from the first to the longest, each shortened at random by up to half; every answer halves the next."""
LONGEST_RETRY_AFTER_S = 300.0
"""Bound on what a peer may ask for (google.rpc.RetryInfo): one that asks for more is asked again then."""


class RateLimit:
    """The pause that one peer has asked for. Used from one event loop."""

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, draw: Callable[[float, float], float] = random.uniform
    ) -> None:
        self._clock = clock
        self._draw = draw
        self._pause_s = 0.0
        self._open_at = float("-inf")
        self._refused_at = float("-inf")

    def pause_s(self) -> float:
        """Seconds from now until a call may be made; 0 or less when it may be made now."""
        return self._open_at - self._clock()

    def refused(self, called_at: float, retry_after_s: float = 0.0) -> None:
        """A call that was made at `called_at` (monotonic) was refused. Those that were under way together lengthen the
        pause once.
        """
        now = self._clock()
        if called_at >= self._refused_at:
            self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s or FIRST_PAUSE_S)
            self._refused_at = now
        wanted_s = max(self._pause_s * self._draw(0.5, 1.0), min(retry_after_s, LONGEST_RETRY_AFTER_S))
        self._open_at = max(self._open_at, now + wanted_s)

    def answered(self) -> None:
        """Halves the pause: a call was answered."""
        self._pause_s = self._pause_s / 2 if self._pause_s > FIRST_PAUSE_S else 0.0
