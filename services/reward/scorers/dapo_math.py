"""Answers of DAPO's mathematics data set, whose prompts ask for a last line "Answer: ...". Compared as Minerva did."""

import re

from services.reward.scorers.boxed import last_boxed
from services.reward.scorers.minerva_math import minerva_normalized

_ANSWER = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)
_END_CHARS = 300
"""How much of a response's end is read, so that an answer in the midst of its thoughts is none."""


def dapo_answer(text: str) -> str | None:
    """The rest of the last line with "Answer:" in the last 300 characters, as `minerva_normalized` makes it; None
    without such a line (the form that DAPO's prompts ask for: Yu et al. 2025, arXiv:2503.14476).
    """
    found = _ANSWER.findall(text[-_END_CHARS:])
    return minerva_normalized(found[-1].strip()) if found else None


def dapo_match(response_text: str, ground_truth: str) -> float:
    """1.0 when the answer is the ground truth (or the content of its own box), both normalised; else 0.0."""
    boxed = last_boxed(ground_truth)
    return float(dapo_answer(response_text) == minerva_normalized(ground_truth if boxed is None else boxed))
