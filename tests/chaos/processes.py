"""The processes of a run as the driver sees them: the launcher that it started, and its children by name of worker."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import psutil

from rolecall.lifeline import tied


class Processes:
    """One launcher and what it starts."""

    def __init__(self, command: list[str], log: Path) -> None:
        """Starts the launcher, tied to this process."""
        self.log = log
        with log.open("ab") as file:
            self._launcher = subprocess.Popen(tied(command), stdout=file, stderr=file, stdin=subprocess.DEVNULL)

    @property
    def code(self) -> int | None:
        """The launcher's exit code; None while it lives."""
        return self._launcher.poll()

    def pid_of(self, target: str) -> int | None:
        """The target's process now; None when there is none. "actor/1" is its rank 1 under torchrun, "reward/worker"
        one of its scoring processes.
        """
        name, _, part = target.partition("/")
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self._launcher.pid).children():
                with suppress(psutil.NoSuchProcess):
                    if _is(child, name):
                        return _part_of(child, part) if part else int(child.pid)
        return None

    def end(self) -> None:
        """Ends the launcher, and with it, by the kernel, everything it started."""
        self._launcher.kill()
        self._launcher.wait()


class Outside:
    """The external scorer, which the driver starts again when it ended, as whoever runs one would."""

    def __init__(self, address: str, log: Path) -> None:
        self._command, self._log = [sys.executable, "-m", "tests.chaos.outside", address], log
        self._process: subprocess.Popen[bytes] | None = None

    def tend(self) -> bool:
        """Starts it when it is not there; whether it had ended."""
        if self._process is not None and self._process.poll() is None:
            return False
        command = tied(self._command)
        with self._log.open("ab") as file:
            self._process = subprocess.Popen(command, stdout=file, stderr=file, stdin=subprocess.DEVNULL)
        return True

    @property
    def pid(self) -> int:
        """Its process."""
        assert self._process is not None
        return self._process.pid

    def end(self) -> None:
        """Ends it."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def _is(child: psutil.Process, name: str) -> bool:
    command = child.cmdline()
    if child.status() == psutil.STATUS_ZOMBIE or not command:
        return False
    if name == "store":
        return "valkey-server" in command[0]
    return command[-2:] == ["--name", name] and "lifeline.py" not in " ".join(command[:4])


def _part_of(process: psutil.Process, part: str) -> int | None:
    for child in process.children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            if part == "worker" or child.environ().get("RANK") == part:
                return int(child.pid)
    return None


def send(pid: int, number: signal.Signals) -> bool:
    """Whether the process was there to get it."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def exists(pid: int) -> bool:
    """Whether `pid` lives, stopped or not, and is no zombie."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
