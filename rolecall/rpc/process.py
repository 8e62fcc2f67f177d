"""The life of a role's process: arguments, signals, serving until asked to stop, exit code, and one clear line when it failed.

Imports nothing heavy, so that `--help` and configuration errors are instant; `services/<role>/__main__.py` imports engines after `parse_args`.
"""

import asyncio
import concurrent.futures
import contextlib
import logging
import os
import signal
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Awaitable, Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rolecall.errors import ConfigError, RoleCallError
from rolecall.lifeline import die_with_parent
from rolecall.settings import RunSettings, load_settings, overrides_from, parent_to_die_with

if TYPE_CHECKING:
    from rolecall.rpc.server import Server

_LOG = logging.getLogger(__name__)
_NUM_THREADS = 32
"""Bound on `asyncio.to_thread` calls at work in a process; further ones queue."""
_END_GRACE_S = 5.0
"""Wait at the end for tasks, and then for threads, that are still at work; the process exits without them."""
_TRACEBACK_LINES = 12

_USAGE = """usage: rolecall serve {role} --config FILE [--name INSTANCE] [--SECTION.KEY VALUE ...]

  --config FILE           the run's YAML file
  --name INSTANCE         name of this worker (default: {default})
  --SECTION.KEY VALUE     overrides one key of the file, e.g. --telemetry.log_level DEBUG; the value is read as YAML
  --help                  this text
"""


@dataclass(frozen=True)
class ServiceArgs:
    """What a role's process was started with."""

    settings: RunSettings
    """The run's configuration, overrides applied."""
    worker: str
    """Name of the instance, e.g. "actor", "rollout-0", "ref"."""
    incarnation: str
    """New at each start: 8 hex digits."""
    config_path: Path
    """The file the settings were read from."""


def parse_args(role: str, argv: Sequence[str] | None = None) -> ServiceArgs:
    """Reads the command line of `role` (None: sys.argv). Prints one clear line and exits with 2 on a bad one, with 0 after --help."""
    try:
        return _parse(role, list(sys.argv[1:] if argv is None else argv))
    except ConfigError as error:
        _say(f"{role} failed: {error.message}")
        raise SystemExit(2) from None


def _parse(role: str, words: list[str]) -> ServiceArgs:
    own: dict[str, str] = {}
    others: list[str] = []
    while words:
        word = words.pop(0)
        key, equals, value = word.partition("=")
        if word in ("-h", "--help"):
            sys.stdout.write(_USAGE.format(role=role, default="rollout-<random>" if role == "rollout" else role))
            raise SystemExit(0)
        if key not in ("--config", "--name"):
            # An override; its value goes with it, so that a value that reads "--help" is a value.
            others += [word] if equals else [word, *words[:1]]
            words = words if equals else words[1:]
            continue
        if not equals and not words:
            raise ConfigError(f"{key} needs a value; see rolecall serve {role} --help")
        own[key] = value if equals else words.pop(0)
    overrides = overrides_from(others)
    if "--config" not in own:
        raise ConfigError(f"--config FILE is missing; see rolecall serve {role} --help")
    path = Path(own["--config"])
    settings = load_settings(path, overrides)
    incarnation = uuid.uuid4().hex[:8]
    return ServiceArgs(settings, own.get("--name") or _default_name(role, settings, incarnation), incarnation, path)


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


_LIFE: ContextVar[_Life] = ContextVar("rolecall_life")


def stop_requested() -> asyncio.Event:
    """Set at SIGTERM or SIGINT. Whoever asks for it takes over stopping: before the first call of this function a signal cancels `main` instead.

    Outside `run` (in tests) it is an event of the current context that nobody else sets.
    """
    life = _LIFE.get(None)
    if life is None:
        life = _Life()
        _LIFE.set(life)
    life.heeded = True
    return life.stop


def run(main: Callable[[], Awaitable[None]], role: str = "service") -> int:
    """Runs `main` on a new event loop and returns the exit code: 0 when it ended or was stopped, 1 when it failed (the reason is printed).

    The last thing a process does: return what it returns from there. Five seconds later the process is over, whatever its threads do.

    A signal sets `stop_requested()`, a second one cancels `main`. Ends with its launcher when ROLECALL_DIE_WITH_PARENT says so.
    """
    try:
        _tie_to_launcher()
    except (ConfigError, OSError) as error:
        return _failed(role, error)
    loop = asyncio.new_event_loop()
    loop.set_default_executor(concurrent.futures.ThreadPoolExecutor(_NUM_THREADS, "worker"))
    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(_until_stopped(main))
        code = 0
    except (Exception, asyncio.CancelledError) as error:  # entry point: whatever ended the role is said once, here
        code = _failed(role, error)
    finally:
        _close(loop)
    _end_in_time(code)
    return code


async def _until_stopped(main: Callable[[], Awaitable[None]]) -> None:
    life = _Life()
    _LIFE.set(life)
    task = asyncio.ensure_future(main())

    def on_signal(name: str) -> None:
        _LOG.info("%s: stopping", name)
        if life.stop.is_set() or not life.heeded:
            task.cancel()
        life.stop.set()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal, number.name)
    try:
        await task
    except asyncio.CancelledError:
        if not life.stop.is_set():
            raise


async def serve(
    server: "Server", *, drain: Callable[[], Awaitable[None]] | None = None, failed: asyncio.Future[None] | None = None, grace_s: float = 5.0
) -> None:
    """Waits until this process is asked to stop or `failed` is done, then drains a started server.

    drain: the role's own part (give work back, end streams), run while calls are still answered, for at most `grace_s`. Calls under way then get `grace_s`.
    failed: raising it ends the role with its exception; a result ends it cleanly.
    """
    stopping = asyncio.ensure_future(stop_requested().wait())
    ends: list[asyncio.Future[Any]] = [stopping] if failed is None else [stopping, failed]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        stopping.cancel()
        await server.set_serving(False)
        if drain is not None:
            await _drain_role(drain, grace_s)
        await server.drain(grace_s)
    if failed is not None and failed.done() and not failed.cancelled():
        failed.result()


async def _drain_role(drain: Callable[[], Awaitable[None]], grace_s: float) -> None:
    try:
        async with asyncio.timeout(grace_s):
            await drain()
    except TimeoutError:
        _LOG.warning("draining took longer than %.1f s; going on without it", grace_s)


def _tie_to_launcher() -> None:
    parent = parent_to_die_with()
    if parent is not None:
        die_with_parent(parent if parent > 1 else os.getppid())


def _failed(role: str, error: BaseException) -> int:
    lines = "".join(traceback.format_exception(error)).splitlines()
    expected = isinstance(error, ConfigError)
    if not expected:
        _LOG.error("%s failed; the end of its traceback:\n%s", role, "\n".join(lines[-_TRACEBACK_LINES:]))
    message = error.message if isinstance(error, RoleCallError) else f"{type(error).__name__}: {error}"
    _say(f"{role} failed: {message}")
    return 1


def _close(loop: asyncio.AbstractEventLoop) -> None:
    """As asyncio.run does, except that nothing is waited for without end, and threads not at all."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        _, ignoring = loop.run_until_complete(asyncio.wait(tasks, timeout=_END_GRACE_S))
        for task in ignoring:
            _LOG.warning("leaving a task that does not end when cancelled: %s", task.get_name())
    with contextlib.suppress(TimeoutError):
        loop.run_until_complete(asyncio.wait_for(loop.shutdown_asyncgens(), _END_GRACE_S))
    asyncio.set_event_loop(None)
    loop.close()


def _end_in_time(code: int) -> None:
    """At its end the interpreter joins every thread; one that hangs in a collective would hold the process for ever."""

    def watch() -> None:
        time.sleep(_END_GRACE_S)
        busy = [thread.name for thread in threading.enumerate() if thread.is_alive() and not thread.daemon and thread is not threading.main_thread()]
        _LOG.error("leaving threads that did not end within %.0f s: %s", _END_GRACE_S, ", ".join(busy))
        logging.shutdown()
        os._exit(code)

    threading.Thread(target=watch, name="end", daemon=True).start()


def _say(line: str) -> None:
    """To people, whatever the log's level and format."""
    sys.stderr.write(f"{line}\n")
    sys.stderr.flush()
