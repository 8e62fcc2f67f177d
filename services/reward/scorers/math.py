"""Mathematical equality of answers, by the math-verify library (extra `reward`). Heavy: sympy is imported here and
nowhere else.
"""

import logging
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

from math_verify import LatexExtractionConfig, parse, verify

from rolecall.errors import BadGroundTruthError

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call that its timeouts are off

CPU_S = 2.0
"""CPU seconds to read a response and compare its answer; an ordinary one of 100,000 characters takes a fiftieth. One
that takes more has no answer: sympy computes a tower of powers or an integral without end, and endless repetition is
looked through again and again. CPU time is the response's doing; a deadline would also be missed on a busy machine.
"""
_MARKS = re.compile(r"\$|\\\(|\\\[|\\boxed")
"""What begins LaTeX in prose."""
_MEASURE = re.compile(
    r"[-+]?\d[\d,]*(\.\d+)?(/\d+)?\s+(?!(or|and|sqrt|sin|cos|tan|log|ln|pi|exp)\b)([A-Za-z]{2,}|[A-Za-z]+/[A-Za-z]).*",
    re.DOTALL,
)
"""A number and what it counts, in words."""
_POWER = re.compile(r"([-+]?\d+(?:\.\d+)?)[eE]([-+]?\d+)")
"""A number as programs write it, which math-verify does not know."""
_AS_LATEX = [LatexExtractionConfig()]


def math_equal(response_text: str, ground_truth: str) -> tuple[float, str | None]:
    """1.0 when math-verify parses both and finds them equal, else 0.0; and the answer: what it reads from the response,
    as sympy writes it, None when it reads nothing. BadGroundTruthError when it cannot parse the ground truth, or
    takes more than CPU_S to compare it with a number.

    Its own timeouts use signals that Python hears between two steps only, and are off. A response that takes more than
    CPU_S ends this process by SIGPROF, which the pool of workers takes for no answer (`CpuSpentError`). A ground truth
    that is never computed meets the component's deadline, for no response is to blame.
    """
    truth = _truth(ground_truth)
    with _limited_cpu():
        found = _parse(response_text)
        return float(verify(truth, found, timeout_seconds=None)), _written(found)


@contextmanager
def _limited_cpu() -> Iterator[None]:
    """Has the kernel end this process once what is inside has taken CPU_S of all its threads."""
    signal.setitimer(signal.ITIMER_PROF, CPU_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0.0)


@lru_cache(maxsize=1024)  # the responses of a group have the same
def _truth(text: str) -> list[object]:
    truth = _parse_truth(text)
    if not truth:
        raise BadGroundTruthError(
            f"math-verify finds no expression in the ground truth {text[:200]!r}; correct the data set"
        )
    began = time.process_time()
    verify(truth, _parse("$0$"), timeout_seconds=None)  # which computes it: no response is to blame for that
    if time.process_time() - began > CPU_S:
        raise BadGroundTruthError(
            f"math-verify takes more than {CPU_S:g} s of CPU time to compute the ground truth {text[:200]!r}; write "
            "its value in the data set"
        )
    return truth


def _parse_truth(text: str) -> list[object]:
    """The whole expression. math-verify finds one in prose, so of LaTeX that nothing marks as such it reads a number in
    it: 2 of 2\\sqrt{3}. Words of measure would be factors in LaTeX.
    """
    bare, marked = text.strip(), f"${text}$"
    if number := _POWER.fullmatch(bare):
        return _parse(f"${number[1]} \\cdot 10^{{{number[2]}}}$")
    is_prose = _MARKS.search(text) or _MEASURE.fullmatch(bare)
    if not is_prose and parse(marked, _AS_LATEX, fallback_mode="no_fallback", parsing_timeout=None):
        return _parse(marked)
    return _parse(text) or _parse(marked)


def _written(found: list[object]) -> str | None:
    """The expression as sympy writes it; for one that it cannot write, the text that was read."""
    try:
        return str(found[0]) if found else None
    except ValueError:  # Python writes no integer of more than 4300 digits
        return str(found[-1])


def _parse(text: str) -> list[object]:
    return list(parse(text, parsing_timeout=None))
