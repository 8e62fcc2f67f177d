"""The audit's part about rows: those of live groups and kept batches are there, and every other row will be deleted or
expire.

Rows lie outside the ledger's slot, so nothing shows both at one instant. What looks wrong is therefore looked at again,
in the order in which the ledger changes: a group's key first, then the garbage that names its rows, then the row.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rolecall.store.connection import Connection
from rolecall.store.position import rows_of_garbage
from rolecall.store.replay import Findings
from rolecall.trajectory import rows_of
from rolecall.v1.trajectory_pb2 import CommittedGroup, RowRef, TrainBatch

CHUNK = 1000
"""Commands in one round trip."""


@dataclass(frozen=True)
class RowCount:
    """The rows in the store."""

    needed: int
    """Rows of groups that are committed or sealed, and of trained batches that no checkpoint covers."""
    garbage: int
    """Noted to be deleted."""
    staged: int
    """Rows with an expiry: of groups that are being sampled, or of attempts that never committed."""


def check_rows(connection: Connection, run: str, next_gid: int, steps: Sequence[int], findings: Findings) -> RowCount:
    """Looks at all rows of `run`; `steps` are the batches it keeps."""
    return _Check(connection, run, findings).run(next_gid, steps)


class _Check:
    def __init__(self, connection: Connection, run: str, findings: Findings) -> None:
        self._connection = connection
        self._prefix = f"{{rl:{run}}}:"
        self._row_prefix = f"{{rl:{run}:"
        self._findings = findings

    def run(self, next_gid: int, steps: Sequence[int]) -> RowCount:
        needed = self._needed(steps)
        self._check_presence(needed)
        rows, groups = self._scan()
        self._check_groups(groups, next_gid)
        garbage = self._garbage()
        others = [key for key in rows if key not in needed and key not in garbage]
        lives = dict(zip(others, self._each("TTL", others), strict=True))
        self._check_orphans([key for key, life in lives.items() if life == -1])
        return RowCount(len(needed), sum(key in garbage for key in rows), sum(life >= 0 for life in lives.values()))

    def _needed(self, steps: Sequence[int]) -> dict[str, RowRef]:
        """Rows that must be there, by key."""
        entries = self._connection.command("XRANGE", f"{self._prefix}trajectories", "-", "+")
        refs = [ref for _, fields in entries for ref in rows_of(CommittedGroup.FromString(fields[b"group"]))]
        batches = [self._connection.command("HGET", f"{self._prefix}batch:{step}", "group") for step in steps]
        refs += [ref for data in batches if data is not None for ref in rows_of(TrainBatch.FromString(data))]
        return {self._key(ref): ref for ref in refs}

    def _check_presence(self, needed: dict[str, RowRef]) -> None:
        missing = [key for key, found in zip(needed, self._each("EXISTS", list(needed)), strict=True) if not found]
        groups = [f"{self._prefix}g:{_gid(needed[key].id)}" for key in missing]
        self._findings.all_of(
            "rows that are needed and gone",
            [needed[key].id for key, live in zip(missing, self._each("EXISTS", groups), strict=True) if live],
        )

    def _scan(self) -> tuple[list[str], list[str]]:
        """Keys of rows and of groups."""
        found = self._connection.attempt(
            lambda: [
                key.decode() for key in self._connection.rows.scan_iter(match=f"{self._row_prefix[:-1]}*", count=CHUNK)
            ]
        )
        rows = sorted({key for key in found if key.startswith(self._row_prefix) and "}:row:" in key})
        return rows, sorted({key for key in found if key.startswith(f"{self._prefix}g:")})

    def _check_groups(self, keys: list[str], next_gid: int) -> None:
        """Every group key is live, or trained in a batch that is kept."""
        gids = {key: int(key.rpartition(":")[2]) for key in keys}
        known = [key for key in keys if gids[key] < next_gid]
        scores = self._connection.pipeline([("ZSCORE", f"{self._prefix}live", gids[key]) for key in known])
        idle = [key for key, score in zip(known, scores, strict=True) if score is None]
        for key, batch in zip(idle, self._connection.pipeline([("HGET", key, "batch") for key in idle]), strict=True):
            kept = batch is not None and self._connection.command("EXISTS", f"{self._prefix}batch:{batch.decode()}")
            if not kept and self._connection.command("EXISTS", key):
                self._findings.add("groups that are neither live nor in a batch that is kept", gids[key])

    def _garbage(self) -> set[str]:
        notes = self._connection.command("HGETALL", f"{self._prefix}garbage")
        return {self._key(ref) for ref in rows_of_garbage(notes).rows}

    def _check_orphans(self, keys: list[str]) -> None:
        """Rows without an expiry that were nobody's: are they still, or were they committed or dropped meanwhile?"""
        ids = [key.partition("}:row:")[2] for key in keys]
        tokens = self._connection.pipeline([("HGET", f"{self._prefix}g:{_gid(id)}", "token") for id in ids])
        unowned = [
            key
            for key, id, token in zip(keys, ids, tokens, strict=True)
            if token is None or token.decode() != id.rpartition(":")[2]
        ]
        garbage = self._garbage()
        unnamed = [key for key in unowned if key not in garbage]
        orphans = [key for key, life in zip(unnamed, self._each("TTL", unnamed), strict=True) if life == -1]
        self._findings.all_of(
            "rows that belong to nobody and never expire", [key.partition("}:row:")[2] for key in orphans]
        )

    def _key(self, ref: RowRef) -> str:
        return f"{self._row_prefix}{ref.shard}}}:row:{ref.id}:{ref.token}"

    def _each(self, command: str, keys: Sequence[str]) -> list[Any]:
        answers: list[Any] = []
        for start in range(0, len(keys), CHUNK):
            answers += self._connection.pipeline([(command, key) for key in keys[start : start + CHUNK]])
        return answers


def _gid(id: str) -> str:
    """The gid of a row's id, `<gid>/<i>` with whatever follows."""
    return id.partition("/")[0]
