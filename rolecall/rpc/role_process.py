"""The life of a role's process: arguments, signals, serving until asked to stop, exit code, and one clear line when it
failed.

Imports nothing heavy, so that `--help` and configuration errors are instant; `services/<role>/__main__.py` imports
engines after `parse_args`.

Exit codes, by which whoever supervises the process decides: 0 done, or asked to stop where the role has no end of its
own, FINAL when starting it again cannot help, USAGE for a bad command line or configuration, RESTART for what may pass,
STOPPED before its end. A process killed by a signal is one to start again.
"""

import asyncio
import concurrent.futures
import contextlib
import faulthandler
import gc
import logging
import os
import resource
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolecall.config_file import overrides_from
from rolecall.errors import BudgetSpentError, ConfigError, RoleCallError, WorkerLostError
from rolecall.lifeline import die_with_parent
from rolecall.rpc.callers import Caller
from rolecall.rpc.identity import acting_as
from rolecall.rpc.listening import require_ports
from rolecall.settings import (
    RunSettings,
    incarnation_given,
    load_settings,
    parent_to_die_with,
    with_running_store,
)
from rolecall.terminal import say

if TYPE_CHECKING:
    from rolecall.rpc.server import Server

logger = logging.getLogger(__name__)
FINAL = 1
"""An error that is not retryable: a bad setting, a refusal."""
USAGE = 2
RESTART = 75
"""EX_TEMPFAIL of sysexits.h: a retryable error, an unforeseen one, or a process that was given up as hung."""
STOPPED = 128 + signal.SIGTERM
"""What a shell says of a process that SIGTERM ended: a role that a signal stopped before the run was over. With 0 a
drained or deleted pod of a Kubernetes Job would count as done.
"""
LEAVE_S = 0.5
"""Seconds between the verdict that this process hangs and its end, for its last lines to be written."""
_CLEAN = (0, STOPPED)
_WITHOUT_WEIGHTS = ("controller", "reward")
"""Roles that hold no model."""
_NUM_THREADS = 32
"""Bound on `asyncio.to_thread` calls at work in a process; further ones queue."""
_END_GRACE_S = 5.0
"""Seconds between the end of a role and that of its process, which leaves what is still at work then."""
_TASKS_GRACE_S = 2.0
"""Wait in it for the tasks that are still at work, and again for generators."""
_TRACEBACK_LINES = 12

_USAGE = """usage: rolecall serve {role} CONFIG [--name INSTANCE] [--SECTION.KEY VALUE ...]

  CONFIG                  the run's YAML file
  --name INSTANCE         name of this worker (default: {default})
  --SECTION.KEY VALUE     overrides one key of the file, e.g. --telemetry.log_level DEBUG; the value is read as YAML
  --help                  this text
"""


@dataclass(frozen=True)
class ServiceArgs:
    """The command line of a role's process, read."""

    settings: RunSettings
    """The run's configuration, overrides applied."""
    worker: str
    """Name of the instance, e.g. "actor", "rollout-0", "ref"."""
    incarnation: str
    """New at each start: 8 hex digits, chosen by the launcher where there is one."""


def parse_args(role: str, argv: Sequence[str] | None = None) -> ServiceArgs:
    """Reads the command line of `role` (None: sys.argv). Prints one clear line and exits with 2 on a bad one, with 0
    after --help.
    """
    try:
        return _parse(role, list(sys.argv[1:] if argv is None else argv))
    except ConfigError as error:
        _say(f"{role} failed: {error.message}")
        raise SystemExit(USAGE) from None


def _parse(role: str, words: list[str]) -> ServiceArgs:
    files: list[str] = []
    others: list[str] = []
    name: str | None = None
    while words:
        word = words.pop(0)
        key, equals, value = word.partition("=")
        if word in ("-h", "--help"):
            say(_USAGE.format(role=role, default="rollout-<random>" if role == "rollout" else role))
            raise SystemExit(0)
        if not word.startswith("-") and not files:
            files = [word]
        elif key == "--name":
            if not equals and not words:
                raise ConfigError(f"--name needs a value; see rolecall serve {role} --help")
            name = value if equals else words.pop(0)
        else:
            # An override; its value goes with it, so that a value that reads "--help" is a value.
            others += [word] if equals else [word, *words[:1]]
            words = words if equals else words[1:]
    overrides = overrides_from(others)
    if not files:
        raise ConfigError(f"CONFIG, the run's YAML file, is missing; see rolecall serve {role} --help")
    path = Path(files[0])
    settings = with_running_store(load_settings(path, overrides), role)
    _ = settings.run.total_steps  # of a file whose epochs nobody counted, ConfigError now and not from a device thread
    if role not in _WITHOUT_WEIGHTS:
        require_ports(settings.weights)
    settings = acting_as(settings, Caller(role))
    incarnation = incarnation_given() or uuid.uuid4().hex[:8]
    return ServiceArgs(settings, name or _default_name(role, settings, incarnation), incarnation)


def _default_name(role: str, settings: RunSettings, incarnation: str) -> str:
    if role == "rollout":
        return f"rollout-{incarnation}"
    if role == "reference":
        if len(settings.references) != 1:
            raise ConfigError(f"--name is missing; name one of references ({sorted(settings.references)})")
        return next(iter(settings.references))
    return role


class _Life:
    """Whether this process was asked to stop, and whether anyone listens for it yet."""

    def __init__(self) -> None:
        self.stop = asyncio.Event()
        self.heeded = False
        self.owns_process = False
        """Whether the process is there for this life alone, so that it may end with it."""
        self.main: asyncio.Future[None] | None = None

    def ask(self) -> None:
        """Asks `main` to stop, or cancels it where it does not listen yet."""
        if self.main is not None and not self.heeded:
            self.main.cancel()
        self.stop.set()


_LIFE: ContextVar[_Life] = ContextVar("rolecall_life")


def stop_requested() -> asyncio.Event:
    """Set at SIGTERM or SIGINT. Whoever asks for it takes over stopping: before the first call of this function a
    signal cancels `main` instead.

    Outside `run` (in tests) it is an event of the current context that nobody else sets.
    """
    life = _LIFE.get(None)
    if life is None:
        life = _Life()
        _LIFE.set(life)
    life.heeded = True
    return life.stop


def way_out(role: str) -> Callable[[WorkerLostError], None]:
    """Returns a call that ends this process with RESTART after LEAVE_S, whatever its event loop and its device threads
    do; any thread may make it.

    It is for a worker that was given up as hung: another takes its place, and nothing it still holds is wanted. Ask for
    it in `main`'s context. Outside `run` (in tests) it does nothing.
    """
    life = _LIFE.get(None)
    owns_process = life is not None and life.owns_process

    def leave(error: WorkerLostError) -> None:
        if not owns_process:
            return
        _say(f"{role} failed: {error.message}")
        time.sleep(LEAVE_S)
        os._exit(RESTART)

    return leave


def way_to_stop() -> Callable[[], None]:
    """Returns a call that asks this process to stop as its first signal does; any thread may make it, and repeat it. A
    signal that comes after it is the first one still.

    Ask for it in `main`'s context. Outside `run` (in tests) it does nothing.
    """
    life, loop = _LIFE.get(None), asyncio.get_running_loop()

    def ask() -> None:
        if life is not None:
            with contextlib.suppress(RuntimeError):  # the loop is over
                loop.call_soon_threadsafe(life.ask)

    return ask


@contextlib.contextmanager
def importing() -> Iterator[None]:
    """Looks for no garbage while libraries like torch and vLLM are imported inside, nor later among what they leave.
    The one would take a sixth of the time, the other stops a loop for half a second.
    """
    gc.disable()
    yield
    gc.freeze()
    gc.enable()


def run(main: Callable[[], Awaitable[None]], role: str = "service", *, has_end: bool = False) -> int:
    """Runs `main` on a new event loop; returns 0 when it ended or was stopped (STOPPED where the role `has_end`, of its
    own), else ends the process with FINAL or RESTART (the reason is printed).

    The last thing a process does: return what it returns from there. Five seconds after the end of `main` the process
    is over, whatever else it runs.

    A signal sets `stop_requested()`, a second one cancels `main`. Ends with its launcher when ROLECALL_DIE_WITH_PARENT
    says so. A crash of native code writes the Python stacks of all threads to stderr.
    """
    faulthandler.enable(2)
    allow_many_files()
    try:
        tie_to_parent()
    except (ConfigError, OSError) as error:
        return _failed(role, error)
    loop = asyncio.new_event_loop()
    loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(_NUM_THREADS, "worker"))
    asyncio.set_event_loop(loop)
    try:
        was_stopped = loop.run_until_complete(_until_stopped(main))
    except (Exception, asyncio.CancelledError) as error:  # entry point: whatever ended the role is said once, here
        code = _failed(role, error)
        if isinstance(error, WorkerLostError):
            logging.shutdown()
            os._exit(code)
        # before anything that was left open is let go: a gRPC server that still serves can block for ever whoever frees
        # it
        _end_in_time(code)
    else:
        code = STOPPED if has_end and was_stopped else 0
        _end_in_time(code)
    finally:
        _close(loop)
    if code not in _CLEAN:
        # Not by the interpreter's own end: it waits for what the failure left open, and a gRPC server that still serves
        # can hold it for ever.
        logging.shutdown()
        os._exit(code)
    return code


async def _until_stopped(main: Callable[[], Awaitable[None]]) -> bool:
    """Whether a signal asked for the end."""
    life = _Life()
    life.owns_process = True
    _LIFE.set(life)
    task = life.main = asyncio.ensure_future(main())
    signalled = False

    def on_signal(name: str) -> None:
        nonlocal signalled
        logger.info("%s: stopping", name)
        if signalled:
            task.cancel()
        signalled = True
        life.ask()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number.name)
    try:
        await task  # bounded: by nothing, on purpose: the role's whole life, until a signal
    except asyncio.CancelledError:
        if not life.stop.is_set():
            raise
    return life.stop.is_set()


async def serve(
    server: "Server",
    *,
    drain: Callable[[], Awaitable[None]] | None = None,
    failed: asyncio.Future[None] | None = None,
    grace_s: float = 5.0,
) -> None:
    """Waits until this process is asked to stop or `failed` is done, then drains a started server.

    drain: the role's own part (give work back, end streams), run while calls are still answered, for at most `grace_s`.
    Calls under way then get `grace_s`. failed: raising it ends the role with its exception; a result ends it cleanly. A
    WorkerLostError ends it without drain or grace: others do its work.
    """
    stopping = asyncio.ensure_future(stop_requested().wait())
    ends: list[asyncio.Future[Any]] = [stopping] if failed is None else [stopping, failed]
    try:
        await asyncio.wait(
            ends, return_when=asyncio.FIRST_COMPLETED
        )  # bounded: by nothing, on purpose: serves until it is stopped or fails
    finally:
        stopping.cancel()
        lost = (
            failed is not None
            and failed.done()
            and not failed.cancelled()
            and isinstance(failed.exception(), WorkerLostError)
        )
        if not lost:
            await server.set_serving(False)
            if drain is not None:
                await _drain_role(drain, grace_s)
        await server.drain(0.0 if lost else grace_s)
    if failed is not None and failed.done():
        failed.result()  # one that nobody here cancelled has failed, too


async def _drain_role(drain: Callable[[], Awaitable[None]], grace_s: float) -> None:
    try:
        async with asyncio.timeout(grace_s):
            await drain()
    except TimeoutError:
        logger.warning("draining took longer than %.1f s; going on without it", grace_s)


def allow_many_files() -> None:
    """Raises the number of files that this process, and those that it starts, may have open to what the system allows
    it. A connection is one, and shells begin with 1024.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError):  # the kernel may allow less than it says: macOS, or fs.nr_open lowered since
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def tie_to_parent() -> None:
    """Ends this process with the parent that ROLECALL_DIE_WITH_PARENT names, at once when that is gone already. Without
    the variable it does nothing.
    """
    parent = parent_to_die_with()
    if parent is not None:
        die_with_parent(parent if parent > 1 else os.getppid())


def _failed(role: str, error: BaseException) -> int:
    lines = "".join(traceback.format_exception(error)).splitlines()
    expected = isinstance(error, (ConfigError, BudgetSpentError))
    if not expected:
        logger.error("%s failed; the end of its traceback:\n%s", role, "\n".join(lines[-_TRACEBACK_LINES:]))
    message = error.message if isinstance(error, RoleCallError) else f"{type(error).__name__}: {error}"
    _say(f"{role} failed: {message}")
    return FINAL if isinstance(error, RoleCallError) and not error.retryable else RESTART


def _close(loop: asyncio.AbstractEventLoop) -> None:
    """Closes the loop as asyncio.run does, except that nothing is waited for without end, and threads not at all."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        _, ignoring = loop.run_until_complete(asyncio.wait(tasks, timeout=_TASKS_GRACE_S))
        for task in ignoring:
            logger.warning("leaving a task that does not end when cancelled: %s", task.get_name())
    with contextlib.suppress(TimeoutError):
        loop.run_until_complete(asyncio.wait_for(loop.shutdown_asyncgens(), _TASKS_GRACE_S))
    asyncio.set_event_loop(None)
    loop.close()


def _end_in_time(code: int) -> None:
    """Ends the process with `code` after _END_GRACE_S: what the event loop lets go may block, and so may a thread, all
    of which the interpreter joins at its end. Says nothing after a failure, whose reason is the last line.
    """

    def watch() -> None:
        time.sleep(_END_GRACE_S)
        if code in _CLEAN:
            main = threading.main_thread()
            busy = [
                thread.name
                for thread in threading.enumerate()
                if thread.is_alive() and not thread.daemon and thread is not main
            ] or [main.name]
            logger.error("leaving threads that did not end within %.0f s: %s", _END_GRACE_S, ", ".join(busy))
        logging.shutdown()
        os._exit(code)

    threading.Thread(target=watch, name="end", daemon=True).start()


def _say(line: str) -> None:
    """Writes a line for people, whatever the log's level and format. On a full disk nobody hears it, and the exit code
    still says what happened.
    """
    with contextlib.suppress(OSError):
        sys.stderr.write(f"{line}\n")
        sys.stderr.flush()
