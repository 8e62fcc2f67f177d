"""Tests of a program, as a row of the data set has them; `rolecall check` and the reward service both read them
here.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from keyword import iskeyword
from typing import Any

from rolecall.settings import LanguageSection


@dataclass(frozen=True)
class CodeTest:
    """A test of a program: what it reads and must write, a call of a function, or code that is appended to it."""

    stdin: str = ""
    """What the program reads; of a call, the JSON array of the arguments."""
    stdout: str | None = None
    """What it must write; of a call, the JSON of what it must return. None: the test is code."""
    code: str = ""
    function: str = ""
    """Name of the function or method that is called; empty: the test is no call."""
    wrapped: bool = False
    """Whether a call whose right result is `[x]` may return `x`."""


def read_tests(value: Any) -> list[CodeTest]:
    """The tests that the field's `value` holds, at least one. ValueError says, as the end of a sentence, what it is
    instead.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ValueError("text that is not JSON") from None
    function = None
    if isinstance(value, Mapping):
        function, value = value.get("fn_name"), _pairs(value)
    if not isinstance(value, list) or not value:
        raise ValueError("no list of tests")
    return [_test(each) for each in value] if function is None else _calls(function, value)


def require_language(tests: Sequence[CodeTest], language: LanguageSection) -> None:
    """ValueError says, as the end of a sentence, which of `tests` cannot be run in `language`."""
    if language.end is None and any(test.stdout is None for test in tests):
        raise ValueError("code, which needs scorer.language.end")
    if language.call is None and any(test.function for test in tests):
        raise ValueError("calls of a function (fn_name), which need scorer.language.call")


def _pairs(value: Mapping[str, Any]) -> list[dict[str, Any]]:
    inputs, outputs = value.get("inputs"), value.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list) or len(inputs) != len(outputs):
        raise ValueError("an object without lists inputs and outputs of one length")
    return [{"input": read, "output": written} for read, written in zip(inputs, outputs, strict=True)]


def _test(value: Any) -> CodeTest:
    if isinstance(value, str) and value.strip():
        return CodeTest(code=value)
    if isinstance(value, Mapping) and isinstance(value.get("output"), str) and isinstance(value.get("input", ""), str):
        return CodeTest(stdin=value.get("input", ""), stdout=value["output"])
    raise ValueError(f"a test that is neither code nor texts of input and output: {str(value)[:100]}")


def _calls(function: Any, pairs: Sequence[Mapping[str, Any]]) -> list[CodeTest]:
    """Calls whose results are as they stand. Where each of them is a list of one element, it may be that element which
    is returned: APPS wraps all results of a function so, and others do not.
    """
    if not isinstance(function, str) or not function.isidentifier() or iskeyword(function):
        raise ValueError(f"calls of {str(function)[:100]!r} (fn_name), which is no function's name")
    calls = [_call(function, **each) for each in pairs]
    wrapped = all(isinstance(result, list) and len(result) == 1 for _, result in calls)
    return [
        CodeTest(json.dumps(given), json.dumps(result), function=function, wrapped=wrapped) for given, result in calls
    ]


def _call(function: str, input: Any, output: Any) -> tuple[list[Any], Any]:
    """Arguments and result: a list beside the result itself, or lines of JSON beside the result's JSON."""
    try:
        if isinstance(input, str):
            input, output = [json.loads(line) for line in input.splitlines() if line.strip()], json.loads(output)
    except (ValueError, TypeError, RecursionError):
        raise ValueError(f"a call of {function} whose input or output is not JSON: {input[:100]}") from None
    if not isinstance(input, list):
        raise ValueError(f"a call of {function} whose input is no list of arguments: {str(input)[:100]}")
    return input, output
