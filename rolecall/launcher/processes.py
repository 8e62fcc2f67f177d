"""The local processes of a run: starts them, notices their end, ends them, and says on disk which they are.

Owns the rule that nothing outlives the launcher: every process is tied to it by the kernel, leads a session of its own
that is killed whole at its end, and the store ends last. Decides nothing: `plan.py` says which processes there are,
`supervisor.py` when one is started again.
"""

import json
import logging
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rolecall.lifeline import tied
from rolecall.rpc.role_process import FINAL, USAGE
from rolecall.settings import child_environment
from rolecall.store.embedded import EmbeddedStore

STOP_TIMEOUT_S = 6.0
"""Time from SIGTERM to SIGKILL; with the store's end it keeps a Ctrl-C under 10 s."""

FINAL_CODES = frozenset({FINAL, USAGE})
"""Exit codes after which starting a role again cannot help."""
MODEL_SERVERS = ("model_server", "reward_model")
"""Roles of the servers of scorers, which join no controller."""
STARTED = "=== started"
"""Begins a log's line where a process started; a restarted role and a resumed run go on in the same file."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Worker:
    """One local process to start."""

    role: str
    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path


@dataclass(frozen=True)
class Start:
    """A process of a worker."""

    worker: Worker
    number: int
    """Number of the start of this worker, from 0."""
    incarnation: str
    """Mark of this start, by which reports about this very process are known."""
    process: "subprocess.Popen[bytes]"
    at: float
    """Monotonic seconds."""


class Processes:
    """Start and stop them from the main thread: the kernel ties children to the thread that started them."""

    def __init__(self, record: Path | None = None) -> None:
        """record: a file that always says which processes run, for people and tools; rewritten at each start, gone at
        the end.
        """
        self.store: EmbeddedStore | None = None
        self.running: dict[str, Start] = {}
        """Processes by the worker's name; one that ended stays until `poll` has told of it."""
        self._record = record
        self._numbers: dict[str, int] = {}

    def start(self, worker: Worker) -> Start:
        """Starts `worker`, its output going to its log."""
        command = tied(worker.command)
        incarnation = uuid.uuid4().hex[:8]
        environment = child_environment({**worker.environment, "ROLECALL_INCARNATION": incarnation})
        with worker.log.open("ab") as log:
            log.write(f"{STARTED} {worker.name} at {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
            log.flush()
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True
            )
        number = self._numbers.get(worker.name, -1) + 1
        self._numbers[worker.name] = number
        start = Start(worker, number, incarnation, process, time.monotonic())
        self.running[worker.name] = start
        self.write_record()
        return start

    def poll(self) -> list[tuple[Start, int]]:
        """Returns those that ended since the last call, with their exit codes (negative: the signal). What they had
        started is killed.

        In one look a controller comes last, for it fails of what others did.
        """
        ended = [(start, code) for start in self.running.values() if (code := start.process.poll()) is not None]
        for start, _ in ended:
            del self.running[start.worker.name]
            _kill_session(start)
        return sorted(ended, key=lambda item: item[0].worker.role == "controller")

    def kill(self, name: str) -> None:
        """Ends the process of `name` at once, with all it started, hung or stopped as they may be; `poll` tells of
        it.
        """
        if name in self.running:
            _kill_session(self.running[name])

    def stop_all(self) -> None:
        """Ends every process: SIGTERM, after STOP_TIMEOUT_S SIGKILL, with all they started; then the store.
        Idempotent.
        """
        processes = [start.process for start in self.running.values()]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while time.monotonic() < deadline and any(process.poll() is None for process in processes):
            time.sleep(0.02)
        self.kill_all()

    def kill_all(self) -> None:
        """Ends every process at once, with all they started; then the store. Idempotent."""
        starts = list(self.running.values())
        for start in starts:
            _kill_session(start)
        for start in starts:
            start.process.wait()  # bounded: SIGKILL has been sent to it
        if self.store is not None:
            self.store.stop()
        if self._record is not None:
            self._record.unlink(missing_ok=True)

    def write_record(self) -> None:
        """Rewrites the record: whoever reads it finds the old one or the new one, whole."""
        if self._record is None:
            return
        entries = [
            {
                "name": name,
                "role": start.worker.role,
                "pid": start.process.pid,
                "start": start.number,
                "incarnation": start.incarnation,
            }
            for name, start in self.running.items()
        ]
        if self.store is not None and self.store.pid is not None:
            entries.append(
                {
                    "name": "store",
                    "role": "store",
                    "pid": self.store.pid,
                    "start": self.store.num_starts - 1,
                    "incarnation": "",
                }
            )
        beside = self._record.with_suffix(".new")
        try:
            beside.write_text(json.dumps({"launcher": os.getpid(), "processes": entries}, indent=1) + "\n")
            beside.replace(self._record)
        except OSError as error:  # a full disk must not cost the run: the file is for people
            logger.warning("%s is out of date: %s", self._record, error)


def _kill_session(start: Start) -> None:
    with suppress(ProcessLookupError):
        os.killpg(start.process.pid, signal.SIGKILL)
