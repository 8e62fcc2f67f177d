"""Tests of a program, as a row of the data set has them; `rolecall check` and the reward service both read them
here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CodeTest:
    """A test of a program: what it reads and must write, or code that is appended to it."""

    stdin: str = ""
    stdout: str | None = None
    """None: the test is code."""
    code: str = ""


def read_tests(value: Any) -> list[CodeTest]:
    """The tests that the field's `value` holds, at least one. ValueError says, as the end of a sentence, what it is
    instead.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError("text that is not JSON") from None
    if isinstance(value, Mapping):
        value = _pairs(value)
    if not isinstance(value, list) or not value:
        raise ValueError("no list of tests")
    return [_test(each) for each in value]


def _pairs(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    inputs, outputs = value.get("inputs"), value.get("outputs")
    if "fn_name" in value:
        raise ValueError("calls of a function (fn_name); write them as code, such as assert f(1) == 2")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError("an object without lists inputs and outputs of one length")
    return [{"input": read, "output": written} for read, written in zip(inputs, outputs, strict=True)]


def _test(value: Any) -> CodeTest:
    if isinstance(value, str) and value.strip():
        return CodeTest(code=value)
    if isinstance(value, Mapping) and isinstance(value.get("output"), str) and isinstance(value.get("input", ""), str):
        return CodeTest(stdin=value.get("input", ""), stdout=value["output"])
    raise ValueError(f"a test that is neither code nor texts of input and output: {str(value)[:100]}")
