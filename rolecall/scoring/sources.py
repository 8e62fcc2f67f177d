"""Sources of prompts: the texts of a data set's field `source`, whose rewards an evaluation also gives by themselves.

Owns which of them are reported: each is the name of three metrics, so their number is bounded here.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

SOURCE_FIELD = "source"
"""The field that says where a row comes from."""
MAX_SOURCES = 64
"""Most sources of a set; of one with more none is reported, for its field tells rows apart and not data sets."""
MAX_SOURCE_CHARS = 100
"""Longest text that is a source."""


def source_of(metadata: Mapping[str, object]) -> str | None:
    """Returns the source of a prompt with these fields; None where the field holds no short, printable text."""
    value = metadata.get(SOURCE_FIELD)
    if isinstance(value, str) and 0 < len(value) <= MAX_SOURCE_CHARS and value.isprintable():
        return value
    return None


def count_sources(sources: Iterable[str | None]) -> Counter[str]:
    """Returns the prompts of each source of a set, the most frequent first; empty where all prompts share one, which
    the set's own figures say.
    """
    counts = Counter(sources)
    is_parted = len(counts) > 1
    return Counter({source: num for source, num in counts.most_common() if source is not None and is_parted})
