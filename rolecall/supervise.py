"""Watches over a run that `rolecall/launch.py` started: shows its progress, notices the first process that fails, ends them all.

Owns `rolecall train` from the resolved configuration to the exit code. Decides nothing about the run: the controller does.
"""

import asyncio
import re
import signal
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from rolecall.errors import DeadlineError, UnavailableError
from rolecall.launch import STARTED, Fleet, Worker, plan_workers, prepare_run_dir, resolve, write_config
from rolecall.progress import View, open_view
from rolecall.rpc.channel import open_channel
from rolecall.settings import RunSettings
from rolecall.store.embedded import EmbeddedStore
from rolecall.v1 import controller_pb2, controller_pb2_grpc

POLL_S = 0.1
"""Seconds between looks at the processes."""
RECONNECT_S = 0.5
"""Seconds before the controller is asked again while it does not answer."""
WATCH_TIMEOUT_S = 3600.0
"""Deadline of one WatchRun stream; it is opened again."""
CAUSE_GRACE_S = 3.0
"""For a role that failed to end after the controller has ended of it."""
END_GRACE_S = 10.0
"""For the controller to end by itself after the run has ended."""
LOG_TAIL_LINES = 20
"""Lines of a failed role's log that are shown."""
INTERRUPTED = 130

_LAST_WORD = re.compile(r"^\S+ failed: ")


def train(settings: RunSettings, config_path: Path, *, resume: bool) -> int:
    """Runs `settings` to its end and returns the exit code: 0 done, 1 failed, 130 interrupted. Call it from the main thread."""
    lock = prepare_run_dir(settings, resume=resume)
    resolved = resolve(settings, config_path)
    fleet = Fleet()
    view = open_view(sys.stdout)
    try:
        write_config(resolved)
        return asyncio.run(_supervise(settings, resolved, fleet, view, lock))
    finally:
        view.close()
        fleet.stop()


async def _supervise(settings: RunSettings, resolved: RunSettings, fleet: Fleet, view: View, lock: int) -> int:
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # The second signal does not wait for anyone.
        loop.add_signal_handler(number, lambda: fleet.kill() if interrupted.is_set() else interrupted.set())
    url = settings.store.url.get_secret_value() if settings.store.url else _start_store(resolved, fleet)
    for worker in plan_workers(settings, resolved, url):
        fleet.start(worker)
    view.note(f"run {resolved.run.name} in {resolved.run.dir}: controller at {resolved.controller.address}, {len(fleet.processes)} processes, logs in logs/")
    watching = asyncio.create_task(_watch(resolved, view))
    interruption = asyncio.create_task(interrupted.wait())
    failure = asyncio.create_task(_first_exit(fleet))
    try:
        await asyncio.wait([watching, interruption, failure], return_when=asyncio.FIRST_COMPLETED)
        if interrupted.is_set():
            view.note("interrupted: stopping every process")
            return INTERRUPTED
        return await _end(resolved, fleet, view, watching)
    finally:
        for task in (watching, interruption, failure):
            task.cancel()
        await asyncio.gather(watching, interruption, failure, return_exceptions=True)
        await asyncio.to_thread(fleet.stop)


async def _wait_for_the_cause(fleet: Fleet) -> None:
    """A controller often fails of a role that is still on its way out: gives that role CAUSE_GRACE_S to end, so that it is shown and not the consequence."""
    deadline = time.monotonic() + CAUSE_GRACE_S
    while time.monotonic() < deadline and all(worker.role == "controller" for worker, code in fleet.poll() if code != 0):
        await asyncio.sleep(POLL_S)


def _start_store(resolved: RunSettings, fleet: Fleet) -> str:
    fleet.store = EmbeddedStore(resolved.run.dir / "store", resolved.run.name, resolved.store.max_bytes, resolved.store.binary)
    return fleet.store.start()


async def _watch(resolved: RunSettings, view: View) -> controller_pb2.RunStatus:
    """Shows the run until it ends; returns its last status."""
    assert resolved.controller.address is not None
    status = controller_pb2.RunStatus()
    async with open_channel(resolved.controller.address, resolved.rpc) as channel:
        stub = controller_pb2_grpc.ControllerServiceStub(channel)
        while True:
            with suppress(UnavailableError, DeadlineError):
                async for message in stub.WatchRun(controller_pb2.WatchRunRequest(), timeout=WATCH_TIMEOUT_S):
                    status = message.status
                    view.show(status)
                    if status.state in (controller_pb2.RUN_STATE_DONE, controller_pb2.RUN_STATE_FAILED):
                        return status
            await asyncio.sleep(RECONNECT_S)


async def _first_exit(fleet: Fleet) -> None:
    """Returns when any process has ended."""
    while not fleet.poll() and (fleet.store is None or fleet.store.alive):
        await asyncio.sleep(POLL_S)


async def _end(resolved: RunSettings, fleet: Fleet, view: View, watching: "asyncio.Task[controller_pb2.RunStatus]") -> int:
    """The run has ended or a process has: waits for the controller's last word, says what failed, and returns the exit code."""
    if any(code != 0 for _, code in fleet.poll()):
        await _wait_for_the_cause(fleet)
    else:
        with suppress(TimeoutError):
            async with asyncio.timeout(END_GRACE_S):
                await asyncio.shield(watching)
                while not any(worker.role == "controller" for worker, _ in fleet.poll()):
                    await asyncio.sleep(POLL_S)
    status = watching.result() if watching.done() and not watching.cancelled() and watching.exception() is None else None
    failed = sorted(((worker, code) for worker, code in fleet.poll() if code != 0), key=lambda item: item[0].role == "controller")
    if status is not None and status.state == controller_pb2.RUN_STATE_DONE and not failed:
        return 0
    if failed:
        view.note(describe_failure(*failed[0]))
    if status is not None and status.error:
        view.note(f"controller: {status.error}")
    if fleet.store is not None and not fleet.store.alive:
        view.note(f"store: the embedded store ended; see {fleet.store.log_file}")
    if not failed and status is None:
        ended = ", ".join(worker.name for worker, _ in fleet.poll())
        view.note(f"{ended or 'the store'} ended before the run did; see the logs in {resolved.run.dir / 'logs'}")
    # An orderly end of the controller without a last status is a run that was done already, or stopped: its exit code says so.
    ended_well = [code for worker, code in fleet.poll() if worker.role == "controller"] == [0]
    return 0 if ended_well and not failed and (status is None or not status.error) else 1


def describe_failure(worker: Worker, code: int) -> str:
    """Which process failed and how, the end of what it said, and where the rest is."""
    how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
    lines = worker.log.read_text(errors="replace").splitlines() if worker.log.is_file() else []
    tail = "\n".join(f"    {line}" for line in last_words(lines))
    return f"{worker.name} {how}:\n{tail}\n  log: {worker.log}"


def last_words(lines: Sequence[str]) -> Sequence[str]:
    """The lines up to the first `<role> failed: ...` (of several ranks the first is the cause), else from the last traceback on, else the last ones.

    Of a log that several starts went on in, only the last start's lines count."""
    start = max((index for index, line in enumerate(lines) if line.startswith(STARTED)), default=-1)
    recent = list(lines[start + 1 :])
    for index, line in enumerate(recent):
        if _LAST_WORD.match(line):
            return recent[max(0, index + 1 - LOG_TAIL_LINES) : index + 1]
    starts = [index for index, line in enumerate(recent) if line.startswith("Traceback (most recent call last)")]
    if starts:
        return recent[starts[-1] :][-LOG_TAIL_LINES:]
    return recent[-LOG_TAIL_LINES:]


