"""Ties a process to its parent: when the parent dies, by SIGKILL too, the kernel kills this one. Linux; elsewhere it does nothing.

Also a program: `python lifeline.py PARENT_PID PROGRAM ARGS...` becomes PROGRAM, tied to the parent. That spares subprocess's preexec_fn, which may
deadlock in a parent with threads, and covers programs that are not ours.

The kernel watches the *thread* that started the process: start children from a thread that lives as long as they should.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel for SIGKILL at the parent's death; exits at once when the parent `parent_pid` is already gone."""
    if sys.platform != "linux":
        return
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent_pid:
        os._exit(1)


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    os.execv(sys.argv[2], sys.argv[2:])
