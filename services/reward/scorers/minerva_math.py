r"""Answers of MATH as Minerva compared them: as texts, after the normalisation of its paper. For mathematical equality
use `math`.
"""

import re

from services.reward.scorers.boxed import last_boxed

_FINAL = re.compile(r"[Ff]inal [Aa]nswer is:?")
MOST_CHARS = 10_000
"""Longest text that is taken for an answer: the patterns take a time that grows with its square."""
_HOPE = "I hope it is correct"
_REPLACED = (
    ("an ", ""),
    ("a ", ""),
    (".$", "$"),
    (r"\$", ""),
    (r"\ ", ""),
    (" ", ""),
    ("mbox", "text"),
    (r",\text{and}", ","),
    (r"\text{and}", ","),
    (r"\text{m}", r"\text{}"),
)
_WORDS = (
    "square ways integers dollars mph inches ft hours km units \\ldots sue points feet minutes digits cents degrees cm "
    "gm pounds meters meals edges students childrentickets multiples"
)
_MARKS = (
    *(r"\text{s}", r"\text{.}", "\\text{\ns}", r"\text{}^2", r"\text{}^3", "\\text{\n}", r"\text{}"),
    *(r"\mathrm{th}", r"^\circ", r"^{\circ}", r"\;", r",\!", "{,}", '"', r"\dots"),
)
_REMOVED = (*_WORDS.split(), *_MARKS)
"""Words and marks that go, in the paper's order."""
_UNWRAPPED = (
    (re.compile(r"^.*?\$(.*?)\$.*", re.MULTILINE), r"$\1$"),  # of each line: looked for from its start alone
    (re.compile(r"\\text\{(.*?)\}"), r"\1"),
    (re.compile(r"\\textbf\{(.*?)\}"), r"\1"),
    (re.compile(r"\\overline\{(.*?)\}"), r"\1"),
    (re.compile(r"\\boxed\{(.*)\}"), r"\1"),
    (re.compile(r"frac([^{])(.)"), r"frac{\1}{\2}"),
    (re.compile(r"sqrt([^{])"), r"sqrt{\1}"),
)


def minerva_normalized(answer: str) -> str:
    r"""The answer as Minerva compares it (Lewkowycz et al. 2022, arXiv:2206.14858, appendix D.1).

    What stands before the last = goes, articles, spaces, units of its list and degrees; of text with $...$ the
    mathematics stays, \text, \textbf, \overline and \boxed give what they hold, \frac12 and \sqrt3 get braces, and
    commas in whole numbers go. A text of more than MOST_CHARS is returned as it is.
    """
    if len(answer) > MOST_CHARS:
        return answer
    text = answer.split("=")[-1]
    for old, new in _REPLACED:
        text = text.replace(old, new)
    for removed in _REMOVED:
        text = text.replace(removed, "")
    for pattern, kept in _UNWRAPPED:
        text = pattern.sub(kept, text)
    text = text.replace("$", "")
    digits = text.replace(",", "")
    return digits if digits.isdigit() else text


def minerva_answer(text: str) -> str | None:
    r"""The normalised answer behind the last "final answer is", up to "I hope it is correct". Where that end is
    missing, as where sampling stops at it, the last \boxed{...} is the answer, else the rest of the line. None when
    there is nothing of all this.
    """
    *before, told = _FINAL.split(text)
    told, hoped, _ = told.partition(_HOPE)
    answer = told if before and hoped else last_boxed(text)
    if answer is None and before:
        answer = told.strip().partition("\n")[0]
    return None if answer is None else minerva_normalized(answer.strip().removesuffix(".").strip())


def minerva_match(response_text: str, ground_truth: str) -> float:
    r"""1.0 when the answer is the ground truth (or the content of its own box), both normalised; else 0.0."""
    boxed = last_boxed(ground_truth)
    return float(minerva_answer(response_text) == minerva_normalized(ground_truth if boxed is None else boxed))
