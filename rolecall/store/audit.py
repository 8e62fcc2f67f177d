"""The audit: whether the ledger balances, in counts and down to the ids, and everything in the store is somebody's.

Three accounts are compared: the counters of the `run` hash, the keys of the groups (both at one instant, by one
script), and the history, played back. It holds that every gid is exactly one of trained, dropped, live (or was undone
by a new lineage), that streams, pending entries, batches and rows belong to the groups they should belong to, that no
transition happened twice or out of turn, and that every sampled token was trained, masked or dropped. It only reads,
and may run beside a living run: what changes while rows are looked at is looked at again.

Bounds: it holds the history in memory, about 0.5 KB a group, and the names of all rows.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall.store import scripts
from rolecall.store.audit_rows import RowCount, check_rows
from rolecall.store.connection import Connection
from rolecall.store.history import last_drained_id, last_event_id, order, read_history
from rolecall.store.position import RunPosition, decode_position
from rolecall.store.replay import LIVE, Findings, Replay, TokenBalance


@dataclass(frozen=True)
class Report:
    """The findings of an audit, and the counts it compared."""

    run: str
    position: RunPosition
    """Where the run is, with its counters."""
    live: Mapping[str, int]
    """Live groups by where they are: queued, generating, committed, sealed."""
    num_undone: int
    """Groups that a new lineage set back; they are in none of the other numbers."""
    num_events: int
    """Events of the history, each counted once."""
    tokens: TokenBalance
    """What became of the sampled tokens, of the same groups."""
    rows: RowCount
    problems: tuple[str, ...]
    """What does not balance, each with the offending ids. Empty: all is well."""

    @property
    def num_live(self) -> int:
        """Groups that are neither trained nor dropped."""
        return sum(self.live.values())


@dataclass(frozen=True)
class _Live:
    state: str
    entry: str
    trajectory: str
    batch: str


@dataclass(frozen=True)
class _Store:
    """The store at one instant."""

    position: RunPosition
    last_event: str
    prompts: Mapping[str, int]
    trajectories: Mapping[str, int]
    last_delivered: str
    owners: Mapping[str, str]
    strangers: tuple[str, ...]
    live: Mapping[int, _Live]
    batches: Mapping[int, tuple[tuple[int, ...], bool]]


def audit(connection: Connection, run: str, run_dir: Path) -> Report:
    """Audits run `run`, whose controller drains its history to `run_dir`."""
    findings = Findings()
    store = _look(connection, run)
    replay = Replay(findings)
    file, last = run_dir / "history.jsonl", store.last_event
    on_disk = last_drained_id(file)
    # Read in this order: what a living controller drains meanwhile is of a store that knows it.
    if order(on_disk) > order(last_event_id(connection, run)):
        findings.add(
            "lost: the store was emptied or set back; its history ends before the one on disk, and what follows "
            "was there"
        )
        last = on_disk
    for event in read_history(connection, run, file, last):
        replay.apply(event)
    _check_counters(store, replay, findings)
    _check_ids(store, replay, findings)
    _check_streams(store, findings)
    _check_batches(store, findings)
    rows = check_rows(connection, run, store.position.next_gid, sorted(store.batches), findings)
    generating = sum(not owner.startswith("~") for owner in store.owners.values())
    states = [group.state for group in store.live.values()]
    live = {
        "queued": states.count("admitted") - generating,
        "generating": generating,
        "committed": states.count("committed"),
        "sealed": states.count("sealed"),
    }
    tokens, num_undone = replay.token_balance(), len(replay.in_state("undone"))
    return Report(run, store.position, live, num_undone, replay.num_events, tokens, rows, findings.problems())


def _look(connection: Connection, run: str) -> _Store:
    answer = scripts.check(connection.script("audit", scripts.ledger_keys(run), []), run)
    fields, last_event, prompts, trajectories, delivered, pending, strangers, groups, batches = answer.values
    return _Store(
        decode_position(dict(zip(fields[::2], fields[1::2], strict=True))),
        last_event.decode(),
        _entries(prompts),
        _entries(trajectories),
        delivered.decode(),
        {entry.decode(): consumer.decode() for entry, consumer, _, _ in pending},
        tuple(name.decode() for name in strangers),
        {int(gid): _Live(*(value.decode() for value in values)) for gid, *values in groups},
        {step: (tuple(map(int, gids.split())), trained == b"1") for step, gids, trained in batches},
    )


def _entries(found: list[Any]) -> dict[str, int]:
    return {entry.decode(): int(gid) for entry, gid in found}


def _check_counters(store: _Store, replay: Replay, findings: Findings) -> None:
    """admitted = trained + dropped + live, and each of them as the history counts."""
    position, dropped = store.position, replay.dropped()
    total = position.trained + position.num_dropped + len(store.live)
    if position.admitted != total:
        parts = f"{position.trained} trained + {position.num_dropped} dropped + {len(store.live)} live"
        findings.add(f"the ledger does not balance: {position.admitted} admitted, but {parts} = {total}")
    counted = {
        "admitted": position.admitted,
        "trained": position.trained,
        **{f"dropped as {reason}": count for reason, count in position.dropped.items()},
    }
    known = {
        "admitted": len(replay.groups) - len(replay.in_state("undone")),
        "trained": len(replay.in_state("trained")),
    }
    known |= {f"dropped as {reason}": count for reason, count in dropped.items()}
    for what in sorted({*counted, *known}):
        if counted.get(what, 0) != known.get(what, 0):
            findings.add(f"the ledger counts {counted.get(what, 0)} groups {what}, the history {known.get(what, 0)}")


def _check_ids(store: _Store, replay: Replay, findings: Findings) -> None:
    """Every gid is exactly one of trained, dropped, live, undone; and live are the same ones in both accounts, in the
    same state.
    """
    position, live = store.position, set(replay.in_state(*LIVE))
    findings.all_of("lost: live in the history, gone from the ledger", sorted(live - set(store.live)))
    for gid in sorted(set(store.live) - live):
        state = replay.groups[gid].state if gid in replay.groups else "never admitted"
        findings.add(f"live in the ledger although {state}", gid)
    for gid in sorted(live & set(store.live)):
        if store.live[gid].state != replay.groups[gid].state:
            findings.add(
                f"{store.live[gid].state or 'without a state'} in the ledger, {replay.groups[gid].state} in the "
                "history",
                gid,
            )
    findings.all_of(
        "never admitted, though below the next gid",
        sorted(set(range(position.lineage_gid, position.next_gid)) - set(replay.groups)),
    )
    findings.all_of(
        "admitted, though not below the next gid",
        [gid for gid in replay.in_state(*LIVE, "trained", "dropped") if gid >= position.next_gid],
    )


def _check_streams(store: _Store, findings: Findings) -> None:
    """XLEN(prompts) = groups admitted, XLEN(trajectories) = committed + sealed, by entry; every entry handed out has an
    owner who may hold it.
    """
    prompts = {group.entry: gid for gid, group in store.live.items() if group.state == "admitted"}
    trajectories = {
        group.trajectory: gid for gid, group in store.live.items() if group.state in ("committed", "sealed")
    }
    for name, ours, theirs in (("prompts", prompts, store.prompts), ("trajectories", trajectories, store.trajectories)):
        findings.all_of(
            f"without their entry in {name}", sorted(gid for entry, gid in ours.items() if theirs.get(entry) != gid)
        )
        findings.all_of(
            f"entries of {name} that belong to no group there",
            [f"{gid} ({entry})" for entry, gid in theirs.items() if ours.get(entry) != gid],
        )
    handed_out = [entry for entry in store.prompts if order(entry) <= order(store.last_delivered)]
    findings.all_of(
        "handed out and in nobody's hands", [store.prompts[entry] for entry in handed_out if entry not in store.owners]
    )
    findings.all_of(
        "pending although their entry is gone",
        [f"{entry} ({owner})" for entry, owner in store.owners.items() if entry not in store.prompts],
    )
    findings.all_of("hold groups without an attestation", store.strangers)


def _check_batches(store: _Store, findings: Findings) -> None:
    """Sealed groups are those of the next step's batch; the batches before it are trained, and kept until they are
    freed.
    """
    step = store.position.step
    sealed, _ = store.batches.get(step, ((), False))
    findings.all_of(
        "sealed into no batch",
        sorted(gid for gid, group in store.live.items() if group.state == "sealed" and gid not in sealed),
    )
    findings.all_of(
        f"in batch {step} but not sealed",
        [gid for gid in sealed if gid not in store.live or store.live[gid].state != "sealed"],
    )
    kept = range(store.position.freed_step, step)
    findings.all_of(
        "batches that are neither kept nor freed", [number for number in kept if number not in store.batches]
    )
    findings.all_of(
        "batches not marked as trained",
        [number for number in kept if number in store.batches and not store.batches[number][1]],
    )
