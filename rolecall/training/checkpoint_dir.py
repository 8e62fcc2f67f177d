"""A trainer's checkpoint directory, which appears whole or not at all: written beside its place, synced, renamed by rank 0.

It holds trainer.json (applied.py), what the engine saves, and huggingface/ when asked for. Every method is a collective of the command group; the path
must be on a file system that every rank sees.
"""

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rolecall.errors import CheckpointMissingError, DiskFullError, RoleCallError
from rolecall.training.applied import Applied
from rolecall.training.group import CommandGroup


class CheckpointDir:
    """`path` as the ranks see it."""

    def __init__(self, path: Path, group: CommandGroup) -> None:
        self._path = path
        self._group = group

    def holds(self, step: int, huggingface: bool) -> bool:
        """Whether a whole checkpoint of `step` is there already (with a model directory, when `huggingface`)."""
        return self._group.agree(lambda: self._holds(step, huggingface))

    def num_bytes(self) -> int:
        """Size of all its files."""
        return self._group.agree(lambda: sum(file.stat().st_size for file in self._path.rglob("*") if file.is_file()))

    @contextmanager
    def replaced(self) -> Iterator[Path]:
        """An empty directory to write to, which takes the place of `path` at the end. DiskFullError; what was at `path` then stays."""
        partial = self._path.with_name(f"{self._path.name}.partial")
        self._on_rank_0(lambda: _empty(partial))
        yield partial
        self._on_rank_0(lambda: _put_in_place(partial, self._path))

    def _holds(self, step: int, huggingface: bool) -> bool:
        try:
            return Applied.read(self._path).step == step and (not huggingface or (self._path / "huggingface").is_dir())
        except CheckpointMissingError:
            return False

    def _on_rank_0(self, work: Callable[[], None]) -> None:
        self._group.agree(lambda: _as_domain(work) if self._group.leads else None)


def _as_domain(work: Callable[[], None]) -> None:
    try:
        work()
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFullError(f"no space for a checkpoint: {error}; free some, or keep fewer checkpoints") from error
        raise RoleCallError(f"cannot write a checkpoint: {error}") from error


def _empty(path: Path) -> None:
    if path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True)


def _put_in_place(partial: Path, path: Path) -> None:
    for entry in (*partial.rglob("*"), partial):
        _sync(entry)
    if path.exists():
        shutil.rmtree(path)
    partial.rename(path)
    _sync(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
