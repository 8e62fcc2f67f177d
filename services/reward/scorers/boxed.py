r"""Boxed answer: the content of the last \boxed{...}, as text. For mathematical equality use `math`."""

MARK = r"\boxed{"


def last_boxed(text: str) -> str | None:
    r"""Content of the last complete \boxed{...}, braces balanced, escaped braces not counted; None when there is
    none.
    """
    start = text.rfind(MARK)
    while start >= 0:
        content = _balanced(text, start + len(MARK))
        if content is not None:
            return content
        start = text.rfind(MARK, 0, start)
    return None


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


def _balanced(text: str, start: int) -> str | None:
    depth, position = 1, start
    while position < len(text):
        character = text[position]
        if character == "\\":
            position += 2
            continue
        depth += {"{": 1, "}": -1}.get(character, 0)
        if depth == 0:
            return text[start:position]
        position += 1
    return None
