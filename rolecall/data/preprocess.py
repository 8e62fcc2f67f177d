"""A function of the user's that makes the rows of a data set into those that are read (data.preprocess).

Owns what becomes of whatever such a function raises, prints and returns. Where it is called is dataset.py's.
"""

import io
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from typing import Any

from rolecall.errors import ConfigError
from rolecall.plugins import load_plugin
from rolecall.settings import PluginSection

PREPROCESS = "data.preprocess.function"
"""The setting, for complaints."""
MAX_PRINTED_BYTES = 4096
"""Bytes that are shown of what it prints for the rows of a data set."""


class _Beginning(io.BytesIO):
    """A sink that shows its first bytes on stderr, for what is printed is no part of a command's answer. All of it, of
    a million rows, would fill the disk of a log.
    """

    num_left = MAX_PRINTED_BYTES

    def fileno(self) -> int:
        """stderr's, for a program that the function starts."""
        return sys.stderr.fileno()

    def write(self, data: Any, /) -> int:
        """Shows what may still be shown of `data`."""
        view = memoryview(data)
        if self.num_left > 0:
            shown = bytes(view[: self.num_left]).decode("utf-8", "replace")
            self.num_left -= len(view)
            with suppress(OSError):  # no row depends on it
                sys.stderr.write(shown if self.num_left > 0 else f"{shown}\n[what {PREPROCESS} prints is cut here]\n")
        return len(view)


def preprocessing(
    section: PluginSection | None, images_field: str | None
) -> Callable[[dict[str, Any], str], dict[str, Any] | None]:
    """Returns a call that makes the fields of a row, and its place for complaints, into those that are read: the same
    where there is no function. `images_field`: one that stays as the function returns it, for it may hold bytes.
    ConfigError when it is not there; of a call, when it raises or returns anything else.
    """
    if section is None:
        return lambda row, where: row
    printed = io.TextIOWrapper(_Beginning(), "utf-8", "backslashreplace", write_through=True)
    with redirect_stdout(printed):
        function = load_plugin(section, PREPROCESS, "a row")

    def own(row: dict[str, Any], where: str) -> dict[str, Any] | None:
        try:
            with redirect_stdout(printed):
                made = function(row, **section.options)
        except (Exception, SystemExit) as error:  # anything may come out of a function of the user's
            raise ConfigError(
                f"{where}: {PREPROCESS} raised {type(error).__name__}: {error}; correct it or the line"
            ) from error
        if made is None:
            return None
        if not isinstance(made, dict):
            raise ConfigError(
                f"{where}: {PREPROCESS} returned a {type(made).__name__}, not fields by their names, or None to leave "
                "the row out; correct it"
            )
        images = {name: value for name, value in made.items() if name == images_field}
        return _as_written({name: value for name, value in made.items() if name not in images}, where) | images

    return own


def _as_written(fields: dict[str, Any], where: str) -> dict[str, Any]:
    """The fields as they would be read from JSON lines: what is checked here is what scorers get."""
    try:
        text = json.dumps(fields, default=_plain, ensure_ascii=False)
        text.encode()
    except (TypeError, ValueError) as error:  # a key that is no text, a list in itself, half a surrogate pair
        raise ConfigError(f"{where}: what {PREPROCESS} returned is not JSON ({error}); correct it") from error
    return json.loads(text)  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    """Numbers and arrays of numpy, which a function may have computed, as Python's; else text."""
    return value.tolist() if hasattr(value, "tolist") else str(value)
