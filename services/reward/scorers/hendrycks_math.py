r"""Answers of MATH, compared as texts after the data set's own normalisation. For mathematical equality use `math`."""

import re

from services.reward.scorers.boxed import last_boxed

_REMOVED = ("\n", r"\!", r"\left", r"\right", r"^{\circ}", r"^\circ", r"\$", r"\%", "%", "$")
_BARE_SQRT = re.compile(r"\\sqrt([^{\[])")
_BARE_FRAC = re.compile(r"\\frac([^{\\])(?:([^{])|(?={))")
_RATIO = re.compile(r"(-?\d+)/(-?\d+)")


def normalized_math(answer: str) -> str:
    r"""The answer as MATH's `is_equiv` compares it (Hendrycks et al. 2021, arXiv:2103.03874).

    Line ends, thin spaces, \left, \right, degrees, dollar and percent signs and a unit in \text{ ...} go; \dfrac and
    \tfrac are \frac; a decimal point gets its 0; "x = 5" is 5; \sqrt3 and \frac12 get braces; a/b of whole numbers and
    0.5 are fractions; no spaces are left. Dollar signs around it go, too.
    """
    text = answer.replace(r"\\", "\\")
    for short in ("tfrac", "dfrac"):
        text = text.replace(short, "frac")
    for removed in _REMOVED:
        text = text.replace(removed, "")
    text = text.partition(r"\text{ ")[0].strip()
    text = re.sub(r"(^|[ {])\.(?=\d)", r"\g<1>0.", text)
    name, equals, value = text.partition("=")
    if equals and len(name.strip()) <= 2 and "=" not in value:
        text = value
    text = _BARE_SQRT.sub(r"\\sqrt{\1}", text.replace(" ", ""))
    text = _BARE_FRAC.sub(lambda match: rf"\frac{{{match[1]}}}" + (f"{{{match[2]}}}" if match[2] else ""), text)
    ratio = _RATIO.fullmatch(text)
    return rf"\frac{{{ratio[1]}}}{{{ratio[2]}}}" if ratio else r"\frac{1}{2}" if text == "0.5" else text


def hendrycks_answer(text: str) -> str | None:
    r"""The normalised content of the last \boxed{...}; None when there is none."""
    boxed = last_boxed(text)
    return None if boxed is None else normalized_math(boxed)


def hendrycks_match(response_text: str, ground_truth: str) -> float:
    r"""1.0 when the last \boxed{...} of the response is the ground truth (or the content of its own box), both
    normalised; else 0.0.
    """
    boxed = last_boxed(ground_truth)
    return float(hendrycks_answer(response_text) == normalized_math(ground_truth if boxed is None else boxed))
