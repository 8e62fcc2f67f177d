"""Numbers that are not finite, in what is written as JSON: it has no word for them, and strict readers refuse
Python's.
"""

import math
from collections.abc import Mapping
from typing import Any


def or_null(value: Any) -> Any:
    """Returns `value`, of mappings, lists and scalars, with None for each number that is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: or_null(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [or_null(item) for item in value]
    return value
