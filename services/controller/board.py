"""The run as people see and steer it: state, last metrics, what is awaited; requests to pause, stop and checkpoint.

Owns no decision: the loop writes the state and obeys the requests, the servicer reads the one and makes the other.
"""

import asyncio
from collections.abc import AsyncIterator

from rolecall.telemetry import Metrics
from rolecall.telemetry.states import StateClock
from rolecall.v1 import controller_pb2

MIN_WATCH_INTERVAL_S = 0.25
"""Least time between two messages of WatchRun: changes in between are folded into one."""

MAX_WATCH_INTERVAL_S = 1.0
"""Most time between two messages: queue depths and heartbeats change without anyone telling the board."""

MAX_DROP_CHARS = 500
"""Length of a dropped group's error that people are shown; dead.jsonl has more."""

LOOP_STATES = (
    "starting",
    "recovering",
    "waiting_groups",
    "waiting_rollouts",
    "paused",
    "computing",
    "training",
    "publishing",
    "evaluating",
    "saving",
    "switching",
    "working",
)
"""What the loop waits for, or that it works itself: prepares, seals, counts, reports."""

_STAND_STILL = ("starting", "recovering", "waiting_groups", "waiting_rollouts")
"""States in which nobody is at work on the run: people who paused it may have taken roles away."""

FINAL_STATES = (controller_pb2.RUN_STATE_DONE, controller_pb2.RUN_STATE_FAILED)


class RunBoard:
    """State and requests of one run. Used from one event loop."""

    def __init__(self) -> None:
        self.state: controller_pb2.RunState.ValueType = controller_pb2.RUN_STATE_STARTING
        self.step = 0
        self.told_step = 0
        """Steps whose numbers this process has given the trackers."""
        self.published_step = -1
        """Steps behind the weights that the fleet holds; -1 before the first publish."""
        self.policy_version = -1
        """Version of those weights."""
        self.error = ""
        self.waiting_for = "the roles"
        self.states = StateClock(LOOP_STATES)
        """What the loop did with its time."""
        self.step_metrics = Metrics()
        self.evaluation_metrics = Metrics()
        self.stop_requested = False
        self.stop_with_checkpoint = False
        self.failure = ""
        """What the run was given up for by whoever stopped it; empty where people wished the end."""
        self.checkpoint_requests: list[asyncio.Future[tuple[str, int]]] = []
        """Callers who wait for a checkpoint of the next boundary, each for its (path, step)."""
        self.steered = False
        """Whether this process knows if people want a pause; else the store does."""
        self.newest_landed = (0, 0)
        """Stream position of the newest committed group that a loop of this process has read."""
        self.last_drop = ""
        """The newest group that was dropped because something failed."""
        self.unsaved = ""
        """Since which step no checkpoint could be saved, and why; empty where the last try was."""
        self.num_recoveries = 0
        self.last_failure = ""
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._changed = asyncio.Event()

    def move(self, state: controller_pb2.RunState.ValueType, waiting_for: str = "") -> None:
        """The loop reached a state."""
        self.state, self.waiting_for = state, waiting_for
        self._changed.set()

    def wait_for(self, what: str, state: str | None = None) -> None:
        """The loop waits for `what`, in `state` from now on where one is given; a run that people paused is paused
        where it waits for a role or for groups.
        """
        self.waiting_for = what
        if state is not None:
            self.states.enter("paused" if self.paused and state in _STAND_STILL else state)
        self._changed.set()

    def begin(self, step: int) -> None:
        """The run stands at `step` steps, after which a life of the loop begins."""
        self.step, self.told_step = step, min(self.told_step, step)
        self._changed.set()

    def published(self, step: int, policy_version: int) -> None:
        """The fleet holds the weights after `step` steps."""
        self.published_step, self.policy_version = step, policy_version
        self._changed.set()

    def applied(self, step: int, metrics: Metrics) -> None:
        """`step` steps are applied, or more of which no report has told yet; `metrics` are those of the last."""
        self.step, self.step_metrics = max(self.step, step), metrics
        self.move(self.state, self.waiting_for)

    def evaluated(self, metrics: Metrics) -> None:
        """The policy was evaluated."""
        self.evaluation_metrics = metrics
        self.move(self.state)

    def landed(self, position: tuple[int, int]) -> None:
        """A committed group was read; a loop that starts over reads some again."""
        self.newest_landed = max(self.newest_landed, position)

    def drop(self, gid: int, reason: str, error: str) -> None:
        """A group was dropped because of `error`."""
        self.last_drop = f"group {gid}: {reason}: {error[:MAX_DROP_CHARS]}"
        self._changed.set()

    def saved(self, unsaved: str = "") -> None:
        """A checkpoint was saved; or could not be, as `unsaved` says."""
        self.unsaved = unsaved
        self._changed.set()

    def start_over(self, failure: str) -> None:
        """The loop starts over from the store, because of `failure`."""
        self.num_recoveries += 1
        self.last_failure = failure
        self.states.enter("recovering")
        self.move(controller_pb2.RUN_STATE_STARTING)

    def fail(self, error: str) -> None:
        """The run ends in an error."""
        self.error = error
        self.move(controller_pb2.RUN_STATE_FAILED)

    @property
    def paused(self) -> bool:
        """Whether nothing is to be admitted."""
        return not self._resumed.is_set()

    def pause(self) -> None:
        """Admit nothing from now on."""
        self.steered = True
        self._resumed.clear()
        self._changed.set()

    def resume(self) -> None:
        """Admit again."""
        self.steered = True
        self._resumed.set()
        self._changed.set()

    def stop(self, *, checkpoint: bool, failure: str) -> None:
        """End after the step in progress, as failed where `failure` says of what."""
        self.stop_requested = True
        self.stop_with_checkpoint = self.stop_with_checkpoint or checkpoint
        self.failure = self.failure or failure
        self._changed.set()

    def request_checkpoint(self) -> "asyncio.Future[tuple[str, int]]":
        """Save at the next step boundary; (path, step) once committed."""
        self.checkpoint_requests.append(asyncio.get_running_loop().create_future())
        return self.checkpoint_requests[-1]

    def take_checkpoint_requests(self) -> "list[asyncio.Future[tuple[str, int]]]":
        """Takes the callers who wait for a checkpoint; they are answered by the next one, or given back."""
        taken, self.checkpoint_requests = self.checkpoint_requests, []
        return taken

    def give_back(self, requests: "list[asyncio.Future[tuple[str, int]]]") -> None:
        """The checkpoint that these were to be answered by was given up: the next one answers them."""
        self.checkpoint_requests.extend(requests)

    async def changes(self) -> AsyncIterator[None]:
        """Yields at once, then after every change and at least every MAX_WATCH_INTERVAL_S; ends after a final state."""
        while True:
            self._changed.clear()
            final = self.state in FINAL_STATES
            yield
            if final:
                return
            await asyncio.sleep(MIN_WATCH_INTERVAL_S)
            try:
                async with asyncio.timeout(MAX_WATCH_INTERVAL_S):
                    await self._changed.wait()
            except TimeoutError:
                continue
