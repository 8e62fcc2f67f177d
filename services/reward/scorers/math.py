"""Mathematical equality of answers, by the math-verify library (extra `reward`). Heavy: sympy is imported here and
nowhere else.
"""

import logging

from math_verify import parse, verify

from rolecall.errors import BadGroundTruthError

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call that its timeouts are off


def math_equal(response_text: str, ground_truth: str) -> tuple[float, str | None]:
    """1.0 when math-verify parses both and finds them equal, else 0.0; and the answer: what it reads from the response,
    as sympy writes it, None when it reads nothing. BadGroundTruthError when it cannot parse the ground truth.

    Its own timeouts use signals and are off: the worker process that runs this is killed at the component's deadline
    instead.
    """
    truth = _parse(ground_truth) or _parse(f"${ground_truth}$")
    if not truth:
        raise BadGroundTruthError(
            f"math-verify finds no expression in the ground truth {ground_truth[:200]!r}; correct the data set"
        )
    found = _parse(response_text)
    return float(verify(truth, found, timeout_seconds=None)), _written(found)


def _written(found: list[object]) -> str | None:
    """The expression as sympy writes it; for one that it cannot write, the text that was read."""
    try:
        return str(found[0]) if found else None
    except ValueError:  # Python writes no integer of more than 4300 digits
        return str(found[-1])


def _parse(text: str) -> list[object]:
    return list(parse(text, parsing_timeout=None))
