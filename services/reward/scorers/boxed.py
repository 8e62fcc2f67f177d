r"""Boxed answer: the content of the last \boxed{...}, as text. For mathematical equality use `math`."""

import re

_PIECE = re.compile(r"(?P<mark>\\boxed\{)|\\(?!\\boxed\{).|[{}]", re.DOTALL)
"""A box's beginning, an escaped character or a brace."""


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete \boxed{...}, braces balanced, escaped braces not counted; None when there is
    none. One pass, for a policy that is lost may open a box with every token.
    """
    found, content = -1, None
    opened: list[int] = []
    """Where the content of each open brace begins; -1 where that is no box."""
    for piece in _PIECE.finditer(text):
        if piece["mark"]:
            opened.append(piece.end())
        elif piece[0] == "{":
            opened.append(-1)
        elif piece[0] == "}" and opened:
            start = opened.pop()
            if start > found:
                found, content = start, text[start : piece.start()]
    return content


def boxed_answer(text: str) -> str | None:
    r"""Content of the last \boxed{...} without its white space; None when there is none."""
    found = last_boxed(text)
    return None if found is None else "".join(found.split())


def boxed_match(response_text: str, ground_truth: str) -> float:
    r"""1.0 when the last \boxed{...} equals the ground truth (or the content of its own box), white space aside; else
    0.0.
    """
    wanted = boxed_answer(ground_truth)
    return float(boxed_answer(response_text) == ("".join(ground_truth.split()) if wanted is None else wanted))
