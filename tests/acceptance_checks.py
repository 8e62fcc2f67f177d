"""Checks that end in every way a check can end; what test_gpu_acceptance.py gives to the runner of parts."""

import os
import signal
import time
from pathlib import Path

from tools.gpu_acceptance.findings import Findings, SkippedCheckError


def passes(found: Findings, folder: Path) -> None:
    found.at_most("gap", 0.5, 1.0)
    found.at_least("speed", 1.0, 2.0, on_device=True)


def fails(found: Findings, folder: Path) -> None:
    found.at_most("gap", 2.0, 1.0)
    with found.attempt("a part of it"):
        int("of no use")
    found.figure("after | it", 7)


def raises(found: Findings, folder: Path) -> None:
    found.require("never judged", True)
    raise ValueError("said last")


def crashes(found: Findings, folder: Path) -> None:
    found.figure("before", 1.0)
    os.kill(os.getpid(), signal.SIGKILL)


def hangs(found: Findings, folder: Path) -> None:
    found.figure("before", 1.0)
    found.require("met", True)
    time.sleep(600)


def skips(found: Findings, folder: Path) -> None:
    raise SkippedCheckError("there is no such device")


def says_nothing(found: Findings, folder: Path) -> None:
    found.figure("only", "a figure")
