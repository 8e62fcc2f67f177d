"""JSON that people wrote, with one kind of error for all that may be wrong with it."""

import json
import sys
from typing import Any


def parse_json(text: str) -> Any:
    """Reads `text`. ValueError says why it cannot be read; it is a JSONDecodeError where the place is known."""
    try:
        return json.loads(text)
    except json.JSONDecodeError:
        raise
    except RecursionError as error:
        raise ValueError("lists or objects are nested too deep to be read") from error
    except ValueError as error:
        raise ValueError(f"a whole number has more than {sys.get_int_max_str_digits()} digits") from error
