"""Files that grow by lines or are replaced whole, and what the disk refuses, as errors that say so. No torch."""

import errno
import fcntl
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rolecall.errors import ConfigError, DiskFullError, RoleCallError, StorageUnavailableError, UnavailableError

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""No space, no quota, no larger file allowed."""
PASSING = (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EMFILE, errno.ENFILE)
"""What the system says of a file system that is away for a while, and of a process or machine with too many open files.
"""
_TAIL_BYTES = 65536
LOCK_TIMEOUT_S = 10.0
"""Deadline of waiting for another process that appends to the same file."""


@contextmanager
def writing(what: str, path: Path) -> Iterator[None]:
    """DiskFullError when the disk, a quota or an allowed size ends inside. StorageUnavailableError for what may pass,
    RoleCallError for anything else the system refuses, a failed sync included.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise DiskFullError(
                f"no space to {what} {path} ({error.strerror}); free some, or lower run.keep_checkpoints"
            ) from error
        raise _refused(what, path, error, "make it writable") from error


@contextmanager
def reading(path: Path) -> Iterator[None]:
    """FileNotFoundError when there is no such file inside. StorageUnavailableError for what may pass, RoleCallError for
    anything else the system refuses.
    """
    try:
        yield
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _refused("read", path, error, "make it readable") from error


def _refused(what: str, path: Path, error: OSError, remedy: str) -> RoleCallError:
    why = f"cannot {what} {path} ({error.strerror or error})"
    if error.errno in PASSING:
        return StorageUnavailableError(
            f"{why}; see that its file system answers, and that this process may open more files"
        )
    return RoleCallError(f"{why}; {remedy}")


def require_writable(folder: Path, setting: str) -> None:
    """ConfigError, naming `setting`, when `folder` could not be made or files not be written there."""
    parent = folder
    try:
        while not parent.exists():
            parent = parent.parent
        with tempfile.TemporaryFile(dir=parent) as probe:
            probe.write(bytes(4096))
    except OSError as error:
        raise ConfigError(
            f"{setting} {folder} cannot be written: {error.strerror} in {parent}; make room or it writable, or name "
            f"another {setting}"
        ) from error


def replace_text(path: Path, text: str) -> None:
    """Writes `text` to `path`, which holds all of it afterwards or, after a full disk or a kill, what it held before.
    Raises as `writing`.
    """
    with writing("write", path):
        beside = path.with_suffix(".new")
        try:
            beside.write_text(text)
            os.replace(beside, path)
        except BaseException:
            beside.unlink(missing_ok=True)  # or a folder that holds nothing else would be somebody's
            raise


def append_lines(path: Path, lines: Sequence[str], *, sync: bool = False) -> None:
    """Appends all of `lines` (without their newlines) or none: the file always ends with a whole line, after a full
    disk or a kill, whoever else appends.

    sync: on the disk when this returns. Raises as `writing`.
    """
    with writing("write", path):
        file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            # or one could cut off what another has written meanwhile: a controller that was replaced may still be at it
            _lock(file, path)
            size = _end_of_lines(file)
            os.ftruncate(file, size)
            try:
                _write_all(file, "".join(line + "\n" for line in lines).encode())
                if sync:
                    os.fsync(file)
            except OSError:
                os.ftruncate(file, size)
                raise
        finally:
            os.close(file)


def _lock(file: int, path: Path) -> None:
    """Held until `file` is closed. UnavailableError when another process or thread holds it for LOCK_TIMEOUT_S."""
    deadline = time.monotonic() + LOCK_TIMEOUT_S
    while True:
        try:
            return fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() > deadline:
                raise UnavailableError(
                    f"another process writes {path}, and does not end; is there a second controller?"
                ) from error
        time.sleep(0.01)


def _end_of_lines(file: int) -> int:
    """The position at which the last whole line ends: a process that was killed while it wrote may have left half of
    one.
    """
    end = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - _TAIL_BYTES)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        if newline >= 0:
            return start + newline + 1
        end = start
    return 0


def _write_all(file: int, data: bytes) -> None:
    rest = memoryview(data)
    while rest:
        rest = rest[os.write(file, rest) :]
