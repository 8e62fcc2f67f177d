"""Ties a process to its parent: when the parent dies, by SIGKILL too, the kernel ends this one. Linux; elsewhere it
does nothing.

Also a program: `python lifeline.py PARENT_PID SIGNAL PROGRAM ARGS...` (`tied`) becomes PROGRAM, tied to the parent.
That spares subprocess's preexec_fn, which may deadlock in a parent with threads, and covers programs that are not ours.

The kernel watches the *thread* that started the process: start children from a thread that lives as long as they
should.
"""

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int, number: int = signal.SIGKILL) -> None:
    """Asks the kernel for the signal `number` at the parent's death; exits at once when the parent `parent_pid` is
    already gone.
    """
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, int(number), 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)


def tied(command: Sequence[str], number: int = signal.SIGKILL) -> list[str]:
    """`command` as one that ends by the signal `number` when this process does."""
    return [sys.executable, "-I", "-S", __file__, str(os.getpid()), str(int(number)), *command]


def parent_of(pid: int) -> int:
    """The process that started `pid` on this machine; 0 when there is none of that number."""
    return int(_stat(pid)[1])


def state_of(pid: int) -> str:
    """The kernel's letter for the state of `pid` on this machine ("R": runs, "D": in a call that no signal ends);
    empty when there is none of that number.
    """
    return _stat(pid)[0]


def _stat(pid: int) -> list[str]:
    """The fields of proc(5)'s stat from the state on."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ["", "0"]


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]), int(sys.argv[2]))
    os.execv(sys.argv[3], sys.argv[3:])
