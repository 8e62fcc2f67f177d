"""Drives one chaos run: starts the launcher, wires the links, draws faults and sees to it that each hits, and that the
run moves on after it.

A target gets its next fault once it has worked again after the last one, so faults come as fast as recovery allows, on
several roles at once. When no step was applied for BREATH_S the driver holds its fire until one is: chaos must not be
what hangs. It judges one thing itself: that the run moves within `hang_s`; the rest is checker.py's.
"""

import asyncio
import logging
import shutil
import signal
import sys
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall.errors import RoleCallError
from rolecall.rpc.callers import Caller
from rolecall.rpc.channel import open_channel
from rolecall.rpc.identity import acting_as
from rolecall.settings import RunSettings, load_settings
from rolecall.v1 import controller_pb2, controller_pb2_grpc
from tests.chaos.checker import check_journals, check_live
from tests.chaos.faults import RANDOM, Fault, Kind, role_of
from tests.chaos.links import CallSpy, Link, PhaseServer, Spy, StoreSpy, Traps
from tests.chaos.observer import OUTSIDE, Observer, Story
from tests.chaos.processes import Outside, Processes, exists, send
from tests.chaos.report import Record
from tests.chaos.status import watch

logger = logging.getLogger(__name__)

TICK_S = 0.02
GAP_S = 0.1
"""Least time between two faults."""
RANDOM_S = 0.4
"""A random instant lies within so many seconds."""
CUT_S = 1.5
"""Longest cut."""
SLOW_S = 6.0
"""Longest that a wire is slow."""
END_S = 90.0
"""For the run to end once asked."""
LOOK_S = 5.0
"""Seconds between two looks at the journals."""
AHEAD = 12
"""Faults looked at for one whose target is up: keeps the order of the draw but for these."""
NUM_CALM_STEPS = 3
"""Steps applied after the last fault, before the run is ended."""
_HANGS = (Kind.STOP, Kind.ZOMBIE)
_SIGNALS = {Kind.KILL: signal.SIGKILL, Kind.TERM: signal.SIGTERM}


LIGHT = "tests.chaos.roles"
"""The package whose roles have hooks and links."""


class RunHungError(AssertionError):
    """The run did not move, or not end."""


@dataclass(frozen=True)
class Plan:
    """What to do to one run."""

    folder: Path
    """Holds the configuration; its path is short, for sockets are made in it."""
    config: Path
    workers: list[str]
    """Processes of the launcher."""
    faults: Iterator[Fault]
    num_kills: int
    lease_s: float
    hang_s: float = 60.0
    """Longest time without progress."""
    start_s: float = 200.0
    """For the first step."""
    package: str = LIGHT
    max_down: int = 3
    """Targets that wait for their fault, or are not back from it, at a time: with more at once, few phases would be
    left to hit.
    """
    armed_s: float = 2.0
    """Longest wait for a phase while the run moves; then the fault hits where the target is."""
    breath_s: float = 6.0
    """Time without a step after which faults wait for one."""


class Driver:
    """One run."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._seen = Observer()
        self._traps = Traps(self._seen.visited)
        self._wire = plan.folder / "wire"
        self._links: dict[str, Link] = {}
        self._phases = PhaseServer(self._wire / "phases", self._traps)
        self._processes: Processes | None = None
        self._outside = Outside(f"unix:{plan.folder / 'scorer.sock'}", plan.folder / "scorer.log")
        self._armed: set[str] = set()
        """Targets whose fault waits for its phase."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._failure: BaseException | None = None
        """Of one of the tasks."""

    @property
    def story(self) -> Story:
        """What happened so far."""
        return self._seen.story

    async def run(self) -> Story:
        """Runs the plan to its end. RunHungError, AssertionError of a journal."""
        started, plan = time.monotonic(), self._plan
        await self._wire_up()
        self._spawn(self._tend_outside())
        self._processes = Processes(
            [sys.executable, "-m", "tests.chaos.launch", str(plan.config), plan.package],
            self._plan.folder / "launcher.log",
        )
        try:
            settings = await self._resolved()
            if self._plan.package == LIGHT:
                await self._wire_calls(settings)
            else:
                self._spawn(watch(settings, self._seen, self._traps))
            await self._until(lambda: self.story.steps >= 1, self._plan.start_s, "the first step")
            await self._fire()
            await self._settle()
            await self._end(settings)
        finally:
            for task in list(self._tasks):
                task.cancel()
            self._processes.end()
            self._outside.end()
            await self._phases.close()
            for link in self._links.values():
                await link.close()
            await asyncio.sleep(TICK_S)  # what was broken off ends by itself
            shutil.rmtree(self._wire, ignore_errors=True)
        self.story.wall_s = time.monotonic() - started
        return self.story

    # --- the wires --------------------------------------------------------------------------------

    async def _wire_up(self) -> None:
        if self._plan.package != LIGHT:
            return
        self._wire.mkdir()
        await self._phases.start()
        for worker in self._plan.workers:
            spy = StoreSpy(worker, self._traps, self._seen.done)
            await self._link(
                f"{worker}:store",
                str(self._wire / f"{worker}.store"),
                self._plan.folder / "run" / "store" / "store.sock",
                spy,
            )
        await self._link("actor:weights", str(self._wire / "weights.link"), self._wire / "weights.real", Spy())

    async def _wire_calls(self, settings: RunSettings) -> None:
        sections = {
            "controller": settings.controller,
            "actor": settings.actor,
            "critic": settings.critic,
            "reward": settings.reward,
            **settings.references,
        }
        for worker in self._plan.workers:
            section = sections.get(worker)
            listen = str(section.bind) if section is not None else str(self._wire / f"{worker}.link")
            spy = CallSpy(worker, self._traps) if worker == "reward" else Spy()
            await self._link(f"{worker}:calls", listen, self._wire / f"{worker}.real", spy)

    async def _link(self, name: str, listen: str, target: Path, spy: Spy) -> None:
        self._links[name] = Link(listen, target, spy)
        await self._links[name].start()

    async def _resolved(self) -> RunSettings:
        path = self._plan.folder / "run" / "config.yaml"
        # it is written in one go, after it was made
        await self._until(lambda: path.exists() and path.stat().st_size > 0, 120.0, "the launcher's config.yaml")
        return load_settings(path)

    # --- faults -----------------------------------------------------------------------------------

    async def _fire(self) -> None:
        """Until as many kills were made as planned."""
        ahead = [next(self._plan.faults) for _ in range(AHEAD)]
        last, looked_at = 0.0, time.monotonic()
        while self.story.num_kills < self._plan.num_kills:
            await asyncio.sleep(TICK_S)
            self._check_moving()
            now = time.monotonic()
            if now - looked_at > LOOK_S:
                looked_at = now
                await self._look()
            is_full = len(self._armed | self._seen.open.keys()) >= self._plan.max_down
            if is_full or now - last < GAP_S or now - self._seen.stepped_at > self._plan.breath_s:
                continue
            fault = next((fault for fault in ahead if self._may_hit(fault)), None)
            if fault is not None:
                ahead.remove(fault)
                ahead.append(next(self._plan.faults))
                last = now
                self._armed.add(fault.target)
                self._spawn(self._await_phase(fault))

    def _may_hit(self, fault: Fault) -> bool:
        """Whether the target is at work. One hang at a time, so that it is known what each costs; and where a rollout
        takes half a minute to start, one of them at a time, for without any the run can only wait.
        """
        down = [record.fault for record in self._seen.open.values()]
        hangs = fault.kind in _HANGS and any(other.kind in _HANGS for other in down)
        last = (
            self._plan.package != LIGHT
            and role_of(fault.target) == "rollout"
            and any(role_of(other.target) == "rollout" for other in down)
        )
        return fault.target in self._seen.up - self._armed and not hangs and not last

    async def _await_phase(self, fault: Fault) -> None:
        key, hit = (fault.watched, fault.phase), asyncio.Event()

        def spring() -> bool:
            hit.set()
            self._hit(fault, exactly=True)
            return fault.kind is Kind.LOST_REPLY

        if fault.phase == RANDOM or key in self._traps.armed:
            await asyncio.sleep(fault.size * RANDOM_S)
        else:
            self._traps.armed[key] = spring
            await self._while_moving(hit, self._plan.armed_s)
            if not hit.is_set():
                self._traps.armed.pop(key, None)
        if not hit.is_set() and fault.kind is not Kind.LOST_REPLY:
            self._hit(fault, exactly=False)
        self._armed.discard(fault.target)

    async def _while_moving(self, event: asyncio.Event, timeout_s: float) -> None:
        """Waits for `event`; while the run stands still, no phase can be expected, and the clock stands still with
        it.
        """
        left_s, deadline = timeout_s, time.monotonic() + self._plan.hang_s / 2
        while left_s > 0 and not event.is_set() and time.monotonic() < deadline:
            with suppress(TimeoutError):
                async with asyncio.timeout(TICK_S):
                    await event.wait()
            left_s -= TICK_S if time.monotonic() - self._seen.moved_at < 1.0 else 0.0

    def _hit(self, fault: Fault, *, exactly: bool) -> None:
        record = Record(fault, time.monotonic(), exactly)
        if fault.kind in _HANGS and fault.target in self._seen.open:
            return  # it is starting: one that hangs before it has joined is only known by controller.start_timeout_s
        if fault.kind in (Kind.CUT, Kind.SLOW):
            self._disturb(fault)
        elif fault.kind is not Kind.LOST_REPLY:
            pid = self._pid_of(fault.target)
            if pid is None or not send(pid, _SIGNALS.get(fault.kind, signal.SIGSTOP)):
                logger.info("%s found nobody", fault)
                return
            if fault.kind is not Kind.KILL:
                self._spawn(self._watch_stopped(record, pid))
        logger.info("%s%s", fault, "" if exactly or fault.phase == RANDOM else " (not visited)")
        self._seen.hit(record)

    def _pid_of(self, target: str) -> int | None:
        if target == OUTSIDE:
            return self._outside.pid
        pid = self._seen.pids.get(target)
        return pid if pid is not None and exists(pid) else self._process().pid_of(target)

    def _disturb(self, fault: Fault) -> None:
        if fault.target == "store":
            links = [link for name, link in self._links.items() if name.endswith(":store")]
        else:
            links = [link for name, link in self._links.items() if name.partition(":")[0] == fault.target]
            links = links if fault.size < 0.5 else links[: 1 + int(fault.size * 10) % len(links)]
        for link in links:
            if fault.kind is Kind.CUT:
                link.cut(fault.size * CUT_S)
            else:
                link.slow(fault.size * SLOW_S)

    async def _watch_stopped(self, record: Record, pid: int) -> None:
        """Notes when a process that was stopped, or asked to end, has ended; wakes a zombie up."""
        until = (
            time.monotonic() + self._plan.lease_s * (0.3 + 1.4 * record.fault.size)
            if record.fault.kind is Kind.ZOMBIE
            else float("inf")
        )
        while exists(pid):
            if time.monotonic() > until:
                send(pid, signal.SIGCONT)
                return
            await asyncio.sleep(0.05)
        record.noticed_at = record.noticed_at or time.monotonic()

    async def _tend_outside(self) -> None:
        while True:
            if self._outside.tend():
                self._seen.noticed(OUTSIDE)
            await asyncio.sleep(0.1)

    # --- watching and ending ----------------------------------------------------------------------

    async def _look(self) -> None:
        story = self.story
        for check in (check_journals, check_live):
            verdict = await asyncio.to_thread(check, self._plan.folder / "run")
            assert not verdict.problems, "; ".join(verdict.problems[:5])
            story.num_judged_live += verdict.figures["trajectories judged live"]
        logger.info(
            "%d kills, %d faults, %d steps, longest stillness %.1f s",
            story.num_kills,
            len(story.records),
            story.steps,
            story.max_still_s,
        )

    def _check_moving(self) -> None:
        self._check_alive()
        if time.monotonic() - self._seen.moved_at > self._plan.hang_s:
            still_s = self._seen.still()
            raise RunHungError(
                f"nothing moved for {still_s:.0f} s after {self.story.still_after}; down: {sorted(self._seen.open)}"
            )

    async def _settle(self) -> None:
        """Everybody is back, and a few steps were applied since."""
        self._traps.armed.clear()
        await self._until(lambda: not self._armed and not self._seen.open, 2 * self._plan.hang_s, "everybody's return")
        steps = self.story.steps
        await self._until(
            lambda: self.story.steps >= steps + NUM_CALM_STEPS, self._plan.hang_s, f"{NUM_CALM_STEPS} more steps"
        )

    async def _end(self, settings: RunSettings) -> None:
        deadline = time.monotonic() + END_S
        assert settings.controller.address is not None
        rpc = acting_as(settings, Caller.OPERATOR).rpc
        async with open_channel(settings.controller.address, rpc) as channel:
            with suppress(RoleCallError):
                await controller_pb2_grpc.ControllerServiceStub(channel).StopRun(
                    controller_pb2.StopRunRequest(checkpoint=True), timeout=10
                )
        while self._process().code is None:
            if time.monotonic() > deadline:
                raise RunHungError(f"the run did not end within {END_S:.0f} s of StopRun")
            await asyncio.sleep(TICK_S)
        self.story.exit_code = self._process().code

    async def _until(self, true: Callable[[], bool], timeout_s: float, what: str) -> None:
        deadline = time.monotonic() + timeout_s
        while not true():
            if time.monotonic() > deadline:
                raise RunHungError(
                    f"waited {timeout_s:.0f} s for {what}; down: {sorted(self._seen.open)}; see {self._plan.folder}"
                )
            self._check_alive()
            await asyncio.sleep(TICK_S)

    def _process(self) -> Processes:
        assert self._processes is not None
        return self._processes

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._failure = self._failure or error

    def _check_alive(self) -> None:
        if self._failure is not None:
            raise self._failure
        code = self._process().code
        if code is not None:
            raise RunHungError(f"the launcher ended with {code} while the run was to go on; see {self._process().log}")
