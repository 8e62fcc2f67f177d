"""The terminal of a command, or what stands in its place: its streams, which readers may leave, its errors and its exit
code. Imports nothing heavy.
"""

import difflib
import io
import os
import select
import sys
from collections.abc import Callable, Iterable
from typing import TextIO

from rolecall.errors import ConfigError, RoleCallError

USAGE, INTERRUPTED = 2, 130
"""Exit codes of a command: bad usage or configuration, and interrupted. 0 is done, and 1 failed."""


def exit_code(command: Callable[[], int]) -> int:
    """Runs `command` on streams that are open, and returns its exit code: its own; 1 failed, or nobody reads what it
    says any more; 2 bad configuration; 130 interrupted. What failed is told.
    """
    open_streams()
    try:
        code = command()
        sys.stdout.flush()
        return code
    except BrokenPipeError:
        if not _is_left(sys.stdout):
            raise
        let_go(sys.stdout)
        return 1
    except RoleCallError as error:
        sys.stderr.write(f"rolecall: {error.message}\n")
        return USAGE if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        return INTERRUPTED


def open_streams() -> None:
    """Has nothing shown where the caller closed a stream, and the escape of a character that a terminal lacks."""
    for number, name in ((1, "stdout"), (2, "stderr")):
        if getattr(sys, name) is None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), number)
            os.set_inheritable(number, True)  # by children, too; where it was the lowest number free, dup2 did nothing
            setattr(sys, name, open(number, "w"))  # noqa: SIM115, it stays open
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def say(text: str) -> None:
    """Writes to stdout what the work does not depend on: it outlives a reader that leaves, and a full disk."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except OSError:
        let_go(sys.stdout)


def let_go(stream: TextIO) -> None:
    """Has `stream` lead nowhere. What is left in its buffer would fail Python's own flush at the end, and make an exit
    code of that.
    """
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """` (did you mean 'x'?)` for the known word nearest to `word`; empty when none is near."""
    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def _is_left(stream: TextIO) -> bool:
    """Whether `stream` is a pipe, or a socket, that nobody reads any more."""
    looks = select.poll()
    looks.register(stream, 0)
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in looks.poll(0))


def in_bytes(num_bytes: float) -> str:
    """`num_bytes` for people."""
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"
