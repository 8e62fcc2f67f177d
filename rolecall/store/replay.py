"""The history played back: where each group stands according to it, and every step of it that the protocol does not
allow.

Owns no store: it is fed events and says what they add up to. A new lineage undoes what came after its checkpoint:
batches from its step on, and the drops that the checkpoint had not counted (each reason's first drops are those it
had).
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from rolecall.store.history import Event

LIVE = ("admitted", "committed", "sealed")
MAX_NAMED = 50
"""Offending ids named in one problem."""


class Findings:
    """The errors that were found, by kind, with the ids they are about."""

    def __init__(self) -> None:
        self._ids: dict[str, list[str]] = {}

    def add(self, kind: str, *ids: int | str) -> None:
        """One more of `kind`; without ids the kind says all."""
        self._ids.setdefault(kind, []).extend(map(str, ids))

    def all_of(self, kind: str, ids: Iterable[int | str]) -> None:
        """Adds one kind of error for all `ids`; nothing when there are none."""
        if found := list(ids):
            self.add(kind, *found)

    def problems(self) -> tuple[str, ...]:
        """A line a kind."""
        return tuple(kind + _named(ids) for kind, ids in self._ids.items())


def _named(ids: list[str]) -> str:
    if not ids:
        return ""
    more = f" and {len(ids) - MAX_NAMED} more" if len(ids) > MAX_NAMED else ""
    return f": {', '.join(ids[:MAX_NAMED])}{more}"


@dataclass
class ReplayedGroup:
    """One group as its events left it."""

    state: str = "admitted"
    """admitted, committed, sealed, trained, dropped or undone (by a new lineage)."""
    step: int = -1
    """Batch it was sealed into."""
    reason: str = ""
    """Why it was dropped."""
    holder: str | None = None
    """Token of the claim under way."""
    tokens: set[str] = field(default_factory=set)
    """All tokens under which it was claimed."""


class Replay:
    """The groups of a history, from its first event on."""

    def __init__(self, findings: Findings) -> None:
        self.groups: dict[int, ReplayedGroup] = {}
        self.num_events = 0
        self._findings = findings
        self._dropped: list[int] = []

    def apply(self, event: Event) -> None:
        """One more event, in order."""
        self.num_events += 1
        if event.event == "lineage":
            self._undo(event)
        elif event.gid is None:
            self._findings.add("events of no group", event.id)
        elif event.event == "admitted":
            self._admit(event.gid)
        elif event.gid not in self.groups:
            self._findings.add(f"{event.event} without being admitted", event.gid)
        else:
            self._change(event.gid, self.groups[event.gid], event)

    def in_state(self, *states: str) -> list[int]:
        """Gids in one of `states`, in order."""
        return sorted(gid for gid, group in self.groups.items() if group.state in states)

    def dropped(self) -> Counter[str]:
        """Groups dropped, by reason."""
        return Counter(group.reason for group in self.groups.values() if group.state == "dropped")

    def _admit(self, gid: int) -> None:
        if gid in self.groups and self.groups[gid].state != "undone":
            self._findings.add("admitted twice", gid)
        self.groups[gid] = ReplayedGroup()

    def _change(self, gid: int, group: ReplayedGroup, event: Event) -> None:
        token = event.fields.get("token", "")
        if event.event == "claimed":
            self._require(gid, group, event, "admitted")
            if token in group.tokens:
                self._findings.add("claimed twice under one token", f"{gid} ({token})")
            if group.holder is not None:
                self._findings.add("claimed while another held it", f"{gid} ({token})")
            group.tokens.add(token)
            group.holder = token
        elif event.event in ("released", "abandoned", "reaped", "expelled"):
            group.holder = None
        elif event.event == "committed":
            self._require(gid, group, event, "admitted")
            if group.holder != token:
                self._findings.add("committed by a worker that did not hold it", f"{gid} ({token})")
            group.state, group.holder = "committed", None
        elif event.event == "sealed":
            self._require(gid, group, event, "committed")
            group.state, group.step = "sealed", int(event.fields["step"])
        elif event.event == "trained":
            self._require(gid, group, event, "sealed")
            if group.step != int(event.fields["step"]):
                self._findings.add("trained in another batch than it was sealed into", gid)
            group.state = "trained"
        elif event.event == "dropped":
            self._require(gid, group, event, "admitted", "committed")
            group.state, group.reason = "dropped", event.fields["reason"]
            self._dropped.append(gid)

    def _require(self, gid: int, group: ReplayedGroup, event: Event, *states: str) -> None:
        if group.state == event.event:
            self._findings.add(f"{event.event} twice", gid)
        elif group.state not in states:
            self._findings.add(f"{event.event} although {group.state}", gid)

    def _undo(self, event: Event) -> None:
        step, lineage = int(event.fields["step"]), event.fields["lineage"]
        counted = Counter(
            {
                name.removeprefix("dropped:"): int(count)
                for name, count in event.fields.items()
                if name.startswith("dropped:")
            }
        )
        left = counted.copy()
        kept_drops = []
        for gid in self._dropped:
            if left[self.groups[gid].reason] > 0:
                left[self.groups[gid].reason] -= 1
                kept_drops.append(gid)
        kept_trained = [gid for gid in self.in_state("trained") if self.groups[gid].step < step]
        if +left or len(kept_trained) != int(event.fields["trained"]):
            at = f"{event.fields['trained']} trained and {counted.total()} dropped"
            found = f"{len(kept_trained)} and {len(kept_drops)}"
            self._findings.add(
                f"lineage {lineage} began from a checkpoint with {at}, of which the history knows {found}"
            )
        kept = {*kept_drops, *kept_trained}
        for gid, group in self.groups.items():
            if gid not in kept:
                group.state = "undone"
        self._dropped = kept_drops
