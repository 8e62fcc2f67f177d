"""What becomes of calls while the server is killed, stands still, or the network loses its answers: they end, and
nothing is lost or done twice.
"""

import os
import random
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import redis
from pydantic import SecretStr
from redis.backoff import NoBackoff
from redis.retry import Retry

from rolecall.errors import LeaseLostError, NotAttestedError, RowMissingError, StoreUnavailableError
from rolecall.settings import StoreSection
from rolecall.store.audit import audit
from rolecall.store.connection import Connection, connect
from rolecall.store.embedded import EmbeddedStore
from rolecall.store.ledger import Ledger
from rolecall.store.prompts import PromptQueue
from rolecall.store.rows import Rows
from rolecall.v1.trajectory_pb2 import CommittedGroup, TrainBatch, TrajectoryMeta
from tests.fixtures_store import DIGEST, sample_group

NUM_GROUPS = 120
GROUPS_PER_BATCH = 4
WORKERS = ("r.0", "r.1", "r.2")


@dataclass
class BusyRun:
    """A controller and three workers, each in a thread with a connection of its own, that train NUM_GROUPS groups."""

    url: str
    folder: Path
    pause_s: float
    run: str = field(default_factory=lambda: f"busy-{uuid.uuid4().hex[:8]}")
    attested: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    trained: list[int] = field(default_factory=list)
    errors: list[Exception] = field(default_factory=list)

    def play(self, disturb: Callable[[], None]) -> None:
        """Runs to the end, calling `disturb` again and again meanwhile, and counts."""
        threads = [threading.Thread(target=self._guarded, args=[self._control])]
        threads += [threading.Thread(target=self._guarded, args=[self._work, name]) for name in WORKERS]
        for thread in threads:
            thread.start()
        while not self.done.wait(0.02):
            disturb()
        for thread in threads:
            thread.join(60)
        assert self.errors == []
        assert sorted(self.trained) == list(range(NUM_GROUPS))
        connection = self._connect()
        report = audit(connection, self.run, self.folder)
        connection.close()
        assert report.problems == ()
        assert (report.position.admitted, report.position.trained, report.num_live) == (NUM_GROUPS, NUM_GROUPS, 0)

    def _guarded(self, body: Callable[..., None], *args: str) -> None:
        try:
            body(*args)
        except Exception as error:
            self.errors.append(error)
            self.done.set()

    def _connect(self) -> Connection:
        return connect(StoreSection(url=SecretStr(self.url)))

    def _control(self) -> None:
        connection = self._connect()
        ledger, rows = Ledger(connection, self.run), Rows(connection, self.run, 2)
        ledger.lock(1.0)
        ledger.begin_publish(0, 0)
        ledger.attest(0, 0, DIGEST, WORKERS)
        self.attested.set()
        ready: list[CommittedGroup] = []
        position, admitted, step = "0", 0, 0
        while len(self.trained) < NUM_GROUPS:
            ledger.beat()  # confirms the ledger on a server that was started again
            while admitted < NUM_GROUPS and admitted - len(self.trained) < 4 * GROUPS_PER_BATCH:
                ledger.admit(sample_group(admitted, 1), b"")
                admitted += 1
            for entry, group in ledger.read_committed(position, 100, 0.2):
                position = entry
                ready.append(group)
            if len(ready) >= GROUPS_PER_BATCH:
                batch, ready = ready[:GROUPS_PER_BATCH], ready[GROUPS_PER_BATCH:]
                self._train(ledger, rows, step, batch)
                step += 1
        ledger.unlock()
        connection.close()
        self.done.set()

    def _train(self, ledger: Ledger, rows: Rows, step: int, groups: list[CommittedGroup]) -> None:
        refs = [ref for group in groups for ref in group.rows]
        rows.put(refs, [{"reward": np.ones(1, np.float32)}] * len(refs))
        ledger.seal(TrainBatch(step=step, digest=f"b{step}", rows=refs, gids=[group.gid for group in groups]))
        rows.read(refs, ["token_ids", "reward"])
        ledger.commit_step(step, [])
        self.trained += [group.gid for group in groups]
        ledger.drain("history", self.folder / "history.jsonl")
        if step % 5 == 0:
            ledger.sweep(rows, step + 1)

    def _work(self, consumer: str) -> None:
        connection = self._connect()
        queue, rows = PromptQueue(connection, self.run, consumer), Rows(connection, self.run, 2)
        self.attested.wait(60)
        while not self.done.is_set():
            claims = []
            with suppress(NotAttestedError):  # not confirmed yet
                claims = queue.claim(3)
            for claim in claims:
                ref = rows.ref(f"{claim.group.gid}/0", claim.token, 4)
                rows.stage(ref, {"token_ids": np.full(4, claim.group.gid, np.int32)}, TrajectoryMeta(id=ref.id), 60)
                # the answer was lost, and the group is trained and swept by now
                with suppress(LeaseLostError, RowMissingError):
                    queue.commit(claim, CommittedGroup(gid=claim.group.gid, rows=[ref]), {(0, DIGEST)})
                    rows.persist([ref])
                time.sleep(self.pause_s)
            if not claims:
                queue.wait(0.1)
        connection.close()


@pytest.fixture
def server(make_embedded_store: Callable[..., EmbeddedStore]) -> EmbeddedStore:
    server = make_embedded_store(run="*")
    server.start()
    return server


def kill(server: EmbeddedStore) -> None:
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    while server.alive:
        time.sleep(0.002)


def test_a_server_that_is_killed_again_and_again_under_load_loses_and_repeats_nothing(
    server: EmbeddedStore, tmp_path: Path
) -> None:
    dice, kills = random.Random(1), 0

    def disturb() -> None:
        nonlocal kills
        time.sleep(dice.uniform(0.3, 0.6))  # longer than a client pauses between two attempts
        kill(server)
        time.sleep(dice.uniform(0, 0.1))
        server.start()
        kills += 1

    BusyRun(server.url, tmp_path, 0.04).play(disturb)
    assert kills >= 2


def test_a_server_that_stands_still_for_a_while_is_waited_for(server: EmbeddedStore, tmp_path: Path) -> None:
    def disturb() -> None:
        assert server.pid is not None
        os.kill(server.pid, signal.SIGSTOP)
        time.sleep(0.1)
        os.kill(server.pid, signal.SIGCONT)
        time.sleep(0.1)

    BusyRun(server.url, tmp_path, 0.01).play(disturb)


class LossyProxy:
    """Passes bytes to the server at a unix socket and back, and now and then cuts a connection instead of passing an
    answer.
    """

    def __init__(self, path: Path, server: str, one_in: int) -> None:
        self.num_cut = 0
        self._server = server
        self._dice = random.Random(3)
        self._one_in = one_in
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(64)
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        """No more connections."""
        self._listener.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.socket(socket.AF_UNIX)
                far.connect(self._server)
                threading.Thread(target=self._pump, args=[near, far, False], daemon=True).start()
                threading.Thread(target=self._pump, args=[far, near, True], daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, answers: bool) -> None:
        with suppress(OSError):
            while data := source.recv(65536):
                if answers and self._dice.randrange(self._one_in) == 0:
                    self.num_cut += 1
                    break
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        source.close()


def test_a_network_that_loses_answers_makes_nothing_happen_twice(server: EmbeddedStore, tmp_path: Path) -> None:
    socket_path = urlsplit(server.url).path
    proxy = LossyProxy(tmp_path / "proxy.sock", socket_path, one_in=20)
    BusyRun(server.url.replace(socket_path, str(tmp_path / "proxy.sock")), tmp_path, 0.0).play(lambda: None)
    proxy.close()
    assert proxy.num_cut > 20


def test_calls_to_a_server_that_stands_still_end_in_time_and_work_goes_on_afterwards(server: EmbeddedStore) -> None:
    retry_s, socket_timeout_s = 0.6, 0.2
    pool = redis.BlockingConnectionPool.from_url(
        server.url, timeout=socket_timeout_s, socket_timeout=socket_timeout_s, retry=Retry(NoBackoff(), 0)
    )
    client = redis.Redis.from_pool(pool)
    connection, patient = Connection(client, retry_s), Connection(client)
    ledger = Ledger(patient, "still")
    ledger.lock(0.1)
    ledger.begin_publish(0, 0)
    ledger.attest(0, 0, DIGEST, ["r.0"])
    queue = PromptQueue(patient, "still", "r.0")
    hasty, hasty_queue = Ledger(connection, "still"), PromptQueue(connection, "still", "r.0")
    lasted: list[float] = []

    def call(gid: int) -> None:
        started = time.monotonic()
        with pytest.raises(StoreUnavailableError):
            hasty.admit(sample_group(gid), b"") if gid else hasty_queue.claim(1)
        lasted.append(time.monotonic() - started)

    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    threads = [threading.Thread(target=call, args=[gid]) for gid in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    os.kill(server.pid, signal.SIGCONT)
    assert len(lasted) == 8
    assert max(lasted) < retry_s + 3 * socket_timeout_s + 10.0
    first = ledger.position().next_gid
    ledger.admit(sample_group(first), b"")
    assert [claim.group.gid for claim in queue.claim(10)][-1] == first
    counts = ledger.counts()
    assert (counts.admitted, counts.generating, counts.queued) == (first + 1, first + 1, 0)
    patient.close()
