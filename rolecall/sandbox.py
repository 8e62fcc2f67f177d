"""Sandboxes for programs that nobody has read: bubblewrap, which the kernel's namespaces make, or none.

Owns what a program sees, what it may use and how it is ended; knows nothing of tests and scores. A run keeps nothing: a
program's files lie in memory and go with it. Linux alone.

Bounds: a sandbox has START_TIMEOUT_S to stand, and a program the seconds that the caller gives, past which all of its
processes are killed; its output and its files are cut at a number of bytes. `timeout` inside ends it even where this
process died first. Time in which this process itself did not run is not the program's.
"""

import contextlib
import fcntl
import os
import re
import select
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rolecall.errors import ConfigError, ScorerUnavailableError, WorkerLostError
from rolecall.settings import CodeScorer

DISK_BYTES = 2**26
"""Most bytes of a program's files, of each of its two file systems in memory, and of one file."""
START_TIMEOUT_S = 30.0
"""Longest time until a sandbox stands, and longest run of the look around in it at the start."""
GRACE_S = 5.0
"""Seconds past a run's own until it ends itself where nobody is left to do it; its start is in them."""
STILL_S = 1.0
"""Longest wait between two looks at a program. Where the next comes later by as much, the machine stood still."""
VMSTAT = Path("/proc/vmstat")
"""Where the kernel counts whom it killed for want of memory."""
READ_BYTES = 1 << 16
NOBODY = 65534
"""User and group inside, and outside where the reward service is root: the kernel does not count root's processes."""
NUM_FILES = 64
"""Most files that a process has open: those in memory without a name are bounded by it and DISK_BYTES alone."""
FOLDER = "/tmp/work"
"""Where a program is and runs, inside."""
ENVIRONMENT = {"PATH": "/usr/local/bin:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8"}
"""All that a program has of an environment."""
TOOLS = ("timeout", "choom", "prlimit", "tar")
"""Programs of coreutils, util-linux and tar that limit and carry others."""
CHROOT = "/usr/sbin/chroot"
"""A program of coreutils, by its path: ENVIRONMENT has none to it."""
READY = b"\0ready\n"
"""What the sandbox says once it stands, on a stream that is closed to the program."""


@dataclass(frozen=True)
class Ran:
    """The end of a program: how, and what it wrote."""

    status: int | None
    """The exit status; None: it was ended for its time or for the length of its output."""
    output: bytes
    """What it wrote to standard output."""
    seconds: float
    """How long it ran; the time until its sandbox stood is not in it."""


class Sandbox(Protocol):
    """A place where programs run."""

    def check(self, commands: Sequence[str]) -> None:
        """ConfigError, with the remedy, when programs cannot be run here or one of `commands` is not found."""
        ...

    def run(
        self, command: Sequence[str], files: Mapping[str, bytes], stdin: bytes, seconds: float, max_bytes: int
    ) -> Ran:
        """Runs `command` beside `files` for `seconds`, or until it has written more than `max_bytes`.
        ScorerUnavailableError when the sandbox did not come to stand: then nothing is known of the program.
        WorkerLostError when it failed while the machine had no memory left: then it need not be to blame.
        """
        ...


def sandbox_of(scorer: CodeScorer) -> Sandbox:
    """The sandbox that `scorer` names."""
    return Bubblewrap(scorer) if scorer.sandbox == "bubblewrap" else Bare(scorer)


class Bubblewrap:
    """Namespaces of its own for each run: no network, no other processes, no files but read-only /usr and tmpfs."""

    def __init__(self, scorer: CodeScorer) -> None:
        self._read_only = scorer.read_only
        self._limits = _limits(scorer, f"--nproc={scorer.num_processes}")

    def check(self, commands: Sequence[str]) -> None:
        """Implements Sandbox.check."""
        if shutil.which("bwrap") is None:
            raise ConfigError(
                "scorer.sandbox: bwrap is not installed, without which programs of responses are not run; install "
                "bubblewrap (0.8 or later), or write sandbox: none where they may do what this service may"
            )
        _check_tools(*_as_nobody()[:1])
        missing = [str(path) for path in self._read_only if not path.is_dir()]
        if missing:
            raise ConfigError(f"scorer.read_only: {', '.join(missing)} is no folder here; mend it")
        look = 'for name; do command -v "$name" > /dev/null || { echo "$name"; exit 1; }; done'
        try:
            ran = self.run(["sh", "-c", look, "sh", *commands], {}, b"", START_TIMEOUT_S, READ_BYTES)
        except ScorerUnavailableError as error:
            raise ConfigError(
                f"scorer.sandbox: {error.message}; allow user namespaces to this user (in a container: a seccomp "
                "profile that permits unshare and mount, and an unmasked /proc), or write sandbox: none where programs "
                "may do what this service may"
            ) from error
        if ran.status != 0:
            raise ConfigError(
                f"scorer.language: {ran.output.decode(errors='replace').strip() or 'sh'} is not found or does not run "
                "in the sandbox; install it below /usr, name its folder in scorer.read_only, or raise "
                "scorer.memory_bytes"
            )

    def run(
        self, command: Sequence[str], files: Mapping[str, bytes], stdin: bytes, seconds: float, max_bytes: int
    ) -> Ran:
        """Implements Sandbox.run."""
        with _unavailable_without_room(), contextlib.ExitStack() as stack:
            num_killed = _num_killed_for_memory()
            given = {name: _memory_file(stack, content) for name, content in files.items()}
            num_given = sum(map(len, files.values()))
            process = subprocess.Popen(
                [*_as_nobody(), *self._bwrap(given, num_given), "--", *_started(seconds, self._limits, command)],
                stdin=_memory_file(stack, stdin),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                pass_fds=list(given.values()),
                env=ENVIRONMENT,
            )
            with process:
                try:
                    _wait_until_ready(process)
                    return _watch(process, num_killed, seconds, max_bytes)
                finally:
                    process.kill()  # and the kernel all that it started

    def _bwrap(self, files: Mapping[str, int], num_given: int) -> list[str]:
        """The command that makes the namespaces. `num_given` bytes of files are given; there is room for them, for
        what an archive among them holds, and for the program's own.
        """
        command = ["bwrap", "--unshare-all", "--unshare-user", "--disable-userns", "--new-session", "--as-pid-1"]
        command += ["--die-with-parent", "--uid", str(NOBODY), "--gid", str(NOBODY), "--hostname", "sandbox"]
        command += ["--ro-bind", "/usr", "/usr"]
        for name in ("bin", "sbin", "lib", "lib32", "lib64"):
            path = Path("/", name)
            if path.is_symlink():
                command += ["--symlink", str(path.readlink()), str(path)]
            elif path.is_dir():
                command += ["--ro-bind", str(path), str(path)]
        for name in ("/etc/ld.so.cache", "/etc/alternatives"):
            command += ["--ro-bind-try", name, name]
        command += ["--proc", "/proc", "--dev", "/dev"]
        for folder, room in (("/dev/shm", DISK_BYTES), ("/tmp", DISK_BYTES + 2 * num_given)):
            command += ["--size", str(room), "--tmpfs", folder]
        for path in self._read_only:
            command += ["--ro-bind", str(path), str(path)]
        command += ["--dir", FOLDER]
        for name, descriptor in files.items():
            command += ["--file", str(descriptor), f"{FOLDER}/{name}"]
        return [*command, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", FOLDER]


class Bare:
    """No sandbox: a folder, limits, and the rights of this process."""

    def __init__(self, scorer: CodeScorer) -> None:
        self._limits = _limits(scorer)  # without one of processes: the user's others would count

    def check(self, commands: Sequence[str]) -> None:
        """Implements Sandbox.check."""
        _check_tools()
        missing = [name for name in commands if shutil.which(name, path=ENVIRONMENT["PATH"]) is None]
        if missing:
            raise ConfigError(
                f"scorer.language: {', '.join(missing)} is not found on {ENVIRONMENT['PATH']}; install it, or write "
                "its path"
            )

    def run(
        self, command: Sequence[str], files: Mapping[str, bytes], stdin: bytes, seconds: float, max_bytes: int
    ) -> Ran:
        """Implements Sandbox.run."""
        with _unavailable_without_room(), contextlib.ExitStack() as stack:
            num_killed = _num_killed_for_memory()
            # What a program leaves behind it cannot keep this process from going on.
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True)))
            for name, content in files.items():
                (folder / name).write_bytes(content)
            process = subprocess.Popen(
                _started(seconds, self._limits, command),
                cwd=folder,
                stdin=_memory_file(stack, stdin),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env={**ENVIRONMENT, "HOME": str(folder)},
                start_new_session=True,
            )
            with process:
                try:
                    _wait_until_ready(process)
                    return _watch(process, num_killed, seconds, max_bytes)
                finally:
                    with contextlib.suppress(ProcessLookupError):  # all of the session has ended
                        os.killpg(process.pid, signal.SIGKILL)


def _as_nobody() -> list[str]:
    """The command before one that root is not to run itself. `Popen(user=...)` would fork in place of vfork, and run in
    the child what gRPC has registered for it, which now and then aborts.
    """
    return [CHROOT, f"--userspec={NOBODY}:{NOBODY}", "--groups=", "/"] if os.geteuid() == 0 else []


def _limits(scorer: CodeScorer, *further: str) -> list[str]:
    """The command before a program that limits it, and names it first where the machine's memory runs out."""
    # At the first of these numbers of CPU seconds the kernel sends SIGXCPU. At the second it sends SIGKILL, which is to
    # be a sign of somebody else.
    cpu = f"--cpu={scorer.cpu_s}:{scorer.cpu_s + 1}"
    limits = [cpu, f"--as={scorer.memory_bytes}", f"--fsize={DISK_BYTES}", f"--nofile={NUM_FILES}"]
    return ["choom", "-n", "1000", "--", "prlimit", *limits, "--core=0", *further, "--"]


def _started(seconds: float, limits: Sequence[str], command: Sequence[str]) -> list[str]:
    """`command` within its time and its limits. The shell before it says that all stands, and gives it no way to say so
    in its place. Whatever fails until then, such as the fork of `timeout`, is no failure of the program.
    """
    ready = ["sh", "-c", "printf '\\0ready\\n' >&2; exec \"$@\" 2> /dev/null", "sh"]
    return ["timeout", "--signal=KILL", f"{seconds + GRACE_S:.3f}", *limits, *ready, *command]


@contextlib.contextmanager
def _unavailable_without_room() -> Iterator[None]:
    """Tells what the machine has no process, memory, disk or file for as a sandbox that did not start."""
    try:
        yield
    except OSError as error:
        raise ScorerUnavailableError(
            f"the sandbox of a program did not start: {error}; look at the machine's memory, its disk and its limits "
            "of processes and files"
        ) from error


def _num_killed_for_memory() -> int:
    """How many processes the kernel has killed for want of memory; 0 where it does not say, as in gVisor."""
    with contextlib.suppress(FileNotFoundError):
        if found := re.search(r"^oom_kill (\d+)$", VMSTAT.read_text(), re.MULTILINE):
            return int(found[1])
    return 0


def _check_tools(*more: str) -> None:
    missing = [name for name in (*TOOLS, *more) if shutil.which(name, path=ENVIRONMENT["PATH"]) is None]
    if missing:
        raise ConfigError(
            f"scorer.sandbox: {', '.join(missing)} is not installed, which limit programs; install coreutils, "
            "util-linux and tar"
        )


def _memory_file(stack: contextlib.ExitStack, content: bytes) -> int:
    """A file in memory of this content, which nobody can change, until `stack` ends."""
    descriptor = os.memfd_create("program", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    stack.callback(os.close, descriptor)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(content)
    os.lseek(descriptor, 0, os.SEEK_SET)
    seals = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def _wait_until_ready(process: "subprocess.Popen[bytes]") -> None:
    """Returns when the sandbox stands. ScorerUnavailableError, in its words, when it does not come to."""
    assert process.stderr is not None
    said, stream = b"", process.stderr.fileno()
    poller = select.poll()
    poller.register(stream, select.POLLIN)
    deadline = time.monotonic() + START_TIMEOUT_S
    while READY not in said:
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise ScorerUnavailableError(
                f"the sandbox of a program did not stand within {START_TIMEOUT_S:.0f} s; look at the load of the "
                "machine"
            )
        data = os.read(stream, READ_BYTES)
        said += data
        if not data:
            words = " ".join(said.decode(errors="replace").split()) or "it ended without a word"
            raise ScorerUnavailableError(f"the sandbox of a program did not start: {words[:500]}")


def _watch(process: "subprocess.Popen[bytes]", num_killed: int, seconds: float, max_bytes: int) -> Ran:
    """Returns what `process` did until it ended or was ended. WorkerLostError when it failed while the kernel
    killed processes for want of memory, which it had for `num_killed` before the start. A program's are the first
    that it kills, and a compiler whose child was killed exits as for a program that is wrong. So any failure
    counts, whoever was killed.
    """
    ran = _until_its_end(process, seconds, max_bytes)
    if ran.status != 0 and _num_killed_for_memory() != num_killed:
        raise WorkerLostError(
            "a program failed while the machine had no memory left and processes were killed for it; give the machine, "
            "or the reward service, more memory or fewer workers"
        )
    return ran


def _until_its_end(process: "subprocess.Popen[bytes]", seconds: float, max_bytes: int) -> Ran:
    """Reads what `process` writes until it ends or is to be ended."""
    assert process.stdout is not None
    output, stream = bytearray(), process.stdout.fileno()
    started = looked = time.monotonic()
    end = os.pidfd_open(process.pid)
    try:
        poller = select.poll()
        poller.register(stream, select.POLLIN)
        poller.register(end, select.POLLIN)
        while True:
            wait_s = min(STILL_S, max(0.0, started + seconds - looked))
            events = dict(poller.poll(wait_s * 1000))
            late_s = time.monotonic() - looked - wait_s
            if late_s > STILL_S:  # a paused container, a suspended machine: the program did not run either
                started += late_s
            looked = time.monotonic()
            if stream in events:
                data = os.read(stream, READ_BYTES)
                output += data
                if not data:
                    poller.unregister(stream)
                if len(output) > max_bytes:
                    break
            elif events:
                return Ran(process.wait(), bytes(output), looked - started)  # bounded: it has ended
            elif looked >= started + seconds:
                break
    finally:
        os.close(end)
    return Ran(None, bytes(output[:max_bytes]), looked - started)
