"""Regex answer: what a pattern extracts last is the ground truth."""

import re
from collections import deque


def regex_answer(text: str, pattern: re.Pattern[str]) -> str | None:
    """The last match of `pattern` (its group 1 if it has groups), stripped; None when there is none, or the group took
    no part in it.
    """
    matches = deque(pattern.finditer(text), maxlen=1)
    found = matches[0].group(1 if pattern.groups else 0) if matches else None
    return None if found is None else found.strip()


def regex_match(response_text: str, ground_truth: str, pattern: re.Pattern[str]) -> float:
    """1.0 when the last match of `pattern` (its group 1 if it has groups) equals the ground truth, both stripped; else
    0.0.
    """
    return float(regex_answer(response_text, pattern) == ground_truth.strip())
