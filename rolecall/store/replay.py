"""The history played back: where each group stands according to it, and every step of it that the protocol does not
allow.

Owns no store: it is fed events and says what they add up to. Of sampled tokens there are two accounts, by two
processes: the rollout says with a commit what it sampled, how much of that is in the rows and why the rest is not; the
controller says with a seal what it found in those rows, and how much of it is trained. What was sampled for attempts
that never committed nobody counts: it never became part of the run. A new lineage undoes what came after its
checkpoint: batches from its step on, and the drops that the checkpoint had not counted (each reason's first drops are
those it had).
"""

import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from rolecall.store.history import ROWS, SAMPLED, TRAINED, Event, decode_tokens

LIVE = ("admitted", "committed", "sealed")
LEFT_OUT = "truncated"
"""Why tokens of a trained row are not trained: algorithm.shaping masks responses that were cut off."""
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
class TokenBalance:
    """Sums over groups: sampled = trained + masked + dropped + live."""

    sampled: int = 0
    trained: int = 0
    masked: Counter[str] = field(default_factory=Counter)
    """Sampled for groups that were trained, and not trained, by why."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Sampled for groups that were dropped, by why."""
    live: int = 0
    """Sampled for groups that are neither yet."""

    def add(self, group: "ReplayedTokens", state: str, reason: str) -> None:
        """Adds a group in its `state`, unless nobody counted its tokens; `reason`: why it was dropped."""
        if not group.committed:
            return
        self.sampled += group.sampled
        if state == "trained":
            self.trained += group.trained
            self.masked.update(group.masked)
        elif state == "dropped":
            self.dropped[reason] += group.sampled
        else:
            self.live += group.sampled

    @property
    def is_even(self) -> bool:
        """Whether it adds up."""
        return self.sampled == self.trained + self.masked.total() + self.dropped.total() + self.live


@dataclass(frozen=True)
class ReplayedTokens:
    """The tokens of one group, as its events say."""

    committed: Counter[str]
    sealed: Counter[str]

    @property
    def sampled(self) -> int:
        """Tokens that were sampled for what was committed."""
        return self.committed[SAMPLED]

    @property
    def trained(self) -> int:
        """Tokens that were trained; where no seal says it, all of the rows."""
        return self.sealed[TRAINED] if self.sealed else self.committed[ROWS]

    @property
    def masked(self) -> Counter[str]:
        """Sampled tokens that were not trained, by why."""
        return self._reasons + Counter({LEFT_OUT: self.committed[ROWS] - self.trained})

    @property
    def _reasons(self) -> Counter[str]:
        return Counter({name: count for name, count in self.committed.items() if name not in (SAMPLED, ROWS)})

    def problems(self) -> Iterable[str]:
        """Says where the two accounts do not agree."""
        if self.committed[SAMPLED] != self.committed[ROWS] + self._reasons.total():
            yield "sampled other tokens than are in its rows or masked"
        if self.committed and self.sealed and self.committed[ROWS] != self.sealed[ROWS]:
            yield "sealed with other tokens in its rows than were committed"
        if self.sealed[TRAINED] > self.sealed[ROWS]:
            yield "trained more tokens than are in its rows"


@dataclass(slots=True)
class ReplayedGroup:
    """One group as its events left it: small, for a run has millions."""

    state: str = "admitted"
    """admitted, committed, sealed, trained, dropped or undone (by a new lineage)."""
    step: int = -1
    """Batch it was sealed into."""
    reason: str = ""
    """Why it was dropped."""
    holder: str | None = None
    """Token of the claim under way."""
    tokens: tuple[str, ...] = ()
    """All tokens under which it was claimed."""
    committed: str = ""
    """The `tokens` of the event that committed it."""
    sealed: str = ""
    """The `tokens` of the event that sealed it."""

    @property
    def sampled(self) -> ReplayedTokens:
        """The tokens that were sampled for it, as both accounts say."""
        return ReplayedTokens(decode_tokens(self.committed), decode_tokens(self.sealed))


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

    def token_balance(self) -> TokenBalance:
        """The sums over all groups that no lineage set back; what of them does not add up is found."""
        balance = TokenBalance()
        for gid, group in self.groups.items():
            sampled = group.sampled
            for problem in sampled.problems():
                self._findings.add(problem, gid)
            if group.state != "undone":
                balance.add(sampled, group.state, group.reason)
        if not balance.is_even:
            self._findings.add(f"tokens do not balance: {balance}")
        return balance

    def _admit(self, gid: int) -> None:
        if gid in self.groups and self.groups[gid].state != "undone":
            self._findings.add("admitted twice", gid)
        self.groups[gid] = ReplayedGroup()

    def _change(self, gid: int, group: ReplayedGroup, event: Event) -> None:
        token = sys.intern(event.fields.get("token", ""))  # many groups have the same
        if event.event == "claimed":
            self._require(gid, group, event, "admitted")
            if token in group.tokens:
                self._findings.add("claimed twice under one token", f"{gid} ({token})")
            if group.holder is not None:
                self._findings.add("claimed while another held it", f"{gid} ({token})")
            group.tokens += (token,)
            group.holder = token
        elif event.event in ("released", "abandoned", "reaped", "expelled"):
            group.holder = None
        elif event.event == "committed":
            self._require(gid, group, event, "admitted")
            if group.holder != token:
                self._findings.add("committed by a worker that did not hold it", f"{gid} ({token})")
            group.state, group.holder = "committed", None
            group.committed = event.fields.get("tokens", "")
        elif event.event == "sealed":
            self._require(gid, group, event, "committed")
            group.state, group.step = "sealed", int(event.fields["step"])
            group.sealed = event.fields.get("tokens", "")
        elif event.event == "trained":
            self._require(gid, group, event, "sealed")
            if group.step != int(event.fields["step"]):
                self._findings.add("trained in another batch than it was sealed into", gid)
            group.state = "trained"
        elif event.event == "dropped":
            self._require(gid, group, event, "admitted", "committed")
            group.state, group.reason = "dropped", sys.intern(event.fields["reason"])
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
