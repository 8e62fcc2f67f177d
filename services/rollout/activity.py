"""The activity of an engine as its replica sees it: what the engine owes, what it has answered, and for how long it had
work.

By this a hung engine is told from an idle one: heartbeats say it, and the controller judges
(services/controller/fleet/liveness.py). Whether the pull loop turns is not said: that tells nothing of an engine. And
by this people and scalers see what the replica did with its time.
"""

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from rolecall.rpc.membership import Pulse
from rolecall.telemetry.states import StateClock

LOOK_S = 0.25
"""Seconds between two looks at what a heartbeat says."""

STATES = ("waiting_weights", "loading_weights", "sampling", "answering", "waiting_prompts")
"""What a replica does with its time. It samples groups of the run; else it answers Generate alone, as for an
evaluation; else it waits for prompts. Around both, it is paused until weights are attested, or loads them.
"""


class Activity:
    """The count of what an engine owes and has answered, and the seconds for which it had work and was not paused."""

    def __init__(self) -> None:
        self.num_answers = 0
        """Calls that the engine has answered, promptly or by a load's end."""
        self._num_asked = 0
        self._is_loading = False
        self._num_awaiting_load = 0
        self._num_running = 0
        self._is_paused = True
        self._since: float | None = None
        self._busy_s = 0.0
        self._num_groups = 0
        self.waits_for_places = False
        """Whether an environment that is away or full keeps groups from being claimed."""
        self.states = StateClock(STATES)

    @property
    def owes(self) -> bool:
        """Whether the engine owes something: tokens, an answer to what ends promptly in an engine that lives, or the
        end of a load that its caller has given up (whose collective is over).

        A load that is waited for is not counted: it may wait for the actor.
        """
        return self._since is not None or self._num_asked > 0 or (self._is_loading and not self._num_awaiting_load)

    @property
    def has_work(self) -> bool:
        """Whether it owes something, has a group of the run in hand, or waits for its environment to take one. Groups
        have deadlines of their own; an environment is waited for without end.
        """
        return self.owes or self._num_groups > 0 or self.waits_for_places

    @property
    def busy_s(self) -> float:
        """Seconds with work, until now."""
        self.change()
        return self._busy_s

    def change(self, running: int = 0, paused: bool | None = None) -> None:
        """Counts `running` requests more (or fewer), or notes a pause or its end."""
        now = time.monotonic()
        if self._since is not None:
            self._busy_s += now - self._since
        self._num_running += running
        self._is_paused = self._is_paused if paused is None else paused
        self._since = now if self._num_running and not self._is_paused else None
        self._show_state()

    @contextmanager
    def sampling_group(self) -> Iterator[None]:
        """Surrounds the sampling of a group of the run."""
        self._num_groups += 1
        self._show_state()
        try:
            yield
        finally:
            self._num_groups -= 1
            self._show_state()

    def _show_state(self) -> None:
        if self._is_loading or self._is_paused:
            state = "loading_weights" if self._is_loading else "waiting_weights"
        elif self._num_groups:
            state = "sampling"
        else:
            state = "answering" if self._num_running else "waiting_prompts"
        if state != self.states.state:
            self.states.enter(state)

    @contextmanager
    def asking(self) -> Iterator[None]:
        """Surrounds what an engine that lives answers promptly, or moves while it does not."""
        self._num_asked += 1
        self.num_answers += 1  # the time before, without work, is not a time without progress
        try:
            yield
        finally:
            self._num_asked -= 1
            self.num_answers += 1

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Surrounds a load of weights, until it ended in whatever way."""
        self._is_loading = True
        self._show_state()
        try:
            yield
        finally:
            self._is_loading = False
            self._show_state()
            self.num_answers += 1

    @contextmanager
    def awaiting_load(self) -> Iterator[None]:
        """Surrounds a caller's wait for a load."""
        self._num_awaiting_load += 1
        try:
            yield
        finally:
            self._num_awaiting_load -= 1


class Watched(Protocol):
    """A replica, as its heartbeats show it."""

    @property
    def is_busy(self) -> bool:
        """Whether the engine owes something, so that `num_moves` must grow."""

    @property
    def has_work(self) -> bool:
        """Whether its moves bring the run on: those of an engine without work only say that it lives."""

    @property
    def num_moves(self) -> int:
        """Grows whenever the engine moves."""


async def feed_heartbeat(watched: Watched, pulse: Pulse) -> None:
    """Shows `watched` to `pulse` every LOOK_S, until cancelled."""
    seen = -1
    while True:
        if watched.has_work and watched.num_moves != seen:
            seen = watched.num_moves
            pulse.progress()
        pulse.busy = watched.is_busy
        await asyncio.sleep(LOOK_S)
