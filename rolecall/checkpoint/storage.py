"""Folders of files on a disk or behind a URL that fsspec knows (s3://, gs://, memory://, ...): where checkpoints live.
No torch.

    storage = open_storage("s3://bucket/run-7/checkpoints")
    storage.write("step-00000020/COMMITTED", lambda file: file.write(text))
    storage.read("step-00000020/COMMITTED")

A file appears whole or not at all, and lasts when `write` returns; one that is written again is replaced at one
instant. Nothing is renamed: object stores cannot. What belongs together is therefore named by a file that is written
last (rolecall/checkpoint/manifest.py). Credentials and endpoints are those of the back end's own library (AWS_* in the
environment, for instance).

Errors: FileNotFoundError for a file that is not there; DiskFullError and RoleCallError of a disk;
StorageUnavailableError of a disk that is away for a while, and of anything else, after TRIES.
"""

import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

from rolecall.disk import reading, writing
from rolecall.errors import ConfigError, InvalidInputError, RoleCallError, StorageUnavailableError

T = TypeVar("T")
logger = logging.getLogger(__name__)

TRIES = 5
"""Attempts at one operation on a remote file system, besides those that its own client makes."""
PAUSE_S = 0.2
"""Pause before the second attempt; each pause doubles."""
_PLAIN_NAME = re.compile(r"(?!\.)[A-Za-z0-9._-]+")
"""A name in a URL that no library could read as a parent, an option or another URL."""


class Storage(Protocol):
    """A folder; names are relative and use slashes. Any thread may call."""

    url: str
    """Where it is, for people and for other processes."""

    def at(self, name: str) -> "Storage":
        """The folder `name` in it."""

    def write(self, name: str, produce: Callable[[BinaryIO], T]) -> T:
        """The file that `produce` writes, and what it returns. After a failure it may be called again, on an empty
        file.
        """

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytearray:
        """Bytes start..end of a file, fewer at its end."""

    def files(self) -> dict[str, int]:
        """Size in bytes of every file in it and below, by name; empty where there is no such folder."""

    def remove(self, names: Iterable[str]) -> None:
        """Deletes files; those that are gone already are no error."""


def open_storage(url: str) -> Storage:
    """The folder at `url`, which need not exist. ConfigError when no library here knows that kind of URL."""
    folder = disk_folder(url)
    return RemoteStorage(url) if folder is None else DiskStorage(folder)


def disk_folder(url: str) -> Path | None:
    """The folder that `url` names where it is on a disk; else None."""
    return Path(url.removeprefix("file://")) if _is_disk(url) else None


def require_inside(url: str, folder: str, field: str) -> None:
    """InvalidInputError, naming `field`, unless `url` is below `folder`: by its plain names alone, and on a disk also
    where symbolic links lead.
    """
    if _is_disk(folder):
        plain = _is_disk(url) and ".." not in Path(url).parts and "\0" not in url
        path, root = (os.path.realpath(each.removeprefix("file://")) for each in (url if plain else "", folder))
        below = plain and path.startswith(f"{root}{os.sep}")
    else:
        root = f"{folder.rstrip('/')}/"
        below = url.startswith(root) and all(map(_PLAIN_NAME.fullmatch, url.removeprefix(root).split("/")))
    if not below:
        raise InvalidInputError(
            f"{field} {url!r} is not below {folder}, where this role may read and write; correct it, or give all roles "
            "the same run.dir or run.checkpoint_url"
        )


def _is_disk(url: str) -> bool:
    return url.startswith("file://") or "://" not in url


class DiskStorage:
    """A folder of a mounted file system; sync and rename make a file appear."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self.url = str(path)

    def at(self, name: str) -> "DiskStorage":
        """Storage.at."""
        return DiskStorage(self._path / name)

    def write(self, name: str, produce: Callable[[BinaryIO], T]) -> T:
        """Storage.write."""
        path = self._path / name
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        with writing("write a checkpoint to", path):
            _make_folder(path.parent)
            try:
                with temporary.open("wb") as file:
                    result = produce(file)
                    file.flush()
                    os.fsync(file.fileno())
                temporary.rename(path)
            except BaseException:
                temporary.unlink(missing_ok=True)
                raise
            _sync(path.parent)
        return result

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytearray:
        """Storage.read."""
        with reading(self._path / name), (self._path / name).open("rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            buffer = bytearray(max(0, min(size if end is None else end, size) - start))
            view, done = memoryview(buffer), 0
            file.seek(start)
            while done < len(buffer):
                count = file.readinto(view[done:])
                if not count:
                    raise RoleCallError(
                        f"{self._path / name} became shorter while it was read; restore another checkpoint"
                    )
                done += count
        return buffer

    def files(self) -> dict[str, int]:
        """Storage.files."""
        found = {}
        try:
            for folder, folders, names in os.walk(self._path, onerror=_unless_gone):
                # of the file system, in the root of a volume: root alone may read it
                folders[:] = (each for each in folders if each != "lost+found")
                for name in names:
                    path = Path(folder, name)
                    with suppress(FileNotFoundError):  # deleted meanwhile
                        found[path.relative_to(self._path).as_posix()] = path.stat().st_size
        except OSError as error:
            raise StorageUnavailableError(
                f"cannot list {self._path} ({error.strerror}); see that its disk can be reached, and all of it be read"
            ) from error
        return found

    def remove(self, names: Iterable[str]) -> None:
        """Storage.remove; folders that become empty go, too."""
        with writing("delete a checkpoint in", self._path):
            for name in names:
                path = self._path / name
                path.unlink(missing_ok=True)
                with suppress(OSError):  # not empty
                    for folder in path.parents[: len(Path(name).parts) - 1]:
                        folder.rmdir()


class RemoteStorage:
    """A folder of an fsspec file system; an upload that is committed makes a file appear."""

    def __init__(self, url: str, pause_s: float = PAUSE_S) -> None:
        """`pause_s` before the second attempt at what failed. ConfigError when no library here knows that kind of
        URL.
        """
        import fsspec

        try:
            # Listings are never cached: another process writes here, too.
            self._fs, self._root = fsspec.url_to_fs(url, use_listings_cache=False)
        except (ImportError, ValueError) as error:
            raise ConfigError(
                f"{url} cannot be used: {error}; for s3:// pip install 'rolecall[s3]', for others the library that "
                "fsspec names"
            ) from error
        self.url = url
        self._pause_s = pause_s

    def at(self, name: str) -> "RemoteStorage":
        """Storage.at."""
        return RemoteStorage(f"{self.url.rstrip('/')}/{name}", self._pause_s)

    def write(self, name: str, produce: Callable[[BinaryIO], T]) -> T:
        """Storage.write."""
        return self._again(lambda: self._upload(f"{self._root}/{name}", produce), f"write {name}", RoleCallError)

    def _upload(self, path: str, produce: Callable[[BinaryIO], T]) -> T:
        file: Any = self._fs.open(path, "wb", autocommit=False)
        try:
            result = produce(file)
            file.close()
        except BaseException:
            _give_up(file)
            raise
        file.commit()
        return result

    def read(self, name: str, start: int = 0, end: int | None = None) -> bytearray:
        """Storage.read."""
        return bytearray(
            self._again(
                lambda: self._fs.cat_file(f"{self._root}/{name}", start=start, end=end),
                f"read {name}",
                FileNotFoundError,
            )
        )

    def files(self) -> dict[str, int]:
        """Storage.files. ConfigError when the bucket is not there: a folder in it need not be."""
        try:
            found: dict[str, dict[str, Any]] = self._again(
                lambda: self._fs.find(self._root, detail=True), "list", FileNotFoundError
            )
        except FileNotFoundError as error:
            raise ConfigError(
                f"{self.url} cannot be listed ({error}); make the bucket, or correct run.checkpoint_url"
            ) from error
        root = self._root.strip("/") + "/"
        return {
            path.strip("/").removeprefix(root): entry["size"]
            for path, entry in found.items()
            if entry["type"] == "file"
        }

    def remove(self, names: Iterable[str]) -> None:
        """Storage.remove."""
        for name in names:
            with suppress(FileNotFoundError):
                delete = partial(self._fs.rm_file, f"{self._root}/{name}")
                self._again(delete, f"delete {name}", FileNotFoundError)

    def _again(self, work: Callable[[], T], what: str, answer: type[Exception]) -> T:
        """Returns what `work` returns, after several attempts; an `answer` is the caller's, anything else is tried
        again.
        """
        for attempt in range(TRIES):
            if attempt:
                time.sleep(self._pause_s * 2 ** (attempt - 1))
            try:
                return work()
            except answer:
                raise
            except Exception as error:  # the edge of a retry: each back end has errors of its own
                logger.warning("cannot %s in %s, attempt %d of %d: %s", what, self.url, attempt + 1, TRIES, error)
                last = error
        raise StorageUnavailableError(
            f"cannot {what} in {self.url} ({type(last).__name__}: {last}); see that it can be reached and written to"
        ) from last


def _give_up(file: Any) -> None:
    from fsspec.spec import AbstractBufferedFile

    try:
        file.discard()
    finally:
        if isinstance(file, AbstractBufferedFile):
            file.closed = True  # or it uploads what it has when it is collected


def _unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError):
        raise error


def _make_folder(path: Path) -> None:
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(exist_ok=True)
        _sync(folder.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
