"""JSON that people and other programs wrote, with one kind of error for all that may be wrong with it."""

import json
import sys
from collections.abc import Callable
from typing import Any


def parse_json(text: str, object_of: Callable[[list[tuple[str, Any]]], Any] | None = None) -> Any:
    """Reads `text`, each object by `object_of` its fields (None: a dict). ValueError says why it cannot be read; it is
    a JSONDecodeError where the place is known.
    """
    try:
        return json.loads(text, object_pairs_hook=object_of)
    except json.JSONDecodeError:
        raise
    except RecursionError as error:
        raise ValueError("lists or objects are nested too deep to be read") from error
    except ValueError as error:
        raise ValueError(f"a whole number has more than {sys.get_int_max_str_digits()} digits") from error
