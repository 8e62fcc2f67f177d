"""Files of rows: JSON lines or parquet, each row an object of fields.

Owns how they are read, a row at a time and never a whole file; every complaint names the file and the line (from 1).
What the fields mean is said by who reads them: prompts (dataset.py), examples (sft_examples.py).
"""

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

from rolecall.data.json_text import parse_json
from rolecall.data.preprocess import PREPROCESS, preprocessing
from rolecall.errors import ConfigError
from rolecall.settings import PluginSection

TOLD_ROWS = 250_000
"""Rows between two words on how far the reading is: some seconds."""
PARQUET_ROWS, PARQUET_BUFFER_BYTES = 64, 2**20
"""Rows of a parquet file that are read at a time, and bytes of a column: rows may hold images."""
_OTHERS = (".gz", ".bz2", ".xz", ".zst", ".zip", ".csv", ".tsv", ".arrow", ".feather")
"""Ends of the names of files that are neither JSON lines nor parquet."""

Row: TypeAlias = tuple[int, str, str, dict[str, Any]]
"""A row as rows_of gives it."""


def told(rows: Iterable[Row], tell: Callable[[str], None]) -> Iterator[Row]:
    """The rows, of which `tell` is called with how many there were after every TOLD_ROWS."""
    for number, row in enumerate(rows, 1):
        if number % TOLD_ROWS == 0:
            tell(f"the data, {number:,} rows so far, to {row[2]}")
        yield row


def rows_of(
    files: Path | tuple[Path, ...],
    setting: str,
    preprocess: PluginSection | None = None,
    images_field: str | None = None,
) -> Iterator[Row]:
    """Each row of the files that `setting` names, in their order: (number of its file from 1, its line from 1, file and
    line for complaints, fields as `preprocess` returns them, of which `images_field` may hold bytes). ConfigError, also
    for a file without a row.
    """
    own = preprocessing(preprocess, images_field)
    for place, path in enumerate((files,) if isinstance(files, Path) else files, 1):
        num_read = num_left = 0
        for number, fields in read_rows(path, setting):
            num_read += 1
            where = f"{path}, line {number}"
            if (row := own(fields, where)) is not None:
                num_left += 1
                yield place, str(number), where, row
        if not num_read:
            raise ConfigError(f"{setting}: {path} holds no rows; give a JSONL or parquet file with at least one")
        if not num_left:
            raise ConfigError(f"{PREPROCESS}: it leaves out all {num_read} rows of {path}; correct it")


def read_rows(path: Path, setting: str) -> Iterator[tuple[int, dict[str, Any]]]:
    """(number from 1, fields) of each row of the file that `setting` names. ConfigError."""
    if not path.is_file():
        state = "is a folder" if path.is_dir() else "does not exist"
        raise ConfigError(
            f"the dataset {path} {state}; give {setting} a .jsonl or .parquet file (of a hub's set, "
            "`hf download ORGANISATION/NAME --repo-type dataset --local-dir FOLDER` brings its files)"
        )
    kind = path.suffix.lower()
    if kind in _OTHERS:
        raise ConfigError(
            f"the dataset {path} is named {kind}, and JSON lines and .parquet are read; unpack or convert it, and give "
            f"that to {setting}"
        )
    try:
        yield from _parquet_rows(path) if is_parquet(path) else _json_rows(path)
    except OSError as error:
        raise ConfigError(
            f"the dataset {path} cannot be read: {error.strerror or error}; make it a readable file"
        ) from error


def is_parquet(path: Path) -> bool:
    """Whether a file of rows is read as parquet: by its name."""
    return path.suffix.lower() == ".parquet"


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    from pyarrow import ArrowInvalid, parquet  # takes a moment to import, and most datasets are JSONL

    try:
        # as it comes: Arrow would keep whole row groups, which may be all of a file of images
        with parquet.ParquetFile(path, pre_buffer=False, buffer_size=PARQUET_BUFFER_BYTES) as file:
            batches = file.iter_batches(PARQUET_ROWS)
            yield from enumerate((row for batch in batches for row in batch.to_pylist()), 1)
    except ArrowInvalid as error:
        raise ConfigError(f"{path} is not parquet ({error}); write it anew, or name JSON lines .jsonl") from error


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    decoder = json.JSONDecoder(object_pairs_hook=_once)
    with path.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield number, _json_row(line, f"{path}, line {number}", decoder)


def _json_row(line: bytes, where: str, decoder: json.JSONDecoder) -> dict[str, Any]:
    try:
        row = parse_json(line.decode("utf-8-sig").rstrip(), decoder)
        if b"\\u" in line:
            json.dumps(row, ensure_ascii=False).encode()  # half a surrogate pair is JSON and no text
    except _TwiceError as error:
        raise ConfigError(f"{where}: the field {error.field!r} is there twice; remove one") from error
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{where}: not JSON ({error.msg} at column {error.colno}); one JSON object a line is needed"
        ) from error
    except UnicodeError as error:
        raise ConfigError(f"{where}: not UTF-8 text ({error}); save the file as UTF-8") from error
    except ValueError as error:
        raise ConfigError(f"{where}: {error}; shorten it, or write it as text") from error
    if not isinstance(row, dict):
        raise ConfigError(
            f"{where}: a {type(row).__name__}, not an object with fields; write {{...}} with the prompt in a field"
        )
    return row


class _TwiceError(Exception):
    """An object of JSON has a field twice."""

    def __init__(self, field: str) -> None:
        super().__init__(field)
        self.field = field


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these fields, whose names all rows share. _TwiceError names one that is there twice."""
    found = {sys.intern(name): value for name, value in pairs}
    if len(found) < len(pairs):
        raise _TwiceError(next(name for place, (name, _) in enumerate(pairs) if name in dict(pairs[:place])))
    return found
