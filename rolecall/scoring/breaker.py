"""A circuit breaker: a scorer that answered nothing several times in a row is left alone for a while, and then asked by
one call.

Meanwhile its callers hear at once that it is away, in place of each waiting for its own deadline. Knows no gRPC. What a
scorer asks for itself, a limit of its rate, is backoff.py's.
"""

import time
from collections.abc import Callable

FAILURES_TO_OPEN = 5
"""Failures in a row, of calls under way at the same time too, after which it is left alone."""
FIRST_PAUSE_S = 0.5
LONGEST_PAUSE_S = 15.0
"""Pauses double from the first to the longest with each probe that fails."""


class Breaker:
    """A breaker before one scorer: closed (calls go through), open (none does), half-open (one does, the probe). Used
    from one event loop.
    """

    def __init__(self, probe_timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """A probe that has said nothing for `probe_timeout_s` counts as failed: its caller may have gone."""
        self._probe_timeout_s = probe_timeout_s
        self._clock = clock
        self._num_failures = 0
        self._pause_s = 0.0
        self._asked_again_at = 0.0
        """When the next probe may go, while it is open."""
        self._is_probed = False

    @property
    def is_open(self) -> bool:
        """Whether the scorer is left alone, or was until a probe that is under way."""
        return self._pause_s > 0

    def wait_s(self) -> float:
        """Seconds after which a call may be made; 0 lets this one through, which is the probe where it is open."""
        if not self.is_open:
            return 0.0
        left_s = self._asked_again_at - self._clock()
        if left_s > 0:
            return left_s
        self._asked_again_at = self._clock() + self._probe_timeout_s
        self._is_probed = True
        return 0.0

    def failed(self) -> None:
        """A call was answered by nobody. One that was under way when it opened says nothing new."""
        self._num_failures += 1
        if self._num_failures >= FAILURES_TO_OPEN and (self._is_probed or not self.is_open):
            self._is_probed = False
            self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s or FIRST_PAUSE_S)
            self._asked_again_at = self._clock() + self._pause_s

    def answered(self) -> None:
        """A call was answered: closes it."""
        self._num_failures = 0
        self._is_probed = False
        self._pause_s = 0.0
