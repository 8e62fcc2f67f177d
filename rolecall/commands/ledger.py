"""`rolecall ledger`: prints and checks the balance of a run, live or after a crash, or the history of one group.

Reads the store that the run uses: an external one, the embedded one of a living run, or, when that is gone too, one it
starts itself on the run's directory for as long as it reads. What is checked is in `rolecall/store/audit.py`.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from pydantic import SecretStr

from rolecall.commands.ledger_story import own_events, story
from rolecall.errors import ConfigError, NotFoundError, RunLockedError, StoreUnavailableError
from rolecall.settings import RunSettings, settings_of_run, store_url_file
from rolecall.store.audit import Report, audit
from rolecall.store.connection import Connection, connect
from rolecall.store.embedded import EmbeddedStore
from rolecall.store.history import last_drained_id, last_event_id, order, read_history
from rolecall.store.rows import Rows

LOCK_TIMEOUT_S = 2.0
"""A store whose launcher was just killed needs a moment to end."""


def ledger(run: str, id: str | None, as_json: bool, out: TextIO) -> int:
    """Audits the run that `run` names (its directory or configuration), or tells the history of `id` (a gid, or a
    trajectory's `<gid>/<i>`).

    Returns the exit code: 1 when the ledger does not balance.
    """
    settings = settings_of_run(Path(run))
    if not settings.run.dir.is_dir():
        raise ConfigError(
            f"run.dir {settings.run.dir} is not here, and the history lies in it; run this where the controller runs"
        )
    with _open_store(settings) as connection:
        if id is not None:
            _tell(settings, connection, id, as_json, out)
            return 0
        report = audit(connection, settings.run.name, settings.run.dir)
    out.write(json.dumps(_as_json(report)) + "\n" if as_json else _as_text(report))
    return 1 if report.problems else 0


@contextlib.contextmanager
def _open_store(settings: RunSettings) -> Iterator[Connection]:
    """The run's store, which ends with this block if it was started for it."""
    with contextlib.ExitStack() as opened:
        section = settings.store
        if section.url is None:
            section = section.model_copy(update={"url": SecretStr(_embedded_url(settings, opened))})
        connection = connect(section)
        opened.callback(connection.close)
        yield connection


def _embedded_url(settings: RunSettings, opened: contextlib.ExitStack) -> str:
    folder = settings.run.dir / "store"
    if not folder.is_dir():
        raise NotFoundError(
            f"{settings.run.dir} holds no store; if the run used another one, set store.url (or ROLECALL_STORE_URL)"
        )
    lock = os.open(settings.run.dir, os.O_RDONLY | os.O_DIRECTORY)
    opened.callback(os.close, lock)
    try:
        # While a launcher holds the directory, the store is its to start: one of ours in between would refuse the run's
        # passwords.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        store = EmbeddedStore(folder, settings.run.name, settings.store.max_bytes, settings.store.binary)
        opened.callback(store.stop)
        return store.start(LOCK_TIMEOUT_S)
    except (BlockingIOError, RunLockedError) as error:
        url = store_url_file(settings.run.dir, "controller")
        if not url.exists():
            raise StoreUnavailableError(
                f"the run in {settings.run.dir} is alive and its store is not up; try again in a moment"
            ) from error
        return url.read_text().strip()


def _as_json(report: Report) -> dict[str, object]:
    position = report.position
    return {
        "run": report.run,
        "balanced": not report.problems,
        "lineage": position.lineage,
        "step": position.step,
        "policy_version": position.policy_version,
        "admitted": position.admitted,
        "trained": position.trained,
        "dropped": dict(position.dropped),
        "live": dict(report.live),
        "undone": report.num_undone,
        "events": report.num_events,
        "tokens": vars(report.tokens),
        "rows": asdict(report.rows),
        "problems": list(report.problems),
    }


def _as_text(report: Report) -> str:
    position, rows, tokens = report.position, report.rows, report.tokens
    lines = [
        f"run {report.run}, lineage {position.lineage}: {position.step} steps applied, policy version "
        f"{position.policy_version}",
        "",
        f"  admitted {position.admitted:>8}",
        f"  trained  {position.trained:>8}",
        f"  dropped  {position.num_dropped:>8}  {_parts(dict(sorted(position.dropped.items())))}",
        f"  live     {report.num_live:>8}  {_parts(report.live)}",
    ]
    if report.num_undone:
        lines.append(f"  undone   {report.num_undone:>8}  by going back to a checkpoint; not in the numbers above")
    lines += [
        "",
        f"  {position.admitted} = {position.trained} + {position.num_dropped} + {report.num_live}, by name over "
        f"{report.num_events} events",
        f"  rows     {rows.needed:>8} needed, {rows.staged} staged, {rows.garbage} to be deleted",
        "",
        f"  sampled  {tokens.sampled:>8} tokens, in groups that were committed",
        f"  trained  {tokens.trained:>8}",
        f"  masked   {tokens.masked.total():>8}  {_parts(dict(sorted(tokens.masked.items())))}",
        f"  dropped  {tokens.dropped.total():>8}  {_parts(dict(sorted(tokens.dropped.items())))}",
        f"  live     {tokens.live:>8}",
        "",
    ]
    lines += [f"  {problem}" for problem in report.problems]
    lines.append("NOT BALANCED" if report.problems else "balanced")
    return "".join(line.rstrip() + "\n" for line in lines)


def _parts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in counts.items() if count)


def _tell(settings: RunSettings, connection: Connection, id: str, as_json: bool, out: TextIO) -> None:
    gid, _, index = id.partition("/")
    if not gid.isdecimal() or (index and not index.isdecimal()):
        raise ConfigError(f"--id {id} is neither a group's number (12) nor a trajectory's (12/3)")
    run = settings.run.name
    file = settings.run.dir / "history.jsonl"
    last = max(last_drained_id(file), last_event_id(connection, run), key=order)  # the file's where the store was lost
    events = own_events(read_history(connection, run, file, last), int(gid))
    if not events:
        raise NotFoundError(f"run {run} admitted no group {gid}")
    rows = Rows(connection, run, settings.store.num_shards)
    out.write("".join(json.dumps(asdict(event)) + "\n" for event in events) if as_json else story(id, events, rows))
