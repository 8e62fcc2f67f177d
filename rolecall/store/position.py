"""The position of a ledger: balance, live groups, pending entries. Plain values, decoded from one
snapshot.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple

from rolecall.trajectory import rows_of
from rolecall.v1.controller_pb2 import LedgerCounts
from rolecall.v1.trajectory_pb2 import CommittedGroup, RowRef, TrainBatch

NOBODY = b"~"
"""Begins the names of consumers under which entries wait: to be claimed again, or to be dropped as delivered too often.
"""


class GroupState(StrEnum):
    """The state of a live group: admitted -> committed -> sealed -> (trained). Dropped is reached from admitted and
    committed; terminal groups are not live.
    """

    ADMITTED = "admitted"
    COMMITTED = "committed"
    SEALED = "sealed"


@dataclass(frozen=True)
class LiveGroup:
    """A group that is neither trained nor dropped."""

    gid: int
    state: GroupState
    entry_id: str
    """Id of its entry in the prompts stream (gone from the stream once committed)."""
    admit_published_step: int
    """Steps behind the weights the fleet held then: no token of it comes from older ones. -1: before the first publish.
    """


@dataclass(frozen=True)
class PendingEntry:
    """A claimed entry of the prompts stream."""

    entry_id: str
    consumer: str
    renewed_at_s: float
    """Time of its claim or last renewal by the server's clock, to the millisecond: watch it change, compare it with
    nothing else.
    """
    delivery: int
    """Delivery count, the second half of its token."""


class SuccessRate(NamedTuple):
    """The rate at which a prompt was answered rightly of late."""

    gid: int
    """The newest group that counts in it."""
    rate: float
    """Share of right answers, 0 to 1."""


class Overdelivered(NamedTuple):
    """A group that was delivered too often: it waits to be dropped."""

    gid: int
    error: str
    """What its last worker reported, or what was reported of it: "<consumer>: <error>". Empty when nobody said."""


@dataclass(frozen=True)
class RunPosition:
    """The position of a run, as the store holds it."""

    ctl: int = 0
    """Fencing number of the controller in charge."""
    lineage: int = 0
    """Number of the lineage, which rises each time the run goes back to a checkpoint."""
    lineage_gid: int = 0
    """First gid of this lineage; it tells how many of a checkpoint's untrained prompts were admitted again."""
    step: int = 0
    """Train batches applied; the next to seal."""
    published_step: int = -1
    """Steps behind the weights the fleet holds; -1 before the first publish."""
    policy_version: int = -1
    """Version last attested; -1 before the first."""
    begun_version: int = -1
    """Highest version a publish was begun under; above policy_version while a publish is under way or after one failed.
    """
    epoch: int = 0
    """Last epoch of the weight channel."""
    next_gid: int = 0
    """Gid of the next group to admit."""
    cursor: bytes = b""
    """The data cursor after the last admitted group."""
    algorithm_state: bytes = b""
    """What the algorithm carries into the next step, as the controller encoded it; empty when nothing adapts."""
    evaluated_step: int = -1
    """Steps applied at the last evaluation that was recorded; -1 before the first."""
    reported_step: int = 0
    """Steps whose numbers were told."""
    admitted: int = 0
    """Groups admitted."""
    trained: int = 0
    """Groups trained."""
    dropped: Mapping[str, int] = field(default_factory=dict)
    """Groups dropped, by reason."""
    failed: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Gids of the newest dead letters, by reason; at most 1,000 of each."""
    freed_step: int = 0
    """Batches below it are freed."""
    paused: int = 0
    """1 while people want nothing admitted."""
    set_back: int = 0
    """1 once the store lost what it had acknowledged, until a new lineage begins."""

    @property
    def num_dropped(self) -> int:
        """Groups dropped, of all reasons."""
        return sum(self.dropped.values())


@dataclass(frozen=True)
class Snapshot:
    """One consistent view of the whole ledger."""

    position: RunPosition
    counts: LedgerCounts
    groups: tuple[LiveGroup, ...]
    """Live groups in order of admission."""


@dataclass(frozen=True)
class Garbage:
    """Rows that nobody reads any more, and the ledger's notes of them: delete the rows, then `Ledger.forget` it."""

    rows: tuple[RowRef, ...]
    notes: tuple[str, ...]


def garbage_of(gid: int, rows: Sequence[RowRef]) -> Garbage:
    """The note that `Ledger.drop` makes of the committed group `gid`."""
    return Garbage(tuple(rows), (f"group:{gid}",))


def decode_position(fields: Mapping[bytes, bytes]) -> RunPosition:
    """The position in the fields of the `run` hash."""
    text = {name.decode(): value for name, value in fields.items()}
    numbers = {
        name: int(text[name])
        for name in RunPosition.__dataclass_fields__
        if name in text and name not in ("cursor", "algorithm_state")
    }
    dropped = {name.removeprefix("dropped:"): int(value) for name, value in text.items() if name.startswith("dropped:")}
    failed = {
        name.removeprefix("failed:"): tuple(map(int, value.split()))
        for name, value in text.items()
        if name.startswith("failed:")
    }
    return RunPosition(
        cursor=text.get("cursor", b""),
        algorithm_state=text.get("algorithm_state", b""),
        dropped=dropped,
        failed=failed,
        **numbers,
    )


def decode_snapshot(values: Sequence[Any]) -> Snapshot:
    """The snapshot in the answer of `ledger.lua`."""
    run, num_prompts, num_trajectories, num_live, pending, groups = values
    position = decode_position(dict(zip(run[::2], run[1::2], strict=True)))
    generating = sum(int(count) for consumer, count in pending if not consumer.startswith(NOBODY))
    counts = LedgerCounts(
        admitted=position.admitted,
        trained=position.trained,
        dropped=position.dropped,
        live=num_live,
        queued=num_prompts - generating,
        generating=generating,
        committed=num_trajectories,
    )
    found = (
        LiveGroup(int(gid), GroupState(state.decode()), entry.decode(), int(published))
        for gid, state, entry, published in groups
    )
    return Snapshot(position, counts, tuple(found))


def rows_of_garbage(notes: Mapping[bytes, bytes]) -> Garbage:
    """The rows that the fields of the `garbage` hash name."""
    rows: list[RowRef] = []
    for note, message in notes.items():
        rows += rows_of(
            TrainBatch.FromString(message) if note.startswith(b"batch:") else CommittedGroup.FromString(message)
        )
    return Garbage(tuple(rows), tuple(note.decode() for note in notes))
