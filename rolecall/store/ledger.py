"""The controller's side of the ledger: admit, read what was committed, seal, count, publish, expel.

One controller per run: `lock` gives it a fencing number, which every script carries; an older controller gets
FencedError from each. Every change is one script, safe to repeat. The rules are in the scripts, the keys at the top of
`scripts/common.lua`.

Liveness of the other controller is judged on our own clock: its heartbeat is a counter in the store, and whoever wants
the run watches that counter for a whole lease on the monotonic clock. The server's clock decides nothing, so neither a
clock jump nor a stopped server expires a lease; the price is that taking over from a controller that died costs one
lease of waiting (none after `unlock`).
"""

import secrets
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rolecall.disk import append_lines
from rolecall.errors import RunLockedError
from rolecall.store import history, scripts
from rolecall.store.connection import MAX_BLOCK_S, Connection
from rolecall.store.fenced import FencedScripts
from rolecall.store.position import (
    NOBODY,
    Garbage,
    GroupState,
    Overdelivered,
    PendingEntry,
    RunPosition,
    Snapshot,
    SuccessRate,
    decode_snapshot,
    rows_of_garbage,
)
from rolecall.store.prompts import MAX_ERROR_CHARS
from rolecall.store.rows import Rows
from rolecall.v1.controller_pb2 import LedgerCounts
from rolecall.v1.training_pb2 import TrainResult
from rolecall.v1.trajectory_pb2 import CommittedGroup, Metric, PromptGroup, TrainBatch

PENDING_COUNT = 10_000
"""Pending entries listed at a time."""
DRAIN_COUNT = 1000
"""Stream entries moved to a file at a time."""


@dataclass(frozen=True)
class Admission:
    """An admission of a group, as `Ledger.admit` takes it."""

    group: PromptGroup
    cursor: bytes
    traceparent: str = ""

    @property
    def arguments(self) -> tuple[str | bytes | int, ...]:
        """The arguments of the script, after ctl."""
        prompt = self.group.prompt
        message = self.group.SerializeToString()
        return self.group.gid, message, self.cursor, self.traceparent, prompt.uid, prompt.environment


class Ledger:
    """The ledger of run `run`. Threads may share it after `lock`.

    Calls that return a bool say whether they had an effect or found it done before: by an earlier call, or by this very
    one when its first answer was lost and it was sent again. So false is never an error.
    """

    def __init__(self, connection: Connection, run: str) -> None:
        self._connection = connection
        self._run = run
        self._prefix = f"{{rl:{run}}}:"
        self._scripts = FencedScripts(connection, run)

    @property
    def fenced(self) -> FencedScripts:
        """The scripts, which know whether the store lost what it had acknowledged."""
        return self._scripts

    @property
    def ctl(self) -> int:
        """Our fencing number; 0 before `lock`: then everything but reading is refused."""
        return self._scripts.ctl

    def lock(self, lease_s: float, known_ctl: int = 0) -> int:
        """Takes the run and returns our fencing number, above `known_ctl`, one that there was. RunLockedError while
        another controller is alive.

        Blocks up to `lease_s` to see that no other controller's heartbeat moves, unless none holds the run. A look that
        came late, because the store was away or this process stood still, begins the lease anew: nobody could beat, or
        be heard, meanwhile.
        """
        seen, looked_at = self._holder(), time.monotonic()
        deadline = looked_at + (lease_s if seen[2] else 0.0)
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, lease_s / 10))
            if self._holder() != seen:
                raise RunLockedError(f"run {self._run}: another controller holds it and is alive; stop that one first")
            last, looked_at = looked_at, time.monotonic()
            if looked_at - last > lease_s / 2:
                deadline = looked_at + lease_s
        return self._scripts.take(seen[0], seen[1], secrets.token_hex(16), known_ctl)

    def unlock(self) -> None:
        """Gives the run back at a clean end. The fencing number stays ours until someone locks."""
        self._call("unlock")

    def pause(self, paused: bool) -> None:
        """Remembers whether nothing is to be admitted, for the controller that comes next."""
        self._call("pause", int(paused))

    def evaluated(self, step: int) -> None:
        """Remembers that the evaluation of the weights after `step` steps was recorded, for the controller that comes
        next.
        """
        self._call("evaluated", step)

    def reported(self, step: int) -> None:
        """Remembers that the first `step` steps were told, for the controller that comes next."""
        self._call("reported", step)

    def beat(self) -> None:
        """Our heartbeat; at least every lease_s / 3."""
        self._call("beat")

    def admit(self, group: PromptGroup, cursor: bytes, traceparent: str = "") -> bool:
        """Admits `group`, whose gid must be the next; `cursor` is the data position after it. False when that gid was
        admitted before.

        OutOfOrderError for a later gid. StoreFullError is back-pressure: admit again later.
        """
        return self._call("admit", *Admission(group, cursor, traceparent).arguments).fresh

    def admit_all(self, admissions: Sequence[Admission]) -> None:
        """Admits each in order, as `admit`, in two round trips. When one is refused, those before it stay admitted; the
        same call may be made again.
        """
        self._scripts.call_many("admit", [item.arguments for item in admissions])

    def read_committed(self, position: str, count: int, block_s: float) -> list[tuple[str, CommittedGroup]]:
        """Committed groups after `position` ("0": all that are committed or sealed), at most `count`, as (position,
        group). Blocks up to `block_s` for one.
        """
        stream, deadline = f"{self._prefix}trajectories", time.monotonic() + block_s
        while True:
            left_ms = int(min(deadline - time.monotonic(), MAX_BLOCK_S) * 1000)
            block = ("BLOCK", left_ms) if left_ms > 0 else ()
            reply = self._connection.command("XREAD", "COUNT", count, *block, "STREAMS", stream, position)
            if reply:
                return [
                    (entry.decode(), CommittedGroup.FromString(fields[b"group"])) for entry, fields in _entries(reply)
                ]
            if not block:
                return []

    def queued(self) -> list[PromptGroup]:
        """Groups that are admitted and not committed, in order of admission; admission bounds them."""
        entries = self._connection.command("XRANGE", f"{self._prefix}prompts", "-", "+")
        return [PromptGroup.FromString(fields[b"group"]) for _, fields in entries]

    def drop(self, gid: int, reason: str, error: str = "") -> bool:
        """Makes group `gid` terminal untrained, counted under `reason`; an `error` text makes it a dead letter, which
        also says what its last worker reported. False when it was terminal before.

        ConflictError for a sealed group, NotFoundError for one never admitted.
        """
        return self._call("drop", gid, reason, error[:MAX_ERROR_CHARS]).fresh

    def begin_batch(self, step: int, gids: Sequence[int]) -> None:
        """Remembers the groups that trainers are asked about for the batch of `step`, before it is sealed.
        OutOfOrderError for another step.
        """
        self._call("begin_batch", step, *gids)

    def begun(self, step: int) -> list[int]:
        """The groups that trainers were asked about for the batch of `step`; empty when they were not."""
        return list(map(int, (self._connection.command("HGET", f"{self._prefix}batch:{step}", "begun") or b"").split()))

    def seal(self, batch: TrainBatch) -> bool:
        """Fixes the batch of the next step: ids, order, digest. False when it was sealed with the same digest before.

        OutOfOrderError for another step, BatchMismatchError for another digest, ConflictError for a group that is not
        committed.
        """
        groups = [part for pair in zip(batch.gids, history.sealed_tokens(batch), strict=True) for part in pair]
        return self._call("seal", batch.step, batch.SerializeToString(), batch.digest, *groups).fresh

    def sealed(self, step: int) -> TrainBatch | None:
        """The sealed batch of `step`, trained or not; None when there is none or it was freed."""
        data = self._connection.command("HGET", f"{self._prefix}batch:{step}", "group")
        return None if data is None else TrainBatch.FromString(data)

    def measured(self, step: int, numbers: Sequence[Metric]) -> None:
        """Puts `numbers` into the record of the sealed batch of `step`, for whoever reports it. NotFoundError."""
        self._call("measured", step, TrainResult(metrics=numbers).SerializeToString())

    def commit_step(self, step: int, results: Sequence[TrainResult], algorithm_state: bytes = b"") -> bool:
        """Counts the sealed batch of `step` as trained: step + 1, and from there `algorithm_state`. `results` go into
        its record. False when it was committed before: then nothing changes.

        BatchMismatchError when a trainer's result is of another batch than the sealed one.
        """
        return self._call(
            "commit_step",
            step,
            algorithm_state,
            *(part for result in results for part in (result.digest, result.SerializeToString())),
        ).fresh

    def results(self, step: int) -> list[TrainResult]:
        """Returns what commit_step recorded for `step`, in its order; empty when it is not trained or was freed."""
        fields = self._connection.command("HGETALL", f"{self._prefix}batch:{step}")
        found = sorted((int(name[7:]), data) for name, data in fields.items() if name.startswith(b"result:"))
        return [TrainResult.FromString(data) for _, data in found]

    def numbers(self, step: int) -> list[Metric] | None:
        """Returns all numbers in the record of `step`, its trainers' among them; None when it was not trained or was
        freed.
        """
        own, is_trained = self._connection.command("HMGET", f"{self._prefix}batch:{step}", "numbers", "trained")
        if own is None or is_trained is None:
            return None
        return [metric for result in (TrainResult.FromString(own), *self.results(step)) for metric in result.metrics]

    def free_rows(self, upto_step: int) -> Garbage:
        """Gives up the batches of steps below `upto_step`, which every trainer's committed checkpoint must cover.

        Returns all rows nobody reads any more, those of dropped groups and of earlier calls included, until `forget`
        confirms that they were deleted.
        """
        notes = self._call("free_rows", upto_step).values[0]
        return rows_of_garbage(dict(zip(notes[::2], notes[1::2], strict=True)))

    def forget(self, garbage: Garbage) -> None:
        """Confirms that the rows of `garbage` are deleted."""
        for start in range(0, len(garbage.notes), 1000):
            self._call("forget", "garbage", *garbage.notes[start : start + 1000])

    def discard(self, rows: Rows, garbage: Garbage) -> None:
        """Deletes rows and forgets them. A crash in between leaves nothing behind: the next sweep goes on."""
        rows.delete(garbage.rows)
        self.forget(garbage)

    def sweep(self, rows: Rows, upto_step: int) -> int:
        """free_rows, then discard: returns how many rows were deleted."""
        garbage = self.free_rows(upto_step)
        self.discard(rows, garbage)
        return len(garbage.rows)

    def start_lineage(self, point: RunPosition) -> int:
        """Sets the run back to `point`, a checkpoint that is not the store's own past: empty keys, counters as of then.
        Returns the first gid to admit.

        `point.lineage` is the new lineage's number, above the store's; repeated: nothing happens. Gids, versions and
        epochs do not go back. The caller admits the checkpoint's untrained prompts again; after a crash,
        `position().next_gid - lineage_gid` of them were.
        """
        dropped = [text for reason, count in point.dropped.items() for text in (f"dropped:{reason}", str(count))]
        version = max(point.policy_version, point.begun_version)
        state: list[str | bytes | int] = [
            point.step,
            point.next_gid,
            version,
            point.epoch,
            point.cursor,
            point.trained,
            point.algorithm_state,
            point.evaluated_step,
            *dropped,
        ]
        return int(self._call("start_lineage", point.lineage, *state).values[0])

    def drain(self, stream: Literal["history", "dead"], path: Path) -> int:
        """Moves a stream to the JSONL file `path`, then deletes what was moved; returns how many lines. The file is
        synced before anything is deleted.

        `rolecall/store/history.py` says what a line holds. A crash in between writes lines again: their `id` tells.
        DiskFullError and StorageUnavailableError leave the file and the stream as they were.
        """
        total = 0
        while True:
            entries = self._connection.command("XRANGE", f"{self._prefix}{stream}", "-", "+", "COUNT", DRAIN_COUNT)
            if not entries:
                return total
            append_lines(path, [history.to_line(entry.decode(), fields) for entry, fields in entries], sync=True)
            self._call("forget", stream, *(entry for entry, _ in entries))
            total += len(entries)
            if len(entries) < DRAIN_COUNT:
                return total

    def next_epoch(self) -> int:
        """A new epoch of the weight channel, higher than any before."""
        return int(self._call("next_epoch").values[0])

    def begin_publish(self, policy_version: int, step: int) -> bool:
        """Revokes every attestation: from here nobody claims until `attest`. StaleVersionError unless the version is
        above every one begun before.

        False when exactly this publish was begun before and not attested yet.
        """
        return self._call("begin_publish", policy_version, step).fresh

    def attest(self, policy_version: int, step: int, digest: str, workers: Sequence[str]) -> None:
        """The digests were equal: the consumers `workers` hold the version last begun and may claim. More may follow
        later under the same version.
        """
        self._call("attest", policy_version, step, digest, *workers)

    def expel(
        self, consumer: str, max_deliveries: int = 0, excused: bool = False, error: str = ""
    ) -> list[Overdelivered]:
        """A worker is dead or left behind: revokes its attestation and hands its entries back. Returns the groups
        delivered too often, to be dropped.

        Entries delivered `max_deliveries` times (0: no limit) are held back from everyone. `excused`: these deliveries
        do not count (a failed publish). `error`: what happened; it stays with the groups as their last error.
        """
        return _overdelivered(
            self._call("expel", consumer, max_deliveries, int(excused), error[:MAX_ERROR_CHARS]).values[1]
        )

    def reap(self, entries: Sequence[PendingEntry], max_deliveries: int = 0, error: str = "") -> list[Overdelivered]:
        """Takes unrenewed entries from workers that live, each unless it was given back, claimed anew or renewed since.
        Otherwise as `expel`.

        Returns every group that was delivered too often and waits to be dropped: after a restart, also those that the
        last controller did not get to.
        """
        held = (
            text
            for entry in entries
            for text in (entry.consumer, entry.entry_id, entry.delivery, round(entry.renewed_at_s * 1000))
        )
        return _overdelivered(self._call("reap", max_deliveries, error[:MAX_ERROR_CHARS], *held).values[0])

    def note_scored(self, rewards: Sequence[tuple[int, float]]) -> None:
        """Adds to the history that groups were scored: (gid, mean reward) of each, in two round trips. A lost answer
        may note one twice.
        """
        self._scripts.call_many("note", [(str(gid), "scored", "reward", str(reward)) for gid, reward in rewards])

    def rate(self, uid: str, rate: SuccessRate) -> bool:
        """Keeps the success rate of prompt `uid`, which outlives controllers and lineages. False when a rate as new is
        kept already.
        """
        return self._call("rate", uid, rate.gid, repr(rate.rate)).fresh

    def rates(self) -> dict[str, SuccessRate]:
        """The success rates kept, by prompt uid."""
        fields = self._connection.command("HGETALL", f"{self._prefix}rates")
        found = ((uid.decode(), text.split(b" ")) for uid, text in fields.items())
        return {uid: SuccessRate(int(gid), float(rate)) for uid, (gid, rate) in found}

    def step_of_version(self) -> dict[int, int]:
        """Steps applied in the weights of each attested version."""
        fields = self._connection.command("HGETALL", f"{self._prefix}versions")
        return {int(version): int(text.split(b" ")[0]) for version, text in fields.items()}

    def pending(self) -> list[PendingEntry]:
        """Entries in workers' hands, oldest first: all of them, PENDING_COUNT at a time."""
        entries: list[PendingEntry] = []
        start = "-"
        while True:
            now_ms, found = self._call("pending", start, PENDING_COUNT).values
            for entry, consumer, idle_ms, count in found:
                if not consumer.startswith(NOBODY):
                    entries.append(PendingEntry(entry.decode(), consumer.decode(), (now_ms - idle_ms) / 1000, count))
            if len(found) < PENDING_COUNT:
                return entries
            start = f"({found[-1][0].decode()}"

    def position(self) -> RunPosition:
        """Returns the position of the run."""
        return self._snapshot("").position

    def counts(self) -> LedgerCounts:
        """The balance: admitted = trained + dropped + live. For people: not fenced."""
        return decode_snapshot(self._scripts.look("ledger", "").values).counts

    def live(self) -> dict[int, GroupState]:
        """The live groups and where each is, in order of admission."""
        return {group.gid: group.state for group in self.snapshot().groups}

    def snapshot(self) -> Snapshot:
        """Position, balance and live groups at one instant."""
        return self._snapshot("groups")

    def _snapshot(self, what: str) -> Snapshot:
        return decode_snapshot(self._call("ledger", what).values)

    def _holder(self) -> tuple[str, str, bytes]:
        ctl, beat, holder = self._connection.command("HMGET", f"{self._prefix}run", "ctl", "beat", "holder")
        return (ctl or b"0").decode(), (beat or b"0").decode(), holder or b""

    def _call(self, script: str, *args: str | bytes | int) -> scripts.Answer:
        return self._scripts.call(script, *args)


def _overdelivered(found: Sequence[tuple[bytes, bytes]]) -> list[Overdelivered]:
    return [Overdelivered(int(gid), error.decode(errors="replace")) for gid, error in found]


def _entries(reply: Any) -> list[tuple[bytes, dict[bytes, bytes]]]:
    return [entry for _, entries in reply for entry in entries]
