"""Mathematical equality of answers, by the math-verify library (extra `reward`). Heavy: sympy is imported here and
nowhere else.
"""

import logging
import re

from math_verify import parse, verify

from rolecall.errors import BadGroundTruthError

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call that its timeouts are off

_MARKS = re.compile(r"\$|\\\(|\\\[|\\boxed")
"""What begins LaTeX in prose."""
_POWER = re.compile(r"([-+]?\d+(?:\.\d+)?)[eE]([-+]?\d+)")
"""A number as programs write it, which math-verify does not know."""


def math_equal(response_text: str, ground_truth: str) -> tuple[float, str | None]:
    """1.0 when math-verify parses both and finds them equal, else 0.0; and the answer: what it reads from the response,
    as sympy writes it, None when it reads nothing. BadGroundTruthError when it cannot parse the ground truth.

    Its own timeouts use signals and are off: the worker process that runs this is killed at the component's deadline
    instead.
    """
    truth = _parse_truth(ground_truth)
    if not truth:
        raise BadGroundTruthError(
            f"math-verify finds no expression in the ground truth {ground_truth[:200]!r}; correct the data set"
        )
    found = _parse(response_text)
    return float(verify(truth, found, timeout_seconds=None)), _written(found)


def _parse_truth(text: str) -> list[object]:
    """The whole expression. math-verify finds one in prose, so of LaTeX that nothing marks as such it reads a number in
    it: 2 of 2\\sqrt{3}.
    """
    if number := _POWER.fullmatch(text.strip()):
        return _parse(f"${number[1]} \\cdot 10^{{{number[2]}}}$")
    marked = f"${text}$"
    return _parse(text) or _parse(marked) if _MARKS.search(text) else _parse(marked) or _parse(text)


def _written(found: list[object]) -> str | None:
    """The expression as sympy writes it; for one that it cannot write, the text that was read."""
    try:
        return str(found[0]) if found else None
    except ValueError:  # Python writes no integer of more than 4300 digits
        return str(found[-1])


def _parse(text: str) -> list[object]:
    return list(parse(text, parsing_timeout=None))
