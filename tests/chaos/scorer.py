"""The light run's scorer: a reward hashed from the response, so that it differs within a group and never between
runs.
"""

import zlib

from rolecall.scoring.scores import Item


def score(item: Item) -> float:
    """0, 0.25, ... 1."""
    return zlib.crc32(item.response_text.encode()) % 5 / 4
