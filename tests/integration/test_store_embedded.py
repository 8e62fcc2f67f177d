"""The embedded server: private, durable, alone in its directory, gone with its parent."""

import os
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import psutil
import pytest
from pydantic import SecretStr
from redis import Redis, exceptions

from rolecall.errors import ConfigError, RunLockedError, StoreFullError, StoreUnavailableError
from rolecall.settings import StoreSection
from rolecall.store import embedded
from rolecall.store.connection import connect
from rolecall.store.embedded import EmbeddedStore
from rolecall.store.position import GroupState
from rolecall.store.probe import place_of
from rolecall.v1.trajectory_pb2 import RowRef, TrajectoryMeta
from tests.fixtures_store import DIGEST, MakeStore, StoreUnderTest

MakeEmbeddedStore = Callable[..., EmbeddedStore]


def gone(pid: int, timeout_s: float = 10.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if psutil.Process(pid).status() == psutil.STATUS_ZOMBIE:
                return True
        except psutil.NoSuchProcess:
            return True
        time.sleep(0.05)
    return False


def test_only_its_user_gets_in_and_only_to_the_runs_keys(
    make_embedded_store: MakeEmbeddedStore, tmp_path: Path
) -> None:
    server = make_embedded_store(tmp_path / "store")
    connection = connect(StoreSection(url=SecretStr(server.start())))
    connection.command("SET", "{rl:test}:x", "1")
    connection.command("SET", "{rl:test:3}:row:x", "1")
    for key in ("x", "{rl:other}:x", "{rl:test2}:x"):
        with pytest.raises(ConfigError, match="refuses"):
            connection.command("SET", key, "1")
    for command in (["FLUSHALL"], ["SHUTDOWN"], ["CONFIG", "SET", "appendonly", "no"], ["ACL", "LIST"]):
        with pytest.raises(ConfigError, match="refuses"):
            connection.command(*command)
    connection.close()
    assert stat.S_IMODE((tmp_path / "store").stat().st_mode) == 0o700
    for url in (f"unix://{tmp_path}/store/store.sock", f"unix://rolecall:guess@{tmp_path}/store/store.sock"):
        with pytest.raises(ConfigError, match="refuses"):
            connect(StoreSection(url=SecretStr(url)))
    assert not [
        item for item in psutil.Process(server.pid).net_connections(kind="inet") if item.status == psutil.CONN_LISTEN
    ]


def test_what_was_acknowledged_survives_kill_9(make_embedded_store: MakeEmbeddedStore, make_store: MakeStore) -> None:
    server = make_embedded_store()
    store = make_store(server.start(), "test")
    groups = store.committed(3)
    store.admit(2)
    claim = store.worker("r.0").claim(1)[0]
    before = store.ledger.snapshot()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    while server.alive:
        time.sleep(0.01)

    server.start()
    assert store.ledger.snapshot() == before
    assert store.worker("r.0").renew([claim]) == []
    store.commit(store.worker("r.0"), claim)
    store.rows.read([row for group in groups for row in group.rows], ["token_ids"])
    assert list(store.ledger.live().values()) == [GroupState.COMMITTED] * 4 + [GroupState.ADMITTED]
    store.admit(1)


def test_calls_under_way_outlive_a_restart_of_the_server(
    make_embedded_store: MakeEmbeddedStore, make_store: MakeStore
) -> None:
    server = make_embedded_store()
    store = make_store(server.start(), "test")
    admitted = threading.Thread(target=store.admit, args=[300])
    admitted.start()
    for _ in range(3):
        time.sleep(0.1)
        server.stop()
        server.start()
    admitted.join(60)
    assert store.balance() == (300, 0, 0, 300)
    store.publish(0, 0, "r.0")
    assert [claim.group.gid for claim in store.worker("r.0").claim(1000)] == list(range(300))


def test_a_stop_leaves_no_socket_and_no_process_and_may_be_repeated(
    make_embedded_store: MakeEmbeddedStore, tmp_path: Path
) -> None:
    server = make_embedded_store(tmp_path / "store")
    server.start()
    server.start()
    pid = server.pid
    server.stop()
    server.stop()
    assert pid is not None
    assert gone(pid)
    assert not server.alive
    assert sorted(path.name for path in (tmp_path / "store").iterdir()) == ["appendonlydir", "store.log"]


def test_the_server_dies_with_its_parent_even_by_kill_9_and_frees_the_directory(
    make_embedded_store: MakeEmbeddedStore, tmp_path: Path
) -> None:
    program = (
        "import sys, time; from pathlib import Path; from rolecall.store.embedded import EmbeddedStore\n"
        "server = EmbeddedStore(Path(sys.argv[1]), 'test', 2**26); server.start(); print(server.pid, flush=True); "
        "time.sleep(60)"
    )
    parent = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / "store")], stdout=subprocess.PIPE, text=True
    )
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait(30)
    parent.stdout.close()
    assert gone(pid)
    assert not (tmp_path / "store" / "store.sock").exists()
    make_embedded_store(tmp_path / "store").start()


def test_a_second_server_in_the_same_directory_is_refused(
    make_embedded_store: MakeEmbeddedStore, tmp_path: Path
) -> None:
    server = make_embedded_store(tmp_path / "store")
    server.start()
    second = make_embedded_store(tmp_path / "store")
    with pytest.raises(RunLockedError, match="another store"):
        second.start(lock_timeout_s=0.3)
    assert server.alive
    second.stop()
    connect(StoreSection(url=SecretStr(server.url))).close()


def test_a_directory_too_deep_for_a_socket_path_gets_one_elsewhere(
    make_embedded_store: MakeEmbeddedStore, tmp_path: Path
) -> None:
    deep = tmp_path / ("x" * embedded.MAX_SOCKET_PATH)
    server = make_embedded_store(deep)
    url = server.start()
    path = Path(place_of(url))
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    connect(StoreSection(url=SecretStr(url))).close()
    server.stop()
    assert not path.parent.exists()
    assert server.start() != ""


def test_a_path_with_spaces_and_quotes_works(make_embedded_store: MakeEmbeddedStore, tmp_path: Path) -> None:
    server = make_embedded_store(tmp_path / 'my "run" here')
    connect(StoreSection(url=SecretStr(server.start()))).close()


@pytest.mark.parametrize("name", ["exp#3", "really?", "50%25", "100%", "a@b", "é"])
def test_a_path_of_characters_that_mean_something_in_a_url_works(
    make_embedded_store: MakeEmbeddedStore, tmp_path: Path, name: str
) -> None:
    url = make_embedded_store(tmp_path / name).start()
    connection = connect(StoreSection(url=SecretStr(url)))
    connection.command("SET", "{rl:test}:x", "1")
    connection.close()
    assert place_of(url) == str(tmp_path / name / "store.sock")


def test_a_path_that_is_not_ascii_works_where_names_of_files_are_not_utf_8(tmp_path: Path) -> None:
    localedef = shutil.which("localedef")
    (made := tmp_path / "locales").mkdir()
    command = [str(localedef), "-i", "en_US", "-f", "ISO-8859-1", str(made / "en_US.ISO-8859-1")]
    if localedef is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("this machine has nothing to make a locale of")
    program = (
        "import sys; from pathlib import Path; from rolecall.store.embedded import EmbeddedStore\n"
        "assert sys.getfilesystemencoding() == 'iso8859-1'\n"
        "server = EmbeddedStore(Path(sys.argv[1]), 'test', 2**26); server.start(); server.ping(); server.stop()"
    )
    latin = {**os.environ, "PYTHONUTF8": "0", "LOCPATH": str(made), "LC_ALL": "en_US.ISO-8859-1"}
    command = [sys.executable, "-c", program, str(tmp_path / "é")]
    ended = subprocess.run(command, env=latin, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "é" / "store.log").exists()


def test_a_long_tmpdir_does_not_keep_a_deep_directory_from_a_socket(
    make_embedded_store: MakeEmbeddedStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (long := tmp_path / ("x" * 90)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    url = make_embedded_store(long / "store").start()
    assert place_of(url).startswith("/tmp/rolecall-")


def test_where_no_socket_fits_the_server_is_not_started(
    make_embedded_store: MakeEmbeddedStore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (long := tmp_path / ("x" * 90)).mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(long))
    monkeypatch.setattr(embedded, "MAX_SOCKET_PATH", 20)
    server = make_embedded_store(long / "store")
    with pytest.raises(ConfigError, match=r"shorten run\.dir or TMPDIR"):
        server.start()
    assert server.num_starts == 0


def test_a_binary_that_is_not_there_is_a_configuration_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"store\.binary"):
        EmbeddedStore(tmp_path, "test", 2**26, str(tmp_path / "valkey-server"))


def test_a_server_that_ends_at_once_is_reported_with_its_log(make_embedded_store: MakeEmbeddedStore) -> None:
    with pytest.raises(StoreUnavailableError, match="ended at once"):
        make_embedded_store(binary="/bin/false").start()


def test_it_must_be_started_from_the_main_thread(make_embedded_store: MakeEmbeddedStore) -> None:
    server = make_embedded_store()
    refused: list[RuntimeError] = []

    def start() -> None:
        try:
            server.start()
        except RuntimeError as error:
            refused.append(error)

    thread = threading.Thread(target=start)
    thread.start()
    thread.join(30)
    assert len(refused) == 1


def fill(store: StoreUnderTest, filler: list[RowRef], num_tokens: int) -> None:
    while True:
        filler.append(store.rows.ref(f"{len(filler)}/0", "r.0-1", num_tokens))
        store.rows.stage(filler[-1], {"token_ids": np.zeros(num_tokens, np.int32)}, TrajectoryMeta(), 600)


def test_a_full_store_refuses_new_work_and_still_trains_what_it_holds(
    make_embedded_store: MakeEmbeddedStore, make_store: MakeStore
) -> None:
    store = make_store(make_embedded_store(max_bytes=8 * 2**20).start(), "test")
    groups = store.committed(3)
    store.admit(2)
    queue = store.worker("r.0")
    claim = queue.claim(1)[0]
    group = store.stage(claim)

    filler: list[RowRef] = []
    for num_tokens in (50_000, 2_000):
        with pytest.raises(StoreFullError):
            fill(store, filler, num_tokens)
    with pytest.raises(StoreFullError):
        store.admit(1000)
    admitted = store.ledger.counts().admitted

    assert queue.renew([claim]) == []
    assert queue.commit(claim, group, {(0, DIGEST)})
    store.rows.put(groups[0].rows, [{"reward": np.ones(1, np.float32)}] * 2)
    store.ledger.seal(store.batch(0, groups))
    store.ledger.commit_step(0, [])
    store.ledger.drop(3, "late", "x" * 100_000)
    assert store.ledger.sweep(store.rows, 1) == 8
    store.rows.delete(filler)
    store.admit(1)
    assert store.balance() == (admitted + 1, 3, 1, admitted - 3)


def test_a_store_that_reads_its_file_is_waited_for(
    make_embedded_store: MakeEmbeddedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = make_embedded_store()
    store.start()
    begun = time.monotonic()

    def ping(_: object) -> None:
        if time.monotonic() < begun + 2.0:
            raise exceptions.BusyLoadingError("the dataset is being loaded")

    monkeypatch.setattr(embedded, "START_TIMEOUT_S", 0.5)
    monkeypatch.setattr(Redis, "ping", ping)
    store.wait_until_ready()
    assert time.monotonic() > begun + 2.0
