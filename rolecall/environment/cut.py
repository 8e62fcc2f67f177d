"""One text that stands in parts, and what is left out of it. A pure function: which characters those are, and what the
marker says, is whoever's who cuts.
"""

from collections.abc import Sequence


def cut_out(texts: Sequence[str], begin: int, end: int, marker: str) -> list[str]:
    """The texts without characters `begin` to `end` - 1 of them all, and `marker` in their place."""
    short, at = list[str](), 0
    for text in texts:
        told = marker if at <= begin < at + len(text) else ""
        short.append(text[: max(0, begin - at)] + told + text[max(0, end - at) :])
        at += len(text)
    return short
