"""The one thread that touches the device, seen from asyncio. Owns order and the bound on what waits. Uses no torch and
no gRPC.

A `RoleCallError` of a piece of work is that piece's answer: the role raises them only where every rank can go on.
Anything else may have left a half-applied step or ranks out of step with each other, so it also ends the process
(`failed`) and the role restarts from its checkpoint. The caller then gets a WorkerLostError, for asking again may help.
One of ENDS_ROLE does both: asking again does not help.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from rolecall.errors import ENDS_ROLE, ExhaustedError, RoleCallError, WorkerLostError
from rolecall.rpc.membership import Pulse
from rolecall.telemetry.states import StateClock

T = TypeVar("T")
logger = logging.getLogger(__name__)

MAX_WAITING = 64
"""Pieces of work that may wait for the device; one more is refused."""
KEEP_ALIVE_S = 5.0
"""Seconds without work after which the other ranks are shown that this one lives."""
STOP_S = 30.0
"""Seconds that the last work may take when it stops."""

STATES = ("starting", "waiting", "training", "computing", "publishing", "saving", "loading", "moving")
"""What a trainer or reference does with its time: it waits for calls, or does the work of one."""
_STATE_OF_PHASE = {
    "loading the model": "starting",
    "training": "training",
    "computing": "computing",
    "publishing": "publishing",
    "saving": "saving",
    "loading": "loading",
    "offloading": "moving",
    "onloading": "moving",
}
"""Other phases, of keeping alive and stopping, are part of waiting."""


class DeviceThread:
    """The thread of rank 0 that does all device work, one piece at a time, in the order of the calls."""

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="device")
        self.states = StateClock(STATES)
        """What the device does."""
        self.num_waiting = 0
        """Pieces of work in hand, the one under way included."""
        self._pulse: Pulse | None = None
        self._last_work = time.monotonic()
        self._ticker: asyncio.Task[None] | None = None
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set with the first exception that ends the process."""

    def show_to(self, pulse: Pulse) -> None:
        """Reports phases and progress to `pulse` from now on."""
        self._pulse = pulse

    def progressed(self) -> None:
        """Called by long work, in any thread, whenever a part of it is done."""
        if self._pulse is not None:
            self._pulse.progress()

    async def run(self, work: Callable[[], T], phase: str) -> T:
        """Runs `work` and returns what it does. Once started it runs to its end, also when the caller is cancelled.
        ExhaustedError when too much waits already, WorkerLostError when the work failed with anything but a
        RoleCallError, or other work did before.

        No deadline here: work that stops calling `progressed` for the section's hang_s is taken for hung by the
        controller, and the process ends.
        """
        if self.num_waiting >= MAX_WAITING:
            raise ExhaustedError(f"{MAX_WAITING} calls wait for this role's device already; send fewer at a time")
        self._check()
        self.num_waiting += 1
        future = asyncio.get_running_loop().run_in_executor(self._executor, self._do, work, phase)
        future.add_done_callback(self._finished)
        await asyncio.wait({future})  # bounded: by the caller's deadline; hung work by hang_s, which ends the process
        error = future.exception()
        if error is not None and not isinstance(error, RoleCallError):
            raise WorkerLostError(
                f"the device failed while {phase} ({type(error).__name__}: {error}); this role restarts"
            ) from error
        return future.result()

    def _check(self) -> None:
        if self.failed.done():
            raise WorkerLostError(f"the device failed before ({self.failed.exception()}); this role restarts")

    def _do(self, work: Callable[[], T], phase: str) -> T:
        self._check()
        self.states.enter(_STATE_OF_PHASE.get(phase, "waiting"))
        if self._pulse is not None:
            self._pulse.phase, self._pulse.busy = phase, True
            self._pulse.progress()  # the time without work before this piece is not a time without progress
        try:
            return work()
        finally:
            self.states.enter("waiting")
            if self._pulse is not None:
                self._pulse.phase, self._pulse.busy = "idle", False
                self._pulse.progress()

    def _finished(self, future: "asyncio.Future[T]") -> None:
        self.num_waiting -= 1
        self._last_work = time.monotonic()
        error = None if future.cancelled() else future.exception()
        ends = isinstance(error, ENDS_ROLE) or not isinstance(error, RoleCallError)
        if error is not None and ends and not self.failed.done():
            logger.error("the device thread failed: %s", error, exc_info=error)
            self.failed.set_exception(error)

    def start_keep_alive(self, keep_alive: Callable[[], None]) -> None:
        """Has `keep_alive` called in the thread after each KEEP_ALIVE_S seconds without work."""
        self._ticker = asyncio.create_task(self._tick(keep_alive))

    async def _tick(self, keep_alive: Callable[[], None]) -> None:
        while not self.failed.done():
            await asyncio.sleep(KEEP_ALIVE_S)
            if not self.num_waiting and time.monotonic() - self._last_work >= KEEP_ALIVE_S:
                with suppress(WorkerLostError):  # `failed` says it
                    await self.run(keep_alive, "idle")

    async def close(self, last: Callable[[], None] | None = None) -> None:
        """Runs `last` after what is under way, waits at most STOP_S for it, and takes no more work."""
        if self._ticker is not None:
            self._ticker.cancel()
        if self.failed.done():
            self.failed.exception()  # whoever closes knows
        elif last is not None:
            _, unfinished = await asyncio.wait({asyncio.ensure_future(self.run(last, "stopping"))}, timeout=STOP_S)
            if unfinished:
                logger.warning("the device thread is still at work after %.0f s; leaving it", STOP_S)
        self._executor.shutdown(wait=False, cancel_futures=True)
