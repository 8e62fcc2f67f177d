"""Plain servers for tests, as people run them: fixtures `servers` and `start_server`; a group's whole life in one."""

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import redis

from rolecall.store.connection import Connection
from rolecall.store.embedded import EmbeddedStore
from rolecall.store.ledger import Ledger
from rolecall.store.prompts import PromptQueue
from rolecall.store.rows import Rows
from rolecall.store.sealed import read_ctl, read_sealed
from rolecall.v1.trajectory_pb2 import CommittedGroup, RowRef, TrainBatch, TrajectoryMeta
from tests.fixtures_store import DIGEST, sample_group
from tests.servers import PlainServers

StartServer = Callable[..., int]


@pytest.fixture
def servers(tmp_path: Path, store_server: EmbeddedStore) -> Iterator[PlainServers]:
    """Servers that end with the test."""
    servers = PlainServers(tmp_path / "servers", store_server.binary)
    yield servers
    servers.stop()


@pytest.fixture
def start_server(servers: PlainServers) -> StartServer:
    """Starts a plain server, as people run them, with the given options on a free port; returns the port."""
    return lambda *arguments, **options: servers.start(*arguments, **options).port


def make_cluster(port: int, **login: str) -> None:
    """Gives all slots to the server at `port`, a cluster of one."""
    admin = redis.Redis(port=port, **login)  # type: ignore[arg-type]
    admin.execute_command("CLUSTER", "ADDSLOTSRANGE", 0, 16383)  # type: ignore[no-untyped-call]
    deadline = time.monotonic() + 10
    while b"cluster_state:ok" not in admin.execute_command("CLUSTER", "INFO") and time.monotonic() < deadline:  # type: ignore[no-untyped-call]
        time.sleep(0.05)
    admin.close()


def one_group_from_admission_to_training(
    connection: Connection, run: str, rollout: Connection | None = None, trainer: Connection | None = None
) -> None:
    """Four groups of one response; each role by its own connection, where they have several."""
    rollout, trainer = rollout or connection, trainer or connection
    ledger, rows, queue = Ledger(connection, run), Rows(rollout, run, 4), PromptQueue(rollout, run, "r.0")
    ledger.lock(1.0)
    for gid in range(4):
        ledger.admit(sample_group(gid, 1), b"cursor")
    ledger.begin_publish(0, 0)
    ledger.attest(0, 0, DIGEST, ["r.0"])
    assert read_ctl(rollout, run) == read_ctl(trainer, run) == ledger.ctl
    assert queue.wait(1)
    first = queue.claim(1)
    assert queue.renew(first) == []
    assert queue.abandon(first[0], "it failed here")
    assert queue.release(queue.claim(4), "a drain") == 4
    refs: list[RowRef] = []
    for claim in queue.claim(4):
        refs.append(rows.ref(f"{claim.group.gid}/0", claim.token, 1))
        rows.stage(refs[-1], {"token_ids": np.zeros(1, np.int32)}, TrajectoryMeta(), 60)
        queue.commit(claim, CommittedGroup(gid=claim.group.gid, rows=refs[-1:]), {(0, DIGEST)})
    rows.persist(refs)
    assert len(ledger.read_committed("0", 10, 1)) == 4
    Rows(connection, run, 4).put(refs, [{"reward": np.ones(1, np.float32)}] * 4)
    ledger.seal(TrainBatch(step=0, digest="b", rows=refs, gids=range(4)))
    read, _ = Rows(trainer, run, 4).read_with_meta(list(read_sealed(trainer, run, 0).rows), ["reward"])
    assert [float(row["reward"][0]) for row in read] == [1.0] * 4
    Rows(trainer, run, 4).put(refs, [{"advantages": np.ones(1, np.float32)}] * 4)
    ledger.commit_step(0, [])
    assert ledger.sweep(Rows(connection, run, 4), 1) == 4
    assert ledger.counts().trained == 4
