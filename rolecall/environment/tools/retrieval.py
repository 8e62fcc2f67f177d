"""Retrieval as a tool: full-text search over documents of one's own, in a file of SQLite's FTS5."""

import json
import re
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

from rolecall.environment.env import Tool
from rolecall.errors import ConfigError, InvalidInputError

NUM_RESULTS = 3
"""Documents of one answer."""
MAX_WORDS = 32
"""Words of a query that are looked for."""
EXCERPT_WORDS = 60
"""Words of a document that are shown, around what was found; FTS5 takes 64 at the most."""
OPEN_S = 10.0
"""Longest wait for a file that somebody else is writing."""


class Retrieval:
    """A search of documents by the words of a query, the best first (bm25)."""

    tool = Tool(
        "search",
        "Searches documents for words.",
        {"type": "object", "properties": {"query": {"type": "string"}}, "required": ["query"]},
    )

    def __init__(self, index: Path) -> None:
        """`index`: a file that `write_index` wrote. ConfigError when it is none."""
        self._uri = f"{index.resolve().as_uri()}?mode=ro"
        try:
            self._found("a")
        except sqlite3.Error as error:
            raise ConfigError(
                f"{index} is no index of documents: {error}; write it with rolecall.environment.tools.retrieval"
            ) from error

    def call(self, arguments: Mapping[str, Any]) -> str:
        """Implements CallableTool.call."""
        words = re.findall(r"\w+", str(arguments["query"]))[:MAX_WORDS]
        if not words:
            raise InvalidInputError("the query has no words")
        found = self._found(" OR ".join(f'"{word}"' for word in words))
        return "\n\n".join(f"{title}\n{excerpt}" for title, excerpt in found) or "nothing was found"

    def _found(self, query: str) -> list[tuple[str, str]]:
        """(title, excerpt) of the best documents for a query of FTS5's."""
        with closing(sqlite3.connect(self._uri, uri=True, timeout=OPEN_S)) as connection:
            return connection.execute(
                f"SELECT title, snippet(documents, 1, '', '', ' ... ', {EXCERPT_WORDS}) FROM documents "
                "WHERE documents MATCH ? ORDER BY rank, rowid LIMIT ?",
                (query, NUM_RESULTS),
            ).fetchall()


def write_index(index: Path, documents: Iterable[tuple[str, str]]) -> None:
    """Writes the (title, text) of documents into a new file. ConfigError when it is there already."""
    if index.exists():
        raise ConfigError(f"{index} is there already; remove it to write it anew")
    with closing(sqlite3.connect(index, timeout=OPEN_S)) as connection, connection:
        connection.execute("CREATE VIRTUAL TABLE documents USING fts5(title, text, tokenize='porter unicode61')")
        connection.executemany("INSERT INTO documents VALUES (?, ?)", documents)


def read_documents(path: Path) -> Iterator[tuple[str, str]]:
    """The (title, text) of a JSON Lines file with these fields. ConfigError names the line that lacks one."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            try:
                row = json.loads(line)
                yield str(row["title"]), str(row["text"])
            except (ValueError, KeyError, TypeError) as error:
                raise ConfigError(f"{path}:{number} is no object with title and text: {error!r}") from error
