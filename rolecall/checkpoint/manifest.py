"""The checkpoints of a run in a storage: attempts at a step, the one of them that is valid, and how many are kept. No
torch.

    step-00000020/3fa2c1d0/actor/...   files of one attempt; another attempt writes under another name
    step-00000020/COMMITTED            written last: {"step", "attempt", "files": {name: [bytes, sha256]},
                                        "state": the controller's share} and its own sha256

A step without COMMITTED does not exist; files that COMMITTED does not name are garbage of attempts that were cut short.
So a kill at any instant leaves the old checkpoint or the new one, on any storage whose files appear whole.
"""

import hashlib
import json
import logging
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO

from rolecall.checkpoint.storage import Storage
from rolecall.errors import CheckpointMismatchError, CheckpointMissingError, RoleCallError

logger = logging.getLogger(__name__)

COMMITTED = "COMMITTED"
IDENTITY, RUN_ID = "identity", "id"
"""Keys of the run's identity (rolecall/identity.py) in a checkpoint's state, and in it of what tells the run from all
others.
"""
_CHUNK_BYTES = 64 * 2**20
_STEP = re.compile(r"step-(\d{8})/(.+)")
_ATTEMPT = re.compile(r"[0-9a-f]+")


@dataclass(frozen=True)
class StoredFile:
    """A file that was written."""

    name: str
    """Relative to the folder that is spoken of."""
    num_bytes: int
    checksum: str
    """Hex sha256 of its contents."""


@dataclass(frozen=True)
class Attempt:
    """A checkpoint that is being made."""

    step: int
    storage: Storage
    """Folder of the attempt, where nobody else writes."""
    name: str


@dataclass(frozen=True)
class Committed:
    """A valid checkpoint: what its COMMITTED names."""

    step: int
    storage: Storage
    files: tuple[StoredFile, ...]
    """All of them, in `storage`."""
    state: Mapping[str, Any]
    """The controller's share."""

    @property
    def identity(self) -> Mapping[str, Any]:
        """The identity of the run that made it (rolecall/identity.py); empty when that kept none."""
        kept: Mapping[str, Any] = self.state.get(IDENTITY, {})
        return kept

    @property
    def run_id(self) -> str:
        """Id of the run that made it; empty when that had none."""
        return str(self.identity.get(RUN_ID, ""))

    @property
    def attempt(self) -> str:
        """Name of the attempt that it was."""
        return self.storage.url.rpartition("/")[2]

    def share(self, role: str) -> tuple[Storage, tuple[StoredFile, ...]]:
        """Returns what `role` saved. CheckpointMissingError when it was not in the run."""
        prefix = f"{role}/"
        files = tuple(
            StoredFile(file.name.removeprefix(prefix), file.num_bytes, file.checksum)
            for file in self.files
            if file.name.startswith(prefix)
        )
        if not files:
            raise CheckpointMissingError(
                f"{self.storage.url} holds nothing of role {role!r}; name one that was in the run"
            )
        return self.storage.at(role), files


class RunCheckpoints:
    """The checkpoints under one folder. Calls block."""

    def __init__(self, storage: Storage, num_kept: int, run_id: str = "") -> None:
        """`run_id`: id of the run that they are of; empty: of any."""
        self._storage = storage
        self._num_kept = num_kept
        self._run_id = run_id

    def begin(self, step: int) -> Attempt:
        """A new attempt at the checkpoint of `step`; nothing is written yet."""
        name = secrets.token_hex(4)
        return Attempt(step, self._storage.at(f"{folder_of(step)}/{name}"), name)

    def commit(self, attempt: Attempt, files: Sequence[StoredFile], state: Mapping[str, Any]) -> None:
        """Makes the attempt, whose `files` are all written, the checkpoint of its step; then deletes what nobody needs
        any more, as far as it can. CheckpointMismatchError when files are gone, or another run's is the newest.
        """
        if steps := self.steps():
            try:
                newest = self.read(steps[-1])
            except (CheckpointMissingError, CheckpointMismatchError):
                pass  # a damaged one does not stop those after it
            else:
                self.require_ours(newest)
        found = attempt.storage.files()
        if missing := [file.name for file in files if found.get(file.name) != file.num_bytes]:
            raise CheckpointMismatchError(
                f"{attempt.storage.url} lacks {len(missing)} files that were written, first {missing[0]}; who else "
                "deletes there?"
            )
        self._write(attempt.step, attempt.name, files, state)
        self.require_ours(self.read(attempt.step))  # not of one that committed the same step in this moment
        try:
            self._retain(attempt.step)
        except (RoleCallError, OSError) as error:
            logger.warning(
                "the checkpoint of step %d is committed, and what nobody needs any more goes with the next: %s",
                attempt.step,
                error,
            )

    def go_back(self, step: int, state: Mapping[str, Any]) -> None:
        """Makes the checkpoint of `step` the newest, with `state` as the controller's share, and deletes those after
        it. Cut short, it leaves one of these the newest, as it was. CheckpointMissingError, CheckpointMismatchError.
        """
        checkpoint = self.read(step)
        self._write(step, checkpoint.attempt, checkpoint.files, state)
        for later, files in sorted(self._by_step().items()):
            if later > step:
                self._storage.remove(_ended(later, files))

    def discard(self, attempt: Attempt) -> None:
        """Deletes what an attempt that was given up has written.

        It keeps the files if the attempt is the checkpoint of its step, as after a commit that failed too late.
        """
        with suppress(CheckpointMissingError):
            if self.read(attempt.step).storage.url == attempt.storage.url:
                return
        folder = f"{folder_of(attempt.step)}/{attempt.name}"  # which goes with its files
        self._storage.remove(f"{folder}/{name}" for name in attempt.storage.files())

    def discard_uncommitted(self) -> None:
        """Deletes what attempts that were cut short left: before a new lineage, whose steps have the same numbers and
        other weights.
        """
        steps = self._by_step()
        self._storage.remove(
            name for step, files in steps.items() if COMMITTED not in files for name in _named(step, files)
        )

    def steps(self) -> list[int]:
        """Steps with a committed checkpoint, the oldest first."""
        return [step for step, files in sorted(self._by_step().items()) if COMMITTED in files]

    def latest(self) -> Committed | None:
        """The newest. CheckpointMismatchError when its COMMITTED was changed, or it is another run's."""
        steps = self.steps()
        if not steps:
            return None
        newest = self.read(steps[-1])
        self.require_ours(newest)
        return newest

    def require_ours(self, checkpoint: Committed) -> None:
        """CheckpointMismatchError when another run made it. One of step 0 is anybody's: nothing was trained."""
        theirs = checkpoint.run_id
        if checkpoint.step > 0 and self._run_id and theirs and theirs != self._run_id:
            raise CheckpointMismatchError(
                f"{checkpoint.storage.url} was made by another run, and each needs a place of its own: go on with "
                "--resume and another run.checkpoint_url"
            )

    def read(self, step: int) -> Committed:
        """The one of `step`. CheckpointMissingError, CheckpointMismatchError."""
        return read_committed(self._storage.at(folder_of(step)))

    def _write(self, step: int, attempt: str, files: Iterable[StoredFile], state: Mapping[str, Any]) -> None:
        tree = {
            "step": step,
            "attempt": attempt,
            "files": {file.name: [file.num_bytes, file.checksum] for file in files},
            "state": dict(state),
        }
        text = json.dumps(tree)
        data = json.dumps({"checkpoint": text, "sha256": hashlib.sha256(text.encode()).hexdigest()}).encode()
        self._storage.write(f"{folder_of(step)}/{COMMITTED}", lambda file: file.write(data))

    def _by_step(self) -> dict[int, dict[str, int]]:
        steps: dict[int, dict[str, int]] = {}
        for name, num_bytes in self._storage.files().items():
            if match := _STEP.fullmatch(name):
                steps.setdefault(int(match[1]), {})[match[2]] = num_bytes
        return steps

    def _retain(self, newest: int) -> None:
        """Keeps the newest `num_kept` committed checkpoints that are whole, and of those only what they name.

        Damaged ones beyond them go with the old.
        """
        steps = self._by_step()
        kept = 0
        for step in sorted(steps, reverse=True):
            files = steps[step]
            needed = self._needed(step, files)
            kept += needed is not None
            if step > newest:  # of another lineage, or of somebody who is at work
                continue
            if needed is None or kept > self._num_kept:
                self._storage.remove(_ended(step, files))
            else:
                self._storage.remove(_named(step, files.keys() - needed))

    def _needed(self, step: int, files: Mapping[str, int]) -> set[str] | None:
        """The files of a checkpoint, when all that it names are there; else None."""
        if COMMITTED not in files:
            return None
        try:
            checkpoint = self.read(step)
        except CheckpointMismatchError:
            return None
        sizes = {f"{checkpoint.attempt}/{file.name}": file.num_bytes for file in checkpoint.files}
        return {COMMITTED, *sizes} if sizes.items() <= files.items() else None


def folder_of(step: int) -> str:
    """The folder of the checkpoint of `step`, in the folder of all."""
    return f"step-{step:08d}"


def read_committed(storage: Storage) -> Committed:
    """The checkpoint in the folder of a step. CheckpointMissingError; CheckpointMismatchError when COMMITTED was
    changed, or names what is not in the folder.
    """
    try:
        outer = json.loads(storage.read(COMMITTED))
        text = outer["checkpoint"]
        if hashlib.sha256(text.encode()).hexdigest() != outer["sha256"]:
            raise ValueError("its checksum differs")
    except FileNotFoundError:
        raise CheckpointMissingError(
            f"{storage.url} holds no {COMMITTED}; name the folder of a step that has one"
        ) from None
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointMismatchError(
            f"{storage.url}/{COMMITTED} was damaged after it was written ({error}); remove {storage.url} to use an "
            "older one"
        ) from error
    tree = json.loads(text)
    # who sent a checkpoint chose its names, which an export writes to disk again
    led_away = [name for name in tree["files"] if {"", ".", ".."} & {*name.split("/")}]
    if not _ATTEMPT.fullmatch(tree["attempt"]):
        led_away.append(tree["attempt"])
    if led_away:
        raise CheckpointMismatchError(
            f"{storage.url}/{COMMITTED} names {led_away[0]!r}, which is no file of it; use another checkpoint"
        )
    files = tuple(StoredFile(name, num_bytes, checksum) for name, (num_bytes, checksum) in tree["files"].items())
    return Committed(tree["step"], storage.at(tree["attempt"]), files, tree["state"])


def store(storage: Storage, name: str, produce: Callable[[BinaryIO], object]) -> StoredFile:
    """Writes a file and says what was written."""

    def hashed(file: BinaryIO) -> StoredFile:
        sink = _Hashing(file)
        produce(sink)  # type: ignore[arg-type]  # of BinaryIO it is given `write` alone
        return StoredFile(name, sink.num_bytes, sink.checksum.hexdigest())

    return storage.write(name, hashed)


def verify(storage: Storage, files: Iterable[StoredFile], progressed: Callable[[], None]) -> None:
    """CheckpointMismatchError when one of `files` is not what it was when it was written."""
    for _ in verify_pieces(storage, files):
        progressed()


def verify_pieces(storage: Storage, files: Iterable[StoredFile]) -> Iterator[None]:
    """`verify`, which goes on by a piece of a file each time."""
    for file in files:
        checksum = hashlib.sha256()
        try:
            for start in range(0, file.num_bytes, _CHUNK_BYTES):
                checksum.update(storage.read(file.name, start, start + _CHUNK_BYTES))
                yield
        except FileNotFoundError:
            raise CheckpointMismatchError(
                f"{storage.url}/{file.name} of a committed checkpoint is gone; restore another one"
            ) from None
        if checksum.hexdigest() != file.checksum:
            raise CheckpointMismatchError(
                f"{storage.url}/{file.name} is not what was written ({file.num_bytes} bytes, sha256 "
                f"{file.checksum}); restore another one"
            )


class _Hashing:
    """A file that is written through."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.num_bytes = 0
        self.checksum = hashlib.sha256()

    def write(self, data: bytes | memoryview) -> int:
        """Writes all of `data`, bytes."""
        self.checksum.update(data)
        self.num_bytes += len(data)
        return self._file.write(data)


def _named(step: int, names: Iterable[str]) -> list[str]:
    return [f"{folder_of(step)}/{name}" for name in names]


def _ended(step: int, names: Iterable[str]) -> list[str]:
    """The files of a checkpoint to delete, in this order: first it ends to be one."""
    return _named(step, sorted(names, key=lambda name: name != COMMITTED))
