"""JSON: the response is a JSON value, with the keys it must have."""

import json
from collections.abc import Sequence


def is_json(response_text: str, required_keys: Sequence[str] = ()) -> float:
    """1.0 when the response parses as standard JSON (no NaN or Infinity) and, if keys are required, is an object that
    has them; else 0.0.
    """
    try:
        value = json.loads(response_text, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return 0.0
    if not required_keys:
        return 1.0
    return float(isinstance(value, dict) and all(key in value for key in required_keys))


def _refuse(constant: str) -> object:
    raise ValueError(constant)
