"""One contract for every place where checkpoints may live: a disk, memory, and S3 as a server of its own on this
machine.
"""

import os
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from rolecall.checkpoint.storage import TRIES, RemoteStorage, Storage, open_storage, require_inside
from rolecall.errors import ConfigError, DiskFullError, InvalidInputError, StorageUnavailableError
from tests.file_limits import no_file_is_free
from tests.s3_server import s3_bucket

BIG = os.urandom(6 * 2**20)
"""More than one part of an upload to S3."""


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """A bucket."""
    with s3_bucket() as url:
        yield url


@pytest.fixture(params=["disk", "file", "memory", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    name = uuid.uuid4().hex
    roots: dict[str, Callable[[], str]] = {
        "disk": lambda: str(tmp_path),
        "file": lambda: f"file://{tmp_path}",
        "memory": lambda: "memory://",
        "s3": lambda: request.getfixturevalue("s3"),
    }
    return open_storage(f"{roots[request.param]()}/{name}")


def test_a_file_is_read_back_whole_and_in_parts_listed_replaced_and_deleted(storage: Storage) -> None:
    assert storage.files() == {}
    assert storage.write("step/a", lambda file: file.write(BIG)) == len(BIG)
    storage.at("step").at("deep").write("b", lambda file: file.write(b"short"))
    storage.write("empty", lambda file: None)
    assert storage.files() == {"step/a": len(BIG), "step/deep/b": 5, "empty": 0}
    assert open_storage(storage.url).at("step").files() == {"a": len(BIG), "deep/b": 5}
    assert storage.read("step/a") == BIG
    assert storage.read("step/a", 10, 20) == BIG[10:20]
    assert storage.read("step/deep/b", 3, 100) == b"rt"
    storage.write("step/deep/b", lambda file: file.write(b"other"))
    assert storage.read("step/deep/b") == b"other"
    storage.remove(["step/a", "never/there", "empty"])
    assert storage.files() == {"step/deep/b": 5}
    with pytest.raises(FileNotFoundError):
        storage.read("step/a")


@pytest.mark.parametrize("storage", ["disk", "s3"], indirect=True)  # fsspec's memory knows no upload that is given up
def test_a_file_whose_writing_fails_does_not_appear_and_the_old_one_stays(storage: Storage) -> None:
    storage.write("file", lambda file: file.write(b"old"))

    def fail(file: BinaryIO) -> None:
        file.write(BIG)
        raise DiskFullError("no space")

    for name in ("file", "new"):
        with pytest.raises(DiskFullError):
            storage.write(name, fail)
    assert storage.files() == {"file": 3}
    assert storage.read("file") == b"old"


def test_a_bucket_that_is_not_there_is_named_with_the_setting(s3: str) -> None:
    with pytest.raises(ConfigError, match=r"-of-nobody/run cannot be listed .*; make the bucket, or correct run\."):
        open_storage(f"{s3}-of-nobody/run").files()
    assert open_storage(f"{s3}/new").files() == {}


class Flaky(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Fails the next `num_failures` operations, each in the middle."""

    protocol = "flaky"
    num_failures = 0

    def _may_fail(self) -> None:
        if Flaky.num_failures:
            Flaky.num_failures -= 1
            raise TimeoutError("the network is away")

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: object) -> bytes:
        self._may_fail()
        data: bytes = super().cat_file(path, start=start, end=end, **options)
        return data

    def find(self, path: str, **options: object) -> object:
        self._may_fail()
        return super().find(path, **options)


def test_what_fails_for_a_while_is_tried_again_and_what_fails_for_good_is_an_error_that_says_where() -> None:
    fsspec.register_implementation("flaky", Flaky, clobber=True)
    storage = RemoteStorage("flaky://bucket", pause_s=0.002).at("folder")
    attempts = iter(range(TRIES))

    def hesitate(file: BinaryIO) -> None:
        file.write(b"part")
        if next(attempts) < TRIES - 1:
            raise ConnectionError("reset")

    started = time.monotonic()
    storage.write("a", hesitate)
    assert time.monotonic() - started >= sum(0.002 * 2**attempt for attempt in range(TRIES - 1)), (
        "each pause is twice the one before"
    )
    Flaky.num_failures = TRIES - 1
    assert storage.read("a") == b"part", "every attempt begins with an empty file"
    Flaky.num_failures = TRIES - 1
    assert storage.files() == {"a": 4}
    Flaky.num_failures = TRIES
    with pytest.raises(
        StorageUnavailableError, match=r"cannot read a in flaky://bucket/folder \(TimeoutError: the network is away\)"
    ):
        storage.read("a")
    assert Flaky.num_failures == 0


def test_a_url_of_no_known_kind_and_a_server_that_is_away_are_named(s3: str) -> None:
    with pytest.raises(ConfigError, match=r"nowhere://x cannot be used.*pip install 'rolecall\[s3\]'"):
        open_storage("nowhere://x")
    with pytest.raises(StorageUnavailableError, match="no-such-bucket"):
        RemoteStorage("s3://no-such-bucket/x", pause_s=0.0).write("a", lambda file: file.write(b"x"))


def test_on_a_disk_nothing_but_the_file_is_left_and_empty_folders_go(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path / "new"))
    storage.write("a/b/c", lambda file: file.write(b"x"))
    assert [path.name for path in (tmp_path / "new").rglob("*")] == ["a", "b", "c"]
    storage.remove(["a/b/c"])
    assert list((tmp_path / "new").iterdir()) == []


def test_a_disk_that_cannot_be_listed_holds_no_one_knows_what(tmp_path: Path) -> None:
    """Taken for empty, it would have a run begin anew beside its checkpoints."""
    storage = open_storage(str(tmp_path))
    storage.write("step/a", lambda file: file.write(b"x"))
    with (
        no_file_is_free(),
        pytest.raises(StorageUnavailableError, match=rf"cannot list {tmp_path} \(Too many open files"),
    ):
        storage.files()
    with no_file_is_free(), pytest.raises(StorageUnavailableError, match=rf"cannot read {tmp_path}/step/a \(Too many"):
        storage.read("step/a")
    with pytest.raises(FileNotFoundError):
        storage.read("step/b")
    (tmp_path / "step" / "loop").symlink_to("loop")
    with pytest.raises(StorageUnavailableError, match="symbolic links"):
        storage.files()
    (tmp_path / "step" / "loop").unlink()
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "lost+found" / "#12").write_text("of the file system's check, which root alone may read")
    assert storage.files() == {"step/a": 1}
    assert storage.at("new").files() == {}


def test_a_path_below_the_checkpoints_is_taken_by_whatever_name_they_have(tmp_path: Path) -> None:
    (tmp_path / "disk" / "step-1").mkdir(parents=True)
    (tmp_path / "checkpoints").symlink_to(tmp_path / "disk")
    (tmp_path / "checkpoints" / "step-2").symlink_to(tmp_path / "disk" / "step-1")
    for name in ("checkpoints", "disk"):
        for below in ("step-1/actor", "step-2/actor", "step-3/3fa2/actor", "a b"):
            require_inside(f"{tmp_path}/{name}/{below}", f"{tmp_path}/checkpoints", "path")
            require_inside(f"file://{tmp_path}/{name}/{below}", f"file://{tmp_path}/checkpoints/", "path")
    require_inside("s3://bucket/run/step-00000020/3fa2c1d0/actor", "s3://bucket/run", "path")
    require_inside("s3://bucket/run/step-00000020/3fa2c1d0/actor", "s3://bucket/run/", "path")


@pytest.mark.parametrize(
    "path",
    [
        "",
        "/etc",
        "etc",
        "{run}",
        "{run}/",
        "{run}-2/actor",
        "{run}/../actor",
        "{run}/step/../actor",
        "{run}/out/actor",
        "{run}/out/new/actor",
        "{run}/\0",
        "file://{run}/../actor",
        "s3://bucket{run}/actor",
    ],
)
def test_a_path_that_leads_out_of_the_checkpoints_on_a_disk_is_refused(tmp_path: Path, path: str) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    out.mkdir()
    (run / "out").symlink_to(out)
    with pytest.raises(InvalidInputError, match=r"^path '.*' is not below .*; correct it"):
        require_inside(path.format(run=run), str(run), "path")


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "s3://bucket/run",
        "s3://bucket/run/",
        "s3://bucket/runs/actor",
        "s3://other/run/actor",
        "s3://bucket/run/../actor",
        "s3://bucket/run/./actor",
        "s3://bucket/run//actor",
        "s3://bucket/run/%2e%2e/actor",
        "s3://bucket/run/a?versionId=1",
        "s3://bucket/run/a::file:///etc/passwd",
        "simplecache::s3://bucket/run/actor",
    ],
)
def test_a_path_that_leads_out_of_the_checkpoints_behind_a_url_is_refused(path: str) -> None:
    with pytest.raises(InvalidInputError, match=r"^path '.*' is not below s3://bucket/run, "):
        require_inside(path, "s3://bucket/run", "path")
