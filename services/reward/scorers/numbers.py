"""Numbers in texts: the answers of GSM8K, and any last number, compared as numbers."""

import re
from decimal import Decimal

from rolecall.errors import BadGroundTruthError
from services.reward.scorers.boxed import last_boxed

_MARKED = re.compile(r"#### (-?[0-9.,]+)")
_NUMBER = re.compile(r"(?:(?<![\w)])-)?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)(?:[eE][-+]?\d{1,3})?")
"""A minus after a digit, a word or a bracket subtracts; it is no sign."""
_IN_BRACES = r"\s*\{\s*(-?(?:\d[\d,]*(?:\.\d+)?|\.\d+))\s*\}"
_FRACTION = re.compile(
    rf"((?<![\w)])-)?\$?(?:(?<![\w.,^])(\d+(?:,\d{{3}})*) ?)?\\[dt]?frac{_IN_BRACES}{_IN_BRACES}|{_NUMBER.pattern}"
)
r"""A \frac of two numbers, after its sign and the whole number of a mixed one, where they are; else a number."""


def gsm8k_answer(text: str, *, flexible: bool = False) -> str | None:
    """The final answer in a solution of GSM8K (Cobbe et al. 2021, arXiv:2110.14168; grade-school-math's
    `extract_answer`): the number after the first "#### ", commas removed; None when there is none.

    Beyond that, a period that ends the number is no part of it. flexible: the last number of the text, as lm-eval's
    filter "flexible-extract" takes it, for models that were not taught the mark.
    """
    if flexible:
        found = _NUMBER.findall(text)
        return _plain(found[-1]) if found else None
    marked = _MARKED.search(text)
    return (_plain(marked.group(1)) or None) if marked else None


def gsm8k_match(response_text: str, ground_truth: str, *, flexible: bool = False) -> float:
    """1.0 when the final answers are the same text, else 0.0. The ground truth is a number, or a whole solution with
    its "#### ".
    """
    marked = gsm8k_answer(ground_truth)
    return float(gsm8k_answer(response_text, flexible=flexible) == (marked or _plain(ground_truth.strip())))


def last_number(text: str) -> Decimal | None:
    r"""The last number of the last \boxed{...}, or of the whole text where there is none; None when there is no
    number. A \frac{a}{b} of numbers is one, as \dfrac and \tfrac are, and so is 2\frac{a}{b}.
    """
    boxed = last_boxed(text)
    found = list(_FRACTION.finditer(text if boxed is None else boxed))
    return _value(found[-1]) if found else None


def numeric_match(response_text: str, ground_truth: str, *, tolerance: float = 0.0) -> float:
    """1.0 when the last number of the response is off by no more than `tolerance` times the ground truth's size, else
    0.0. BadGroundTruthError when the ground truth holds no number.
    """
    truth = last_number(ground_truth)
    if truth is None:
        raise BadGroundTruthError(f"the ground truth {ground_truth[:200]!r} holds no number; correct the data set")
    found = last_number(response_text)
    return float(found is not None and abs(found - truth) <= Decimal(tolerance) * abs(truth))


def _value(found: re.Match[str]) -> Decimal:
    sign, whole, *parts = found.groups()
    if parts[0] is None:
        return Decimal(_plain(found[0]))
    above, below = (Decimal(_plain(part)) for part in parts)
    if not below:
        return below
    if whole is not None and (above < 0 or below < 0):  # a product, of which the fraction is the last number
        sign = whole = None
    size = (Decimal(_plain(whole or "0")) * below + above) / below
    return -size if sign else size


def _plain(number: str) -> str:
    return number.replace(",", "").replace("$", "").rstrip(".")
