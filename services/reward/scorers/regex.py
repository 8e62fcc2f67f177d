"""Regex answer: what a pattern extracts last is the ground truth."""

import re
from collections import deque


def regex_match(response_text: str, ground_truth: str, pattern: re.Pattern[str]) -> float:
    """1.0 when the last match of `pattern` (its group 1 if it has groups) equals the ground truth, both stripped; else 0.0."""
    matches = deque(pattern.finditer(response_text), maxlen=1)
    if not matches:
        return 0.0
    found = matches[0].group(1 if pattern.groups else 0)
    return float(found is not None and found.strip() == ground_truth.strip())
