"""Mathematical equality of answers, by the math-verify library (extra `reward`). Heavy: sympy is imported here and nowhere else."""

import logging

from math_verify import parse, verify

from rolecall.errors import BadGroundTruthError

logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns at every call that its timeouts are off


def math_equal(response_text: str, ground_truth: str) -> float:
    """1.0 when math-verify parses both and finds them equal, else 0.0. BadGroundTruthError when it cannot parse the ground truth.

    Its own timeouts use signals and are off: the worker process that runs this is killed at the component's deadline instead.
    """
    truth = _parse(ground_truth) or _parse(f"${ground_truth}$")
    if not truth:
        raise BadGroundTruthError(f"math-verify finds no expression in the ground truth {ground_truth[:200]!r}; correct the data set")
    return float(verify(truth, _parse(response_text), timeout_seconds=None))


def _parse(text: str) -> list[object]:
    return list(parse(text, parsing_timeout=None))
