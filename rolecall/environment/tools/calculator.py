"""A calculator as a tool: exact arithmetic of whole and decimal numbers. Nothing but numbers is evaluated."""

import ast
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

from rolecall.environment.env import Tool
from rolecall.errors import InvalidInputError

MAX_CHARS = 200
"""Longest expression."""
MAX_BITS = 4096
"""Largest numerator or denominator of any intermediate result."""
MAX_DIGITS = 12
"""Significant digits of a result that is not whole."""

_OPERATORS: Mapping[type[ast.operator], Callable[[Fraction, Fraction], Fraction]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: lambda a, b: Fraction(a // b),
    ast.Mod: operator.mod,
}


class Calculator:
    """A calculator of `+ - * / // % **` and parentheses."""

    tool = Tool(
        "calculator",
        "Evaluates an arithmetic expression.",
        {
            "type": "object",
            "properties": {"expression": {"type": "string", "description": "such as (3 + 4) * 2"}},
            "required": ["expression"],
        },
    )

    def call(self, arguments: Mapping[str, Any]) -> str:
        """Implements CallableTool.call."""
        return evaluated(str(arguments["expression"]))


def evaluated(expression: str) -> str:
    """The value of `expression`, exact where it is whole. InvalidInputError when it has none."""
    if len(expression) > MAX_CHARS:
        raise InvalidInputError(f"the expression has {len(expression)} characters; at most {MAX_CHARS} are read")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        raise InvalidInputError("division by zero") from None
    except (SyntaxError, ValueError, MemoryError):  # what the parser makes of text that is none
        raise InvalidInputError(f"{expression!r} is no arithmetic expression") from None
    if value.denominator == 1:
        return str(value.numerator)
    try:
        return f"{float(value):.{MAX_DIGITS}g}"
    except OverflowError:
        raise _too_large() from None


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float()) if not isinstance(node.value, bool):
            value = Fraction(str(node.value))  # as it was written: 0.1 is a tenth
        case ast.UnaryOp(op=ast.USub()):
            value = -_value(node.operand)
        case ast.UnaryOp(op=ast.UAdd()):
            value = _value(node.operand)
        case ast.BinOp(op=ast.Pow()):
            value = _power(_value(node.left), _value(node.right))
        case ast.BinOp() if type(node.op) in _OPERATORS:
            value = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
        case _:
            raise InvalidInputError("only numbers, + - * / // % ** and parentheses are read")
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS:
        raise _too_large()
    return value


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1:
        raise InvalidInputError("exponents are whole numbers")
    bits = max(base.numerator.bit_length(), base.denominator.bit_length())
    if (bits > 1 and bits * abs(exponent) > 2 * MAX_BITS) or bits > MAX_BITS:
        raise _too_large()
    return Fraction(base**exponent.numerator)


def _too_large() -> InvalidInputError:
    return InvalidInputError("the result is too large")
