"""Disks that fill up, on a real file system of a few pages: what must stay whole does, the run goes on where it can,
and everything says what it needs.
"""

import contextlib
import errno
import json
import logging
import os
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest
import redis
from tensorboard.backend.event_processing.event_file_loader import EventFileLoader

from rolecall.checkpoint.storage import open_storage
from rolecall.disk import append_lines
from rolecall.errors import DiskFullError, RoleCallError
from rolecall.identity import settle
from rolecall.launcher.run_record import keep_record, read_record
from rolecall.store.embedded import EmbeddedStore
from rolecall.store.ledger import Ledger
from rolecall.trackers import End, Trackers
from rolecall.v1 import controller_pb2
from services.controller.durable.saving import NO_ROOM
from tests.conftest import MakeSettings
from tests.file_sizes import files_up_to
from tests.fixtures_store import StoreUnderTest
from tests.twins.launched import write_model
from tests.twins.run import twin_run

MakeEmbeddedStore = Callable[..., EmbeddedStore]
DISK_BYTES = 512 * 1024


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A tmpfs of DISK_BYTES; skipped where nothing may be mounted."""
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", str(path)], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {mounted.stderr.strip()}")
    try:
        yield path
    finally:
        subprocess.run(["umount", str(path)], check=True)


def fill(disk: Path, but: int = 0) -> Path:
    """Takes all space on `disk` but some pages of 4096 bytes, whoever else takes some meanwhile."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        with contextlib.suppress(OSError):  # it is full
            while True:
                file.write(bytes(DISK_BYTES))
        file.truncate(file.tell() - but * 4096)
    return ballast


def test_lines_are_appended_whole_or_not_at_all(disk: Path) -> None:
    path = disk / "history.jsonl"
    append_lines(path, ["first"], sync=True)
    ballast = fill(disk, but=1)
    with pytest.raises(
        DiskFullError, match=r"no space to write .*history\.jsonl \(No space left on device\); free some"
    ):
        append_lines(path, ["x" * 1000] * 20, sync=True)
    assert path.read_text() == "first\n"
    ballast.unlink()
    append_lines(path, ["second"])
    assert path.read_text() == "first\nsecond\n"


def test_half_a_line_of_a_killed_process_is_cut_off_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"step": 1}\n{"st')
    append_lines(path, ['{"step": 2}'])
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'
    path.write_bytes(b"x" * 200_000)
    append_lines(path, [])
    assert path.read_bytes() == b""


def test_two_that_append_to_one_file_cut_nothing_off(tmp_path: Path) -> None:
    path = tmp_path / "history.jsonl"

    def append(name: int) -> None:
        for number in range(300):
            append_lines(path, [f"{name} {number}"])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(append, range(4)))
    assert sorted(path.read_text().splitlines()) == sorted(
        f"{name} {number}" for name in range(4) for number in range(300)
    )


def test_a_quota_is_a_full_disk_and_a_folder_in_the_way_is_named(tmp_path: Path) -> None:
    with files_up_to(4096), pytest.raises(DiskFullError, match="File too large"):
        append_lines(tmp_path / "lines", ["x" * 5000])
    with pytest.raises(RoleCallError, match="Is a directory"):
        append_lines(tmp_path, ["x"])


def test_what_a_run_is_and_was_is_kept_whole_or_not_at_all(
    disk: Path, tmp_path: Path, make_settings: MakeSettings
) -> None:
    write_model(tmp_path / "model")
    (tmp_path / "train.jsonl").write_text('{"prompt": "1 + 1", "ground_truth": "2"}\n')
    settings = make_settings(run={"name": "full", "dir": str(disk), "num_steps": 1})
    keep_record(settings.run, controller_pb2.RunStatus(run="full", step=1))
    ballast = fill(disk)
    with pytest.raises(DiskFullError):
        settle(settings)
    keep_record(settings.run, controller_pb2.RunStatus(run="full", step=2, last_failure="x" * 10_000))
    record = read_record(disk)
    assert record is not None
    assert record.status.step == 1
    assert {path.name for path in disk.iterdir()} == {"ballast", "last_status.json"}, "nothing half written stays"
    ballast.unlink()
    for _ in range(2):  # the first writes it, the second compares
        settle(settings)


def test_metrics_and_samples_that_find_no_space_are_lost_with_one_warning_and_the_run_goes_on(
    disk: Path, make_settings: MakeSettings, caplog: pytest.LogCaptureFixture
) -> None:
    settings = make_settings(run={"name": "full", "dir": str(disk), "num_steps": 1})
    trackers = Trackers(settings)
    trackers.log(1, {"loss": 0.5})
    trackers.keep_samples(1, [{"id": "0/0"}])
    ballast = fill(disk)
    with caplog.at_level(logging.WARNING):
        for step in range(2, 6):
            trackers.log(step, {f"metric/{i}": 1.0 for i in range(400)})
            trackers.keep_samples(step, [{"id": f"{step}/{i}", "response": "x" * 500} for i in range(20)])
    told = [record.getMessage() for record in caplog.records]
    assert (
        sum("metrics.jsonl" in line for line in told)
        == sum("samples.jsonl" in line for line in told)
        == sum("tensorboard" in line for line in told)
        == 1
    )
    assert all("the run goes on" in line for line in told)
    ballast.unlink()
    trackers.log(6, {"loss": 0.25})
    trackers.keep_samples(6, [{"id": "6/0"}])
    trackers.flush(End.DONE)
    assert [json.loads(line)["step"] for line in (disk / "metrics.jsonl").read_text().splitlines()] == [1, 6]
    assert [json.loads(line)["id"] for line in (disk / "samples.jsonl").read_text().splitlines()] == ["0/0", "6/0"]
    events = [event for file in sorted((disk / "tensorboard").iterdir()) for event in EventFileLoader(str(file)).Load()]
    assert [event.step for event in events if event.summary.value] == [1, 6]
    assert "80 lines are missing" in caplog.text


def test_a_history_that_finds_no_space_stays_in_the_store(disk: Path, store: StoreUnderTest) -> None:
    store.admit(200)
    path, ballast = disk / "history.jsonl", fill(disk, but=2)
    with pytest.raises(DiskFullError, match=r"history\.jsonl \(No space left on device\)"):
        store.ledger.drain("history", path)
    assert path.read_text() == ""
    ballast.unlink()
    assert store.ledger.drain("history", path) == 200
    assert [json.loads(line)["gid"] for line in path.read_text().splitlines()] == [str(gid) for gid in range(200)]


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN])
def test_what_may_pass_costs_a_checkpoint_and_not_the_run(tmp_path: Path, number: int) -> None:
    def fail(file: BinaryIO) -> None:
        raise OSError(number, os.strerror(number))

    with pytest.raises(NO_ROOM, match=rf"cannot write a checkpoint to .*{os.strerror(number)}") as caught:
        open_storage(str(tmp_path)).write("step-00000020/a", fail)
    assert "writable" not in caught.value.message


async def test_a_history_that_meets_a_passing_error_stays_in_the_store_and_the_next_report_moves_it(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernel answers EIO to whoever writes at the beginning of a process's memory."""
    sections = {"name": store.run, "dir": str(tmp_path / "run"), "num_steps": 6}
    (tmp_path / "run").mkdir(exist_ok=True)
    history = tmp_path / "run" / "history.jsonl"
    history.symlink_to("/proc/self/mem")
    async with twin_run(store, tmp_path, make_settings, run=sections) as run, run.rollout("rollout-0", token_s=0.005):
        async with run.controller() as life:
            await life.reaches(3)
            history.unlink()
            await life.ends()
    assert "the ledger's history stays in the store: cannot write" in caplog.text
    assert "starting over" not in caplog.text
    trained = [line for line in history.read_text().splitlines() if json.loads(line)["event"] == "trained"]
    assert len(trained) == 24


async def test_a_run_whose_disk_fills_up_goes_on_keeps_its_last_checkpoint_and_catches_up(
    disk: Path, store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings, caplog: pytest.LogCaptureFixture
) -> None:
    """Everything of the run is on the full disk but the store. The trainers' share is small, as is the controller's;
    the ballast leaves neither a page.
    """
    sections = {"name": store.run, "dir": str(disk / "run"), "num_steps": 12, "checkpoint_every_steps": 2}
    async with twin_run(store, tmp_path, make_settings, run=sections) as run, run.rollout("rollout-0", token_s=0.005):
        async with run.controller() as life:
            await life.reaches(3)
            ballast = fill(disk)
            await life.reaches(8)
            committed = sorted(path.parent.name for path in (disk / "run" / "checkpoints").glob("*/COMMITTED"))
            assert committed[-1] in ("step-00000002", "step-00000004")
            status = await life.shows(lambda status: status.trouble)
            assert status.trouble.startswith(f"no checkpoint since step {int(committed[-1][5:])}: ")
            assert "No space left on device" in status.trouble
            ballast.unlink()
            await life.shows(lambda status: not status.trouble)
            await life.ends()
    assert (disk / "run" / "checkpoints" / "step-00000012" / "COMMITTED").exists()
    told = [record.getMessage() for record in caplog.records]
    assert any("the last one stands, and another is tried" in line for line in told)
    assert any("the ledger's history stays in the store" in line for line in told)
    counts = Ledger(store.connection, store.run).counts()
    assert (counts.admitted, counts.trained, counts.live) == (48, 48, 0)
    history = [json.loads(line) for line in (disk / "run" / "history.jsonl").read_text().splitlines()]
    assert sum(line["event"] == "trained" for line in history) == 48


def test_a_store_that_finds_no_room_to_start_says_so(disk: Path, make_embedded_store: MakeEmbeddedStore) -> None:
    server = make_embedded_store(disk / "store")
    (disk / "store").mkdir()
    ballast = fill(disk)
    with pytest.raises(DiskFullError, match=r"no space to write .*/store/url\.\w+ \(No space left on device\)"):
        server.start()
    ballast.unlink()
    server.start()


def test_a_store_whose_disk_fills_up_ends_says_why_and_has_lost_nothing_when_there_is_room_again(
    disk: Path, make_embedded_store: MakeEmbeddedStore
) -> None:
    """Valkey with appendfsync always ends rather than acknowledge what is not on the disk."""
    server = make_embedded_store(disk / "store")
    client = redis.Redis.from_url(server.start(), socket_timeout=5)
    ballast, acknowledged = fill(disk, but=4), 0
    with contextlib.suppress(redis.ConnectionError):
        while client.set(f"{{rl:test}}:{acknowledged}", "x" * 1000):
            acknowledged += 1
    client.close()
    os.waitid(os.P_PID, server.pid or 0, os.WEXITED | os.WNOWAIT)
    assert not server.alive
    assert "AOF write error" in server.last_words()
    ballast.unlink()
    client = redis.Redis.from_url(server.start(), socket_timeout=5)
    assert acknowledged > 0
    assert client.mget([f"{{rl:test}}:{number}" for number in range(acknowledged)]) == [b"x" * 1000] * acknowledged
    client.close()


def test_a_run_directory_that_takes_no_files_is_refused_before_anything_begins(
    disk: Path, make_settings: MakeSettings
) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    with pytest.raises(
        RoleCallError, match=r"cannot write .*metrics\.jsonl \(Read-only file system\); make it writable"
    ):
        Trackers(make_settings(run={"name": "ro", "dir": str(disk), "num_steps": 1}))
