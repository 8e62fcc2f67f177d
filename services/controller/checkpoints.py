"""Run checkpoints on disk: one directory a step, made of the trainers' shares and the ledger's position, valid once COMMITTED is there.

    checkpoints/step-00000020/actor/... critic/... controller.json   COMMITTED

COMMITTED is written last, by rename, and holds the digest of controller.json; a directory without it is garbage of an interrupted save. Retention scans the
disk and never deletes the newest committed one.
"""

import hashlib
import json
import os
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path

from rolecall.errors import CheckpointMismatchError

_MANIFEST = "COMMITTED"
_STATE = "controller.json"


@dataclass(frozen=True)
class RunPoint:
    """The controller's share: what the ledger held when all roles had applied `step` steps."""

    run: str
    lineage: int
    step: int
    policy_version: int
    """Highest version announced by then."""
    epoch: int
    """Last epoch of the weight channel."""
    next_gid: int
    trained: int
    """Groups trained."""
    dropped: dict[str, int]
    """Groups dropped, by reason."""
    cursor: str
    """The data cursor, encoded."""
    untrained: list[str]
    """Prompts in flight, base64 of serialized Prompts: admitted again where the store's own memory of them is lost."""


class Checkpoints:
    """The checkpoints of one run."""

    def __init__(self, folder: Path, num_kept: int) -> None:
        self._folder = folder
        self._num_kept = num_kept

    def path(self, step: int) -> Path:
        """Where the checkpoint of `step` is or will be."""
        return self._folder / f"step-{step:08d}"

    def begin(self, step: int) -> Path:
        """An empty directory for `step`; what an interrupted save left there is removed."""
        path = self.path(step)
        if path.exists() and not (path / _MANIFEST).exists():
            shutil.rmtree(path)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def commit(self, point: RunPoint) -> Path:
        """Makes the checkpoint valid, then deletes the oldest beyond the number kept."""
        path = self.path(point.step)
        state = json.dumps(asdict(point)).encode()
        _write_durably(path / _STATE, state)
        _write_durably(path / _MANIFEST, hashlib.sha256(state).hexdigest().encode())
        for old in self._committed()[: -self._num_kept]:
            (old / _MANIFEST).unlink()
            shutil.rmtree(old)
        return path

    def latest(self) -> tuple[Path, RunPoint] | None:
        """The newest valid checkpoint. CheckpointMismatchError when its controller.json is not what COMMITTED says."""
        committed = self._committed()
        if not committed:
            return None
        path = committed[-1]
        state = (path / _STATE).read_bytes()
        if hashlib.sha256(state).hexdigest() != (path / _MANIFEST).read_text():
            raise CheckpointMismatchError(f"{path / _STATE} was changed after the checkpoint was committed; remove {path} to resume from an older one")
        return path, RunPoint(**json.loads(state))

    def _committed(self) -> list[Path]:
        return sorted(path for path in self._folder.glob("step-*") if (path / _MANIFEST).exists())


def _write_durably(path: Path, data: bytes) -> None:
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    temporary.rename(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
