"""The run directory: whose it is, who works in it, and what of an earlier attempt is taken away.

Owns the lock on it. The resolved configuration in it is written by `rolecall/launcher/plan.py`; all else is written by
the roles.
"""

import fcntl
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rolecall.checkpoint.storage import disk_folder
from rolecall.config_file import read_tree
from rolecall.disk import require_writable, writing
from rolecall.errors import NotFoundError, RunExistsError, RunLockedError
from rolecall.identity import newest_checkpoint, require_unchanged
from rolecall.rpc.tokens import FOLDER
from rolecall.settings import JobSection, RunSettings, SftSettings
from rolecall.shifts import FOLDER as SHIFTS
from rolecall.store.embedded import discard_store

_OF_AN_ATTEMPT = (
    "config.yaml",
    "identity.json",
    "placed.json",
    "store.json",
    "last_status.json",
    "tracker_run_id",
    "tracker_end",
    "metrics.jsonl",
    "samples.jsonl",
    "history.jsonl",
    "dead.jsonl",
    "tensorboard",
    "memory",
    "checkpoints",
)
"""Files of one attempt, beside the store and the logs, which go on. The locks of shifts stay, too: roles on other
machines may have them open.
"""


def require_folders(run: JobSection) -> None:
    """ConfigError when run.dir, or a folder of checkpoints elsewhere, could not be written. RunExistsError when run.dir
    is somebody's who runs nothing there.
    """
    require_writable(run.dir, "run.dir")
    _require_ours(run.dir)
    folder = disk_folder(run.checkpoints)
    if run.checkpoint_url is not None and folder is not None:
        require_writable(folder, "run.checkpoint_url")


def require_place(settings: RunSettings | SftSettings, *, resume: bool) -> None:
    """Refuses a place that cannot be begun in, or gone on with, before anything that takes long. Changes nothing.

    RunExistsError when run.dir, or run.checkpoint_url, holds a run and `resume` is false, or run.dir holds what no run
    made; NotFoundError when both hold none and it is true, or what they hold is of `rolecall sft` and not of `train`,
    or the other way round; RunLockedError when a launcher works in run.dir; as `require_unchanged` when `resume` is
    true.
    """
    directory = settings.run.dir
    _require_ours(directory)
    if directory.is_dir():
        with run_lock(directory):
            _require_place(settings, resume)
    else:
        _require_place(settings, resume)
    if resume:
        require_unchanged(settings)


def _require_place(settings: RunSettings | SftSettings, resume: bool) -> None:
    directory = settings.run.dir
    kept = newest_checkpoint(settings) if settings.run.checkpoint_url is not None else None
    if kept is not None and not resume:
        raise RunExistsError(
            f"run.checkpoint_url {settings.run.checkpoint_url} holds checkpoints of a run, the last of step "
            f"{kept.step}; go on from it with --resume, also where its run.dir is lost, or name another place"
        )
    is_there = (directory / "config.yaml").is_file()
    if resume and not is_there and kept is None:
        raise NotFoundError(f"run.dir {directory} holds no run to resume; start it without --resume")
    if resume and is_there and ("reward" in read_tree(directory / "config.yaml")) != isinstance(settings, RunSettings):
        mine, its = ("train", "sft") if isinstance(settings, RunSettings) else ("sft", "train")
        raise NotFoundError(
            f"run.dir {directory} is of `rolecall {its}`, and `rolecall {mine}` cannot go on with it; name another"
        )
    if not resume and holds_a_run(directory):
        raise RunExistsError(
            f"run.dir {directory} exists; resume that run with --resume, or name another with --run.dir"
        )


def prepare_run_dir(settings: RunSettings | SftSettings, *, resume: bool) -> int:
    """Makes the run directory and returns a descriptor that holds its lock for as long as this process lives.

    What an attempt left in which nothing was trained is taken away, but for its logs: the same command may be given
    again once its mistake is mended. Raises as `require_place`, but compares no settings.
    """
    directory = settings.run.dir
    _require_ours(directory)
    if not directory.is_dir():
        _require_place(settings, resume)
    with writing("make", directory):
        directory.mkdir(parents=True, exist_ok=True)
    lock = _lock(directory)
    try:
        _require_place(settings, resume)
        if not resume and any(directory.iterdir()):
            _clear(directory)
        with writing("make", directory):
            (directory / "logs").mkdir(exist_ok=True)
    except BaseException:
        os.close(lock)
        raise
    return lock


def holds_a_run(directory: Path) -> bool:
    """Whether anything was trained in the directory, which a new run must not take the place of."""
    checkpoints, metrics, history = (directory / name for name in ("checkpoints", "metrics.jsonl", "history.jsonl"))
    if checkpoints.is_dir() and any(checkpoints.iterdir()):
        return True
    return _has_line(metrics, lambda line: line.get("step", 0) > 0) or _has_line(
        history, lambda line: line.get("event") == "trained"
    )


def _require_ours(directory: Path) -> None:
    """RunExistsError when the directory holds something, and no run was started there. The root of a fresh volume
    holds `lost+found`, and roles that were started by hand may wait for their shift before there is a run.
    """
    if not directory.is_dir() or (directory / "identity.json").is_file():
        return
    for path in sorted(directory.iterdir()):
        if path.name not in ("logs", "lost+found", SHIFTS) and not _is_of_tokens(path):
            raise RunExistsError(
                f"run.dir {directory} holds {path.name}, and no run was started there; name another with --run.dir, or "
                "move what is in it elsewhere"
            )


def _is_of_tokens(path: Path) -> bool:
    """Whether a role that was started by hand may have made it, before there was a run."""
    return path.name.startswith((FOLDER, f".{FOLDER}-"))


def is_under_way(directory: Path) -> bool:
    """Whether a launcher works in the directory."""
    try:
        with run_lock(directory):
            return False
    except RunLockedError:
        return True


@contextmanager
def run_lock(directory: Path) -> Iterator[None]:
    """Keeps launchers out of the directory for the block. RunLockedError when one works there."""
    lock = _lock(directory)
    try:
        yield
    finally:
        os.close(lock)


def _has_line(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> bool:
    """True as well when a line cannot be read: what follows from false is deleted."""
    if not path.is_file():
        return False
    try:
        with path.open() as file:
            return any(wanted(json.loads(line)) for line in file if line.endswith("\n"))
    except (ValueError, TypeError, AttributeError):  # no JSON, no object, or no number in it
        return True


def _clear(directory: Path) -> None:
    with writing("clear", directory):
        discard_store(directory / "store")
        for name in _OF_AN_ATTEMPT:
            path = directory / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def _lock(directory: Path) -> int:
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise RunLockedError(
            f"another `rolecall train`, `sft` or `rewind` works in {directory}; stop it first, or name another run.dir"
        ) from error
    return lock
