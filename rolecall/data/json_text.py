"""JSON that people and other programs wrote, with one kind of error for all that may be wrong with it."""

import json
import sys
from typing import Any


def parse_json(text: str, decoder: json.JSONDecoder | None = None) -> Any:
    """Reads `text`, by a `decoder` of the caller's where it is given. ValueError says why it cannot be read; it is a
    JSONDecodeError where the place is known.
    """
    try:
        return json.loads(text) if decoder is None else decoder.decode(text)
    except json.JSONDecodeError:
        raise
    except RecursionError as error:
        raise ValueError("lists or objects are nested too deep to be read") from error
    except ValueError as error:
        raise ValueError(f"a whole number has more than {sys.get_int_max_str_digits()} digits") from error
