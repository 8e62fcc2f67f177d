"""The clock of a worker's states: what it did and what it waited for, in seconds that sum to its life.

Knows neither roles nor exporters; `rolecall.telemetry.show_states` shows one to the world.
"""

import threading
import time
from collections.abc import Callable, Sequence


class StateClock:
    """A clock that is in exactly one state at every instant, so that the seconds of all states sum to its age.

    Any thread may enter a state and any may look. Entering costs a lock and a look at the clock: enter where work
    begins and ends, not for every token.
    """

    def __init__(self, states: Sequence[str], now: Callable[[], float] = time.monotonic) -> None:
        """Starts in the first of `states`; all are shown from the start, with 0 seconds until they are entered."""
        self._now = now
        self._lock = threading.Lock()
        self._seconds = dict.fromkeys(states, 0.0)
        self._state = states[0]
        self._since = now()

    @property
    def state(self) -> str:
        """The state it is in."""
        return self._state

    def enter(self, state: str) -> None:
        """Is in `state` from now on; KeyError when that is none of its states. Entering it again changes nothing."""
        with self._lock:  # bounded: held for an addition
            if state not in self._seconds:
                raise KeyError(state)
            self._settle()
            self._state = state

    def seconds(self) -> dict[str, float]:
        """Seconds by state until now."""
        with self._lock:  # bounded: held for an addition
            self._settle()
            return dict(self._seconds)

    def _settle(self) -> None:
        now = self._now()
        self._seconds[self._state] += now - self._since
        self._since = now
