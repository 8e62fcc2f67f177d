"""The last words of a local process: read from its log, for the line or the lines that tell people of its end."""

import re
import signal
from collections.abc import Sequence

from rolecall.launcher.processes import STARTED, Worker

LOG_TAIL_LINES = 20
"""Lines of a failed role's log that are shown."""
LOG_TAIL_BYTES = 2**18
"""Bytes at the end of a log that are read; logs grow for days."""

_LAST_WORD = re.compile(r"^\S+ failed: ")
_ABOVE = "See root cause above."
"""The word with which vLLM's server fails of what another of its processes said before, among much else."""
_CAUSE = re.compile(r"^\(\w+ pid=\d+\) ERROR [^\[]*\[[^\]]+\] (\w+(?:Error|Exception)\b.*)")


def describe_failure(worker: Worker, code: int) -> str:
    """The line of `say_end`; below it the end of what the process said, and where the rest is."""
    tail = "\n".join(f"    {line}" for line in last_words(_recent(worker)))
    return f"{say_end(worker, code)}\n{tail}\n  log: {worker.log}"


def say_end(worker: Worker, code: int) -> str:
    """Says in a line which process ended and how, and why by its own account where it gave one."""
    said = final_line(worker)
    return f"{worker.name} {_how_it_ended(code)}" + (f" ({said})" if said else "")


def _how_it_ended(code: int) -> str:
    """`code` in words: an exit code, or negative a signal."""
    return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"


def final_line(worker: Worker) -> str:
    """The one line in which a role says why it failed; empty when it said none."""
    lines = _recent(worker)
    return next((_with_cause(line, lines) for line in lines if _LAST_WORD.match(line)), "")


def last_words(lines: Sequence[str]) -> Sequence[str]:
    """The lines up to the first `<role> failed: ...` (of several ranks the first is the cause), else those from a crash
    of native code on, else from the last traceback on, else the last ones.

    Of a log that several starts went on in, only the last start's lines count.
    """
    recent = _since_the_last_start(lines)
    for index, line in enumerate(recent):
        if _LAST_WORD.match(line):
            return [*recent[max(0, index + 1 - LOG_TAIL_LINES) : index], _with_cause(line, recent)]
        if line.startswith("Fatal Python error: "):
            return recent[index : index + LOG_TAIL_LINES]  # the thread that crashed comes first
    starts = [index for index, line in enumerate(recent) if line.startswith("Traceback (most recent call last)")]
    if starts:
        return recent[starts[-1] :][-LOG_TAIL_LINES:]
    return recent[-LOG_TAIL_LINES:]


def _with_cause(line: str, lines: Sequence[str]) -> str:
    """`line`, with the first error of vLLM's processes in `lines` where it is all that the line says."""
    causes = [found[1] for found in map(_CAUSE.match, lines) if found] if _ABOVE in line else []
    return line.replace(_ABOVE, f"The root cause: {causes[0].rstrip('.')}.") if causes else line


def _since_the_last_start(lines: Sequence[str]) -> list[str]:
    start = max((index for index, line in enumerate(lines) if line.startswith(STARTED)), default=-1)
    return list(lines[start + 1 :])


def _recent(worker: Worker) -> list[str]:
    if not worker.log.is_file():
        return []
    with worker.log.open("rb") as log:
        log.seek(max(0, worker.log.stat().st_size - LOG_TAIL_BYTES))
        return _since_the_last_start(log.read().decode(errors="replace").splitlines())
