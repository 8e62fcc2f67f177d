"""Counts what a run did, from what its processes left behind: the trainers' journals, the ledger's history, the store.

Lost: a gid that was admitted and is neither trained, nor dropped, nor live. Trained twice: a trajectory in two steps,
or a step whose weights are not made of the step before. Unattested: a token whose (version, digest) the store does not
hold as attested, or whose digest is not that of the weights after the step that was published. It believes nobody's
counters alone: it goes down to the ids.
"""

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import SecretStr

from rolecall.checkpoint.manifest import RunCheckpoints
from rolecall.checkpoint.storage import open_storage
from rolecall.errors import RowMissingError, StoreUnavailableError
from rolecall.settings import RunSettings, load_settings, store_url_file
from rolecall.store.audit import audit
from rolecall.store.connection import Connection, connect
from rolecall.store.embedded import EmbeddedStore
from rolecall.store.history import last_event_id, read_history
from rolecall.store.ledger import Ledger
from rolecall.store.rows import Rows
from rolecall.training.serving.applied import KEPT, Applied
from tests import attestation

_SAME = ("digest", "rows", "tokens", "bits", "before", "after", "spans")
"""What every application of a step must have in common."""


@dataclass
class Verdict:
    """What was found; `problems` is empty when every promise held."""

    problems: list[str] = field(default_factory=list)
    figures: Counter[str] = field(default_factory=Counter)
    weights: dict[int, str] = field(default_factory=dict)
    """Digest of the actor's weights after so many steps."""

    def require(self, true: bool, problem: str) -> None:
        """Notes `problem` unless `true`; the count of it beyond the first hundred."""
        if not true:
            self.figures["problems"] += 1
            if self.figures["problems"] <= 100:
                self.problems.append(problem)


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """Whole lines of a JSONL file; a last one that a kill cut short is nobody's."""
    if path.is_file():
        for line in path.read_bytes().split(b"\n")[:-1]:
            if line.startswith(b"{") and line.endswith(b"}"):
                yield json.loads(line)


def check_journal(path: Path, verdict: Verdict) -> dict[int, dict[str, Any]]:
    """Applied steps of one trainer, by step: one chain, and every replay of a step the same as its first
    application.
    """
    name = path.stem
    steps: dict[int, dict[str, Any]] = {}
    weights: dict[int, str] = {}
    owners: dict[str, int] = {}
    for line in lines_of(path):
        match line["event"]:
            case "started":
                weights.setdefault(0, line["weights"])
                verdict.require(weights[0] == line["weights"], f"{name}: started from other weights than before")
            case "applied":
                step = line["step"]
                verdict.figures[f"{name} applications"] += 1
                known = steps.setdefault(step, line)
                different = [key for key in _SAME if known[key] != line[key]]
                verdict.require(
                    not different, f"{name}: step {step} was applied again with another {', '.join(different)}"
                )
                expected = weights.setdefault(step, line["before"])
                verdict.require(
                    expected == line["before"],
                    f"{name}: step {step} was applied to other weights than those after step {step - 1}",
                )
                weights.setdefault(step + 1, line["after"])
                verdict.figures[f"{name} tokens of doubtful weights"] += len(line["violations"])
                verdict.require(not line["violations"], f"{name}: step {step} trained {line['violations'][:2]}")
                for row in line["rows"]:
                    verdict.require(
                        owners.setdefault(row, step) == step,
                        f"{name}: trajectory {row} was trained in steps {owners[row]} and {step}",
                    )
                verdict.require(
                    len(set(line["rows"])) == len(line["rows"]), f"{name}: step {step} names a trajectory twice"
                )
            case "loaded" | "saved" | "published":
                step = line["step"]
                verdict.require(
                    weights.get(step) == line["weights"],
                    f"{name}: {line['event']} weights that are not those after {step} steps",
                )
    verdict.require(
        sorted(steps) == list(range(len(steps))), f"{name}: applied steps are {sorted(steps)[:5]}..., not one chain"
    )
    verdict.figures[f"{name} replays"] = verdict.figures[f"{name} applications"] - len(steps)
    if name == "actor":
        verdict.weights = weights
    return steps


def check_journals(run_dir: Path) -> Verdict:
    """What can be said while the run goes on."""
    verdict = Verdict()
    for path in sorted((run_dir / "journal").glob("*.jsonl")):
        check_journal(path, verdict)
    return verdict


def check_live(run_dir: Path) -> Verdict:
    """Where the tokens of everything come from that is committed at this instant. Nothing is said while the store is
    away.
    """
    verdict = Verdict()
    settings = load_settings(run_dir / "config.yaml")
    # away, or a group was dropped or freed between two reads
    with suppress(OSError, StoreUnavailableError, RowMissingError):
        url = SecretStr(store_url_file(run_dir, "controller").read_text().strip())
        connection = connect(settings.store.model_copy(update={"url": url}))
        try:
            run = settings.run.name
            trajectories = attestation.read_trajectories(
                Ledger(connection, run), Rows(connection, run, settings.store.num_shards)
            )
            found = attestation.violations(trajectories, attestation.read_attested(connection, run))
            verdict.require(not found, f"tokens of unattested weights: {found[:3]}")
            verdict.figures["trajectories judged live"] = len(trajectories)
        finally:
            connection.close()
    return verdict


def _check_checkpoint(run_dir: Path, settings: RunSettings, step: int, verdict: Verdict) -> None:
    """The last checkpoint is of the last step, and every trainer's records in it name the same batches, one for each
    step.
    """
    newest = RunCheckpoints(open_storage(settings.run.checkpoints), settings.run.keep_checkpoints).latest()
    verdict.require(newest is not None, "there is no checkpoint")
    if newest is None:
        return
    applied = {
        name: Applied.read(newest.storage.at(name)) for name in ("actor", *(("critic",) if settings.critic else ()))
    }
    digests = {name: {each: record.digest for each, record in one.records.items()} for name, one in applied.items()}
    for name, one in applied.items():
        verdict.require(
            one.step == step, f"the last checkpoint holds {name} at step {one.step}, the run ended at {step}"
        )
        verdict.require(
            sorted(one.records) == list(range(max(0, step - KEPT), step)),
            f"{name}'s records are of steps {sorted(one.records)}",
        )
        verdict.require(digests[name] == digests["actor"], f"actor and {name} were trained on different batches")
    verdict.figures["steps in both trainers' records"] = len(digests["actor"])


def check_run(run_dir: Path) -> Verdict:
    """Everything, once the run has ended or crashed: starts its store again for as long as it reads."""
    settings = load_settings(run_dir / "config.yaml")
    store = EmbeddedStore(run_dir / "store", settings.run.name, settings.store.max_bytes, settings.store.binary)
    url = store.start()
    try:
        section = settings.store.model_copy(update={"url": SecretStr(url)})
        connection = connect(section)
        try:
            return _check(run_dir, settings, connection)
        finally:
            connection.close()
    finally:
        store.stop()


def _check(run_dir: Path, settings: RunSettings, connection: Connection) -> Verdict:
    verdict, run = Verdict(), settings.run.name
    snapshot = Ledger(connection, run).snapshot()
    steps = {path.stem: check_journal(path, verdict) for path in sorted((run_dir / "journal").glob("*.jsonl"))}
    history = _history(run_dir, connection, run)
    _check_ledger(verdict, snapshot, history)
    trained = {gid for gid, events in history.items() if "trained" in events}
    for name, applied in steps.items():
        # A trainer may have applied the one step that the run was stopped in.
        for step in range(snapshot.position.step):
            verdict.require(step in applied, f"{name}: step {step} is counted as trained and was never applied")
        of_rows = {
            int(row.partition("/")[0])
            for step, line in applied.items()
            if step < snapshot.position.step
            for row in line["rows"]
        }
        verdict.require(
            of_rows == trained, f"{name}: trained gids differ from the ledger's by {sorted(of_rows ^ trained)[:10]}"
        )
    told = {line["step"] for line in lines_of(run_dir / "metrics.jsonl") if "rollout/replicas" in line}
    for step in range(1, snapshot.position.reported_step + 1):
        verdict.require(step in told, f"step {step} has no line in metrics.jsonl")
    verdict.figures["steps"] = snapshot.position.step
    _check_checkpoint(run_dir, settings, snapshot.position.step, verdict)
    for problem in audit(connection, run, run_dir).problems:
        verdict.require(False, f"audit: {problem}")
    _check_spans(verdict, steps.get("actor", {}), _versions(connection, run), settings.algorithm.max_staleness)
    return verdict


def _history(run_dir: Path, connection: Connection, run: str) -> dict[int, Counter[str]]:
    """Events by gid: those drained to the file and those still in the stream, each once."""
    history: dict[int, Counter[str]] = {}
    for event in read_history(connection, run, run_dir / "history.jsonl", last_event_id(connection, run)):
        if event.gid is not None:
            history.setdefault(event.gid, Counter())[event.event] += 1
    return history


def _check_ledger(verdict: Verdict, snapshot: Any, history: Mapping[int, Counter[str]]) -> None:
    counts, position = snapshot.counts, snapshot.position
    dropped = sum(counts.dropped.values())
    verdict.require(counts.admitted == counts.trained + dropped + counts.live, f"the ledger does not balance: {counts}")
    live = {group.gid for group in snapshot.groups}
    lost, twice = [], []
    for gid in range(position.next_gid):
        events = history.get(gid, Counter())
        ends = events["trained"] + events["dropped"] + (gid in live)
        lost += [gid] if not ends else []
        twice += [gid] if ends > 1 or events["committed"] > 1 or events["sealed"] > 1 else []
        verdict.require(events["admitted"] == 1, f"group {gid} was admitted {events['admitted']} times")
    verdict.require(not lost, f"lost: {len(lost)} groups, {lost[:10]}")
    verdict.require(
        not twice,
        f"more than one end or commit: {len(twice)} groups, {twice[:10]}: {[dict(history[gid]) for gid in twice[:3]]}",
    )
    verdict.figures.update(
        {
            "admitted": counts.admitted,
            "trained": counts.trained,
            "dropped": dropped,
            "live": counts.live,
            "lost": len(lost),
            "trained twice": len(twice),
        }
    )


def _versions(connection: Connection, run: str) -> dict[int, tuple[int, str]]:
    found = connection.command("HGETALL", f"{{rl:{run}}}:versions")
    return {int(version): (int(value.split()[0]), value.split()[1].decode()) for version, value in found.items()}


def _check_spans(
    verdict: Verdict,
    steps: Mapping[int, Mapping[str, Any]],
    versions: Mapping[int, tuple[int, str]],
    max_staleness: int,
) -> None:
    """No token of unattested weights, a version is one digest, and nothing is staler than allowed."""
    for step, line in steps.items():
        for version, digest in line["spans"]:
            verdict.figures["spans"] += 1
            published, attested = versions.get(version, (-1, ""))
            if attested != digest or verdict.weights.get(published) != digest:
                verdict.figures["unattested"] += 1
                verdict.require(
                    False,
                    f"step {step} trained tokens of version {version} ({digest[:8]}); attested is step {published} "
                    f"({attested[:8]})",
                )
            verdict.require(
                step - published <= max_staleness,
                f"step {step} trained tokens of step {published}: staler than {max_staleness}",
            )
