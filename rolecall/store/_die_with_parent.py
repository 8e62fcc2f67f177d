"""Runs a program that ends when its parent does: `python _die_with_parent.py PARENT_PID PROGRAM ARGS...`.

A program of its own instead of subprocess's preexec_fn, which may deadlock in a parent that has threads. PR_SET_PDEATHSIG survives exec and is
bound to the parent's thread that started us. Uses the standard library alone and imports nothing of RoleCall.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != int(sys.argv[1]):
            sys.exit("the parent ended before the store started")
    os.execv(sys.argv[2], sys.argv[2:])


main()
