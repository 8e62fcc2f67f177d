"""The history of groups: every transition, in the order in which the store made them, first in a stream and then in a
JSONL file.

A script adds an event in the same step in which it changes the ledger, so the history is exactly what happened.
`Ledger.drain` moves it to `<run.dir>/history.jsonl`; a reader takes both, and an event that a crash left in both, or
twice in the file, counts once.

    event      fields
    admitted   prompt (its uid), step (applied then)
    claimed    token (consumer and delivery count)
    released   token, error: handed back for no fault of the group
    abandoned  token, error: its generation failed in that worker
    reaped     token, error: the worker lives and did not renew it
    expelled   token, error: the worker died or was left behind
    committed  token, versions (of its tokens, separated by spaces), tokens (sampled, in its rows, masked by reason)
    sealed     step (the batch), tokens (in its rows, and trained of them)
    trained    step, version (of the policy that it moved on from)
    dropped    reason, error, last_error (of its workers)
    lineage    lineage, step, first_gid, trained, dropped:<reason>: the run was set back to a checkpoint; it belongs to
    no group

The four hand-backs also say whether the delivery was `excused` and whether the group is `held_back` to be dropped (1 or
0). The counts of `tokens` are `name:count`, by commas. Other events come from `Ledger.note`. The file format is
owned here: an object a line with `id` (of the stream), `time_s` (Unix, of the server's clock), `gid`, `event`, the
fields.
"""

import json
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from rolecall.errors import InvalidInputError
from rolecall.store.connection import Connection
from rolecall.v1.trajectory_pb2 import CommittedGroup, TrainBatch

PAGE = 1000
"""Stream entries read at a time."""

SAMPLED, ROWS, TRAINED = "sampled", "rows", "trained"
"""Names of counts in the `tokens` of an event."""
_TAIL_BYTES = 2**20
"""More than any line has."""
_OWN = ("id", "time_s", "gid", "event")


@dataclass(frozen=True)
class Event:
    """One line of the history."""

    id: str
    """Id of the stream's entry: it grows, as long as the store is the same."""
    time_s: float
    gid: int | None
    """None: an event of the whole run."""
    event: str
    fields: Mapping[str, str]


def committed_tokens(group: CommittedGroup) -> str:
    """The `tokens` of the event that commits `group`; empty where it says nothing of them."""
    tokens = group.tokens
    counts = {SAMPLED: tokens.num_sampled, ROWS: tokens.num_trained, **tokens.masked}
    return _encoded(counts) if group.HasField("tokens") else ""


def sealed_tokens(batch: TrainBatch) -> list[str]:
    """The `tokens` of the events that seal `batch`, in the order of its gids; empty where it says nothing of them."""
    said = [_encoded({ROWS: each.num_sampled, TRAINED: each.num_trained}) for each in batch.tokens]
    return said or [""] * len(batch.gids)


def decode_tokens(text: str) -> Counter[str]:
    """The counts by name in the `tokens` of an event."""
    return Counter({name: int(count) for name, _, count in (part.partition(":") for part in text.split(",") if part)})


def _encoded(counts: Mapping[str, int]) -> str:
    return ",".join(f"{name}:{count}" for name, count in counts.items())


def to_line(entry: str, fields: Mapping[bytes, bytes]) -> str:
    """The stream entry `entry` as a line of its file."""
    text = {name.decode(): value.decode(errors="replace") for name, value in fields.items()}
    return json.dumps({"id": entry, "time_s": int(entry.partition("-")[0]) / 1000, **text})


def read_history(connection: Connection, run: str, file: Path | None, last: str) -> Iterator[Event]:
    """Events up to the stream's id `last`, each once, oldest first: those of the file, then those that are in the
    stream only.

    The stream is read before the file, because that is the way events go: what is drained in between is in the file.
    """
    streamed = list(_read_stream(connection, f"{{rl:{run}}}:history", last))
    seen, end = _Seen(), order(last)
    for event in chain(_read_lines(file), streamed) if file is not None and file.exists() else streamed:
        place = order(event.id)
        if place <= end and seen.is_new(place):
            yield event


class _Seen:
    """The ids of events that were read, 16 bytes each: they grow, but where a store that was lost gave some again, or
    lines were written again.
    """

    def __init__(self) -> None:
        self._runs: list[tuple[array[int], array[int]]] = []
        """Milliseconds and numbers of ids, which grow within a run."""

    def is_new(self, place: tuple[int, int]) -> bool:
        """Whether the id was not read before; it counts as read from here on."""
        if any(_holds(run, place) for run in self._runs):
            return False
        if not self._runs or (self._runs[-1][0][-1], self._runs[-1][1][-1]) > place:
            self._runs.append((array("Q"), array("Q")))
        for column, value in zip(self._runs[-1], place, strict=True):
            column.append(value)
        return True


def _holds(run: tuple["array[int]", "array[int]"], place: tuple[int, int]) -> bool:
    milliseconds, numbers = run
    if place > (milliseconds[-1], numbers[-1]):
        return False
    first, end = bisect_left(milliseconds, place[0]), bisect_right(milliseconds, place[0])
    return place[1] in numbers[first:end]


def last_event_id(connection: Connection, run: str) -> str:
    """Id of the newest event, drained or not; "0-0" when there is none."""
    stream = f"{{rl:{run}}}:history"
    if not connection.command("EXISTS", stream):
        return "0-0"
    flat = connection.command("XINFO", "STREAM", stream)
    newest: bytes = dict(zip(flat[::2], flat[1::2], strict=True))[b"last-generated-id"]
    return newest.decode()


def last_drained_id(file: Path) -> str:
    """Id of the file's last event; "0-0" when there is none."""
    if not file.exists():
        return "0-0"
    with file.open("rb") as opened:
        opened.seek(max(0, file.stat().st_size - _TAIL_BYTES))
        whole, _, _ = opened.read().rpartition(b"\n")
    try:
        return str(json.loads(whole.rpartition(b"\n")[2])["id"]) if whole else "0-0"
    except (ValueError, KeyError) as error:
        raise InvalidInputError(f"{file}, the last line is no event of the history: {error!r}") from error


def order(entry: str) -> tuple[int, int]:
    """The key by which ids of stream entries are ordered."""
    milliseconds, _, number = entry.partition("-")
    return int(milliseconds), int(number)


def _read_stream(connection: Connection, stream: str, last: str) -> Iterator[Event]:
    start = "-"
    while entries := connection.command("XRANGE", stream, start, last, "COUNT", PAGE):
        for entry, fields in entries:
            yield _event(json.loads(to_line(entry.decode(), fields)))
        start = f"({entries[-1][0].decode()}"


def _read_lines(path: Path) -> Iterator[Event]:
    """Whole lines; one that is still being written is still in the stream."""
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.endswith("\n"):
                try:
                    yield _event(json.loads(line))
                except (ValueError, KeyError) as error:
                    raise InvalidInputError(f"{path}, line {number} is no event of the history: {error!r}") from error


def _event(line: Mapping[str, str | float]) -> Event:
    gid = line.get("gid")
    fields = {name: str(value) for name, value in line.items() if name not in _OWN}
    return Event(str(line["id"]), float(line["time_s"]), None if gid is None else int(gid), str(line["event"]), fields)
