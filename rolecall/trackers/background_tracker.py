"""A tracker that may be away: a thread of its own, a bounded queue before it; nothing that it does reaches the run.

Owns what becomes of a failure. The note is tried again after the others, with pauses that double; it is given up when
others got through meanwhile, for then the tracker refuses it. What is given up, or finds no room, is counted. Knows
nothing of what a note says.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from rolecall.trackers.tracker import End, Ending, Tracker, without_credentials

logger = logging.getLogger(__name__)

MAX_QUEUED_CHARS = 32 * 2**20
"""Bound on what waits for one tracker; past it the oldest notes are lost. A step's numbers are about 5,000."""
MAX_ATTEMPTS = 3
"""Tries of a note while others get through."""
FIRST_PAUSE_S = 1.0
LONGEST_PAUSE_S = 60.0
"""Pauses after failures double from the first to the longest; a success begins anew."""
FLUSH_S = 15.0
"""Longest wait, at the end of the run, for what is queued; each note is tried once more."""
TELL_AGAIN_S = 600.0
"""Failures are told when they begin, and then not before this time has passed."""


@dataclass
class _Note:
    deliver: Callable[[Tracker], None]
    num_chars: int
    num_attempts: int = 0
    num_delivered_before: int = 0
    """How many notes had got through when this one failed first."""


class BackgroundTracker:
    """A queue and a thread in front of a Tracker. Its methods return at once; any thread may call them."""

    def __init__(
        self,
        name: str,
        open_tracker: Callable[[], Tracker],
        *,
        first_pause_s: float = FIRST_PAUSE_S,
        flush_s: float = FLUSH_S,
    ) -> None:
        """`name` names it in messages; `open_tracker` is called on the thread, again after it failed."""
        self._name = name
        self._open = open_tracker
        self._first_pause_s = first_pause_s
        self._flush_s = flush_s
        self._tracker: Tracker | None = None
        # opens it at once: people look for the run before its first step
        self._notes: deque[_Note] = deque([_Note(lambda tracker: None, 0)])
        self._num_chars = 0
        self._changed = threading.Condition()
        self._closing = False
        self._end = End.DONE
        """How the run stands, once it closes."""
        self._deadline = 0.0
        """Monotonic seconds, once it closes."""
        self._pause_s = 0.0
        self._failing = False
        self._told_at = float("-inf")
        self._num_delivered = 0
        self.num_failures = 0
        """Calls of the tracker that raised."""
        self.num_lost = 0
        """Notes that were given up or found no room."""
        self._thread = threading.Thread(target=self._run, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Queues numbers."""
        kept = dict(values)
        self._put(_Note(lambda tracker: tracker.log(step, kept), sum(len(name) + 16 for name in kept)))

    def keep_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Queues samples."""
        kept = list(samples)
        if kept:
            num_chars = sum(len(str(value)) for sample in kept for value in sample.values())
            self._put(_Note(lambda tracker: tracker.keep_samples(step, kept), num_chars))

    def begin_to_flush(self, end: End = End.DONE) -> None:
        """Tries what is queued once more, says how the run stands, then closes; several may do so at the same time.
        Idempotent.
        """
        with self._changed:
            if not self._closing:
                self._closing, self._end, self._deadline = True, end, time.monotonic() + self._flush_s
            self._changed.notify_all()

    def flush(self) -> None:
        """Returns when that is done or `flush_s` has passed since it began; then says what was lost."""
        self.begin_to_flush()
        self._thread.join(timeout=max(0.0, self._deadline - time.monotonic()))
        with self._changed:
            num_lost = self.num_lost + len(self._notes)
        if self._thread.is_alive() or num_lost:
            logger.warning(
                "tracker %s: %d notes were not written%s; metrics.jsonl and samples.jsonl have them all",
                self._name,
                num_lost,
                f", and it did not close within {self._flush_s:g} s" if self._thread.is_alive() else "",
            )

    def _put(self, note: _Note) -> None:
        with self._changed:
            self._notes.append(note)
            self._num_chars += note.num_chars
            while self._num_chars > MAX_QUEUED_CHARS and len(self._notes) > 1:
                self._num_chars -= self._notes.popleft().num_chars
                self.num_lost += 1
            self._changed.notify_all()

    def _run(self) -> None:
        while (note := self._next()) is not None:
            try:
                if self._tracker is None:
                    self._tracker = self._open()
                note.deliver(self._tracker)
            except Exception as error:  # the entry point of code that is not ours
                self._failed(note, error)
            else:
                self._succeeded()
        if self._tracker is not None:
            try:
                with closing(self._tracker):
                    if isinstance(self._tracker, Ending):
                        self._tracker.end(self._end)
            except Exception as error:  # as above
                logger.warning("tracker %s did not close: %s", self._name, _words(error))

    def _next(self) -> _Note | None:
        """The oldest note, after the pause that is due; None when it closes and nothing is left, or no time."""
        with self._changed:
            due = time.monotonic() + self._pause_s
            while not self._closing and (not self._notes or time.monotonic() < due):
                self._changed.wait(None if not self._notes else max(0.0, due - time.monotonic()))
            if not self._notes or (self._closing and time.monotonic() > self._deadline):
                return None
            note = self._notes.popleft()
            self._num_chars -= note.num_chars
            return note

    def _failed(self, note: _Note, error: Exception) -> None:
        with self._changed:
            self.num_failures += 1
            self._pause_s = min(LONGEST_PAUSE_S, 2 * self._pause_s or self._first_pause_s)
            if not note.num_attempts:
                note.num_delivered_before = self._num_delivered
            note.num_attempts += 1
            is_refused = note.num_attempts >= MAX_ATTEMPTS and self._num_delivered > note.num_delivered_before
            if is_refused or self._closing:
                self.num_lost += 1
            else:
                self._notes.append(note)
                self._num_chars += note.num_chars
        if not self._failing and time.monotonic() - self._told_at > TELL_AGAIN_S:
            self._failing, self._told_at = True, time.monotonic()
            logger.warning(
                "tracker %s failed: %s; the run goes on, and what the tracker missed is sent again",
                self._name,
                _words(error),
            )

    def _succeeded(self) -> None:
        self._num_delivered += 1
        self._pause_s = 0.0
        with self._changed:
            caught_up = not self._notes
        if self._failing and caught_up:
            self._failing = False
            logger.warning(
                "tracker %s works again after %d failures; %d notes were lost",
                self._name,
                self.num_failures,
                self.num_lost,
            )


def _words(error: Exception) -> str:
    text = without_credentials(" ".join(str(error).split()))  # a library's message names the URL it was given
    return f"{type(error).__name__}: {text[:500]}"
