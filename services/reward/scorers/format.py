"""Format: the whole response has a shape, e.g. <think>...</think> and then an answer."""

import re


def matches_format(response_text: str, pattern: re.Pattern[str]) -> float:
    """1.0 when `pattern` matches the whole response, surrounding white space aside; else 0.0."""
    return float(pattern.fullmatch(response_text.strip()) is not None)
