"""How the store is reached: every kind of URL, what is demanded of a server, what becomes of lost connections."""

import threading
import time
from collections.abc import Callable
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import redis
from pydantic import SecretStr
from redis.cluster import RedisCluster

from rolecall.errors import ConfigError, StoreUnavailableError
from rolecall.settings import StoreSection
from rolecall.store import scripts
from rolecall.store.audit import audit
from rolecall.store.connection import Connection, connect
from rolecall.store.embedded import EmbeddedStore
from rolecall.store.ledger import Ledger
from rolecall.store.position import Garbage, RunPosition, SuccessRate
from rolecall.store.prompts import PromptQueue
from rolecall.store.rows import Rows
from rolecall.v1.trajectory_pb2 import CommittedGroup, TrainBatch, TrajectoryMeta
from tests.fixtures_servers import StartServer, make_cluster, one_group_from_admission_to_training
from tests.fixtures_store import DIGEST, ForgetfulRedis, StoreUnderTest, sample_group
from tests.ports import free_port
from tests.servers import DURABLE, PlainServers, until

SCRIPTS = [
    item.name.removesuffix(".lua")
    for item in (files("rolecall.store") / "scripts").iterdir()
    if item.name != "common.lua"
]


@pytest.fixture
def tmp_users(tmp_path: Path) -> Callable[[str, str], Path]:
    """Writes an ACL file with the rights of `default` and of `rolecall`, whose password is pw."""

    def write(default: str, ours: str) -> Path:
        file = tmp_path / f"{len(list(tmp_path.iterdir()))}.acl"
        file.write_text(f"user default {default}\nuser rolecall on >pw {ours}\n")
        return file

    return write


def section(url: str, **options: Any) -> StoreSection:
    return StoreSection(url=SecretStr(url), **options)


def test_a_whole_life_of_a_group_works_on_a_plain_server_with_a_password(start_server: StartServer) -> None:
    port = start_server(**DURABLE, requirepass="secret")
    connection = connect(section(f"redis://:secret@127.0.0.1:{port}"))
    one_group_from_admission_to_training(connection, "run")
    connection.close()
    with pytest.raises(ConfigError, match="refuses"):
        connect(section(f"redis://:wrong@127.0.0.1:{port}"))


def test_a_role_that_is_started_while_its_run_is_not_under_way_is_told_what_to_do() -> None:
    with pytest.raises(ConfigError, match=r"store\.url is not set.* while `rolecall train` is under way"):
        connect(StoreSection())


def test_a_default_user_without_rights_is_refused_for_its_transactions_may_not_be_replayed(
    start_server: StartServer, tmp_users: Callable[[str, str], Path]
) -> None:
    def server(default: str, ours: str) -> str:
        file = tmp_users(default, ours)
        return f"redis://rolecall:pw@127.0.0.1:{start_server(**DURABLE, aclfile=str(file))}"

    ours = "~* &* +@all -@admin -@dangerous +info +config|get"
    for default in ("off", "on >pw ~* +@read", "off ~rl:* +@all"):
        with pytest.raises(
            ConfigError, match=r"lose the run at its next restart: .*ACL SETUSER default ~\* &\* \+@all"
        ):
            connect(section(server(default, f"{ours} +acl|getuser")))
    with pytest.raises(ConfigError, match=r"\+acl\|getuser"):
        connect(section(server("off ~* &* +@all", ours)))
    no_acl = f"{ours} -acl"
    with pytest.raises(ConfigError, match=r"\+acl\|getuser"):
        connect(section(server("off ~* &* +@all", no_acl)))
    for rights in (ours, no_acl):
        connect(section(server("off", rights), durability="relaxed")).close()
    connection = connect(section(server("off ~* &* +@all", f"{ours} +acl|getuser")))
    one_group_from_admission_to_training(connection, "run")
    connection.close()


def test_memory_that_is_less_than_what_admission_counts_on_is_refused(start_server: StartServer) -> None:
    url = f"redis://127.0.0.1:{start_server(**DURABLE, maxmemory=str(2**20))}"
    with pytest.raises(ConfigError, match=r"may take 1048576 bytes \(maxmemory\) and store.max_bytes is 1048577"):
        connect(section(url, max_bytes=2**20 + 1))
    connect(section(url, max_bytes=2**20)).close()


@pytest.mark.parametrize("how", ["renamed", "denied"])
def test_a_server_that_does_not_say_how_it_keeps_data_can_be_vouched_for(
    start_server: StartServer, tmp_users: Callable[[str, str], Path], how: str
) -> None:
    if how == "renamed":
        url = f"redis://127.0.0.1:{start_server(**DURABLE, rename_command='CONFIG ' + chr(34) * 2)}"
        unseen = ["whether what it acknowledges is on disk (appendonly, appendfsync)"]
    else:
        users = tmp_users("off", "~* &* +@all -@admin -@dangerous +info")
        url = f"redis://rolecall:pw@127.0.0.1:{start_server(**DURABLE, aclfile=str(users))}"
        unseen = [
            "whether what it acknowledges is on disk (appendonly, appendfsync)",
            "the rights of its user `default`, with which it may replay its append-only file",
        ]
    with pytest.raises(ConfigError, match=r"store\.durability: vouched"):
        connect(section(url))
    connection = connect(section(url, durability="vouched"))
    assert list(connection.taken_on_trust) == unseen
    one_group_from_admission_to_training(connection, "run")
    connection.close()
    connect(section(url, durability="relaxed")).close()


def test_what_a_server_says_is_not_vouched_for(start_server: StartServer) -> None:
    with pytest.raises(ConfigError, match="appendonly yes, appendfsync everysec"):
        connect(section(f"redis://127.0.0.1:{start_server(appendonly='yes')}", durability="vouched"))


def test_a_user_and_password_reach_the_master_behind_sentinels_as_they_are_written(
    servers: PlainServers, tmp_users: Callable[[str, str], Path]
) -> None:
    users = tmp_users("off ~* &* +@all", "~* &* +@all").read_text().replace(">pw", ">p@:%/pw")
    file = tmp_users("", "")
    file.write_text(users)
    master = servers.start(**DURABLE, aclfile=str(file))
    lines = (f"sentinel monitor main 127.0.0.1 {master.port} 1", "sentinel down-after-milliseconds main 1000000")
    sentinel = servers.start("--sentinel", lines=lines, requirepass="theirs")
    url = f"redis+sentinel://rolecall:p%40%3A%25%2Fpw@127.0.0.1:{sentinel.port}/main"
    connection = connect(section(f"{url}?password=theirs"))
    one_group_from_admission_to_training(connection, "run")
    connection.close()
    with pytest.raises(StoreUnavailableError, match="No master found"):
        connect(section(url), retry_s=0.1)


def test_refusals_that_pass_are_waited_for(servers: PlainServers) -> None:
    """A master without enough replicas, and one that is demoted under a blocking read."""
    master = servers.start(**DURABLE, min_replicas_to_write="1")
    replica = servers.start(**DURABLE, replicaof=f"127.0.0.1 {master.port}")
    until(lambda: master.replication().get("slave0", {}).get("state") == "online", "the replica")
    connection = connect(section(f"redis://127.0.0.1:{master.port}"))
    ledger = Ledger(connection, "run")
    ledger.lock(0.1)
    replica.kill()
    until(lambda: master.replication()["connected_slaves"] == 0, "a master alone")
    soon = Connection(connection.ledger, retry_s=0.3)
    with pytest.raises(StoreUnavailableError, match="NOREPLICAS"):
        Ledger(soon, "run").lock(0.0)
    with pytest.raises(StoreUnavailableError, match="NOREPLICAS"):
        soon.pipeline([("GET", "key"), ("SET", "key", "value")])
    timer = threading.Timer(0.3, replica.start)
    timer.start()
    ledger.beat()
    timer.join(30)

    def demote_for_a_while() -> None:
        time.sleep(0.2)
        master.command("REPLICAOF", "127.0.0.1", replica.port)
        time.sleep(1.3)
        master.command("REPLICAOF", "NO", "ONE")

    demotion = threading.Thread(target=demote_for_a_while)
    demotion.start()
    assert ledger.read_committed("0", 1, 3.0) == []
    demotion.join(30)
    connection.close()


def test_a_server_that_reads_its_file_is_waited_for_and_not_taken_for_one_without(servers: PlainServers) -> None:
    """Until it has read its append-only file it says that it has none."""
    num_writes, delay_us = 30_000, 100
    server = servers.start(**DURABLE, key_load_delay=str(delay_us))
    with redis.Redis(port=server.port) as client, client.pipeline(transaction=False) as pipeline:
        for number in range(num_writes):
            pipeline.set("key", number)
        pipeline.execute()
    server.kill()
    server.start()
    began = time.monotonic()
    connection = connect(section(f"redis://127.0.0.1:{server.port}"))
    assert time.monotonic() - began > num_writes * delay_us * 1e-6 / 2, "it was still reading"
    assert connection.command("GET", "key") == str(num_writes - 1).encode()
    connection.close()


def test_a_server_whose_access_lists_were_taken_away_is_not_refused_for_them(start_server: StartServer) -> None:
    port = start_server(**DURABLE, rename_command='ACL ""')
    connect(section(f"redis://127.0.0.1:{port}")).close()


def test_a_whole_life_of_a_group_works_on_a_cluster(start_server: StartServer) -> None:
    port = start_server(**DURABLE, cluster_enabled="yes", cluster_port=str(free_port()))
    make_cluster(port)
    connection = connect(section(f"redis+cluster://127.0.0.1:{port}"))
    assert isinstance(connection.ledger, RedisCluster)
    one_group_from_admission_to_training(connection, "run")
    connection.close()


def test_a_whole_life_of_a_group_works_through_sentinels(start_server: StartServer) -> None:
    port = start_server(**DURABLE)
    sentinel = start_server("--sentinel", sentinel=f"monitor main 127.0.0.1 {port} 1", save='""')
    connection = connect(section(f"redis+sentinel://127.0.0.1:{sentinel}/main"))
    one_group_from_admission_to_training(connection, "run")
    connection.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"appendonly": "no"}, "appendfsync always"),
        ({"appendonly": "yes", "appendfsync": "everysec"}, "appendfsync always"),
        ({**DURABLE, "maxmemory-policy": "allkeys-lru"}, "noeviction"),
    ],
)
def test_a_server_that_may_lose_writes_is_refused_with_the_remedy(
    start_server: StartServer, options: dict[str, str], message: str
) -> None:
    url = f"redis://127.0.0.1:{start_server(**options)}"
    with pytest.raises(ConfigError, match=message):
        connect(section(url))
    if "maxmemory-policy" not in options:
        connect(section(url, durability="relaxed")).close()


def test_a_url_that_cannot_be_used_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"store\.url"):
        connect(section("redis+sentinel://localhost"))


def test_an_embedded_store_that_nobody_started_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"store\.url is not set"):
        connect(StoreSection())


def test_a_server_that_is_gone_is_unavailable_after_the_retries() -> None:
    client = redis.Redis(port=1, socket_connect_timeout=0.1)
    started = time.monotonic()
    with pytest.raises(StoreUnavailableError):
        Connection(client, retry_s=0.5).command("PING")
    assert time.monotonic() - started > 0.3
    client.close()


class CountingRedis(ForgetfulRedis):
    """Also keeps which scripts lost an answer."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.scripts: set[str] = set()

    def execute_command(self, *args: Any, **options: Any) -> Any:
        if self.lose and args[0] == "EVALSHA":
            self.scripts.add(args[1])
        return super().execute_command(*args, **options)

    def losing(self, call: Callable[[], Any]) -> Any:
        """What `call` answers when one answer gets lost on its way."""
        self.lose = 1
        answer = call()
        assert self.lose == 0
        return answer


def test_a_whole_life_of_a_group_survives_the_loss_of_every_answer(store_server: EmbeddedStore, tmp_path: Path) -> None:
    client = CountingRedis.from_url(store_server.url, protocol=2)
    assert isinstance(client, CountingRedis)
    connection = Connection(client)
    run = "forgetful"
    ledger, queue, rows = Ledger(connection, run), PromptQueue(connection, run, "r.0"), Rows(connection, run, 2)
    losing = client.losing
    assert losing(lambda: ledger.lock(0.1)) == 1
    for gid in range(3):
        losing(partial(ledger.admit, sample_group(gid, 1), b""))
    losing(lambda: ledger.begin_publish(0, 0))
    losing(lambda: ledger.attest(0, 0, DIGEST, ["r.0"]))
    claims = losing(lambda: queue.claim(3))
    assert [(claim.group.gid, claim.deliveries) for claim in claims] == [(0, 1), (1, 1), (2, 1)]
    assert losing(lambda: queue.renew(claims)) == []
    losing(lambda: queue.release(claims[2:]))
    ref = rows.ref("0/0", claims[0].token, 1)
    losing(lambda: rows.stage(ref, {"token_ids": np.zeros(1, np.int32)}, TrajectoryMeta(), 60))
    assert not losing(lambda: queue.commit(claims[0], CommittedGroup(gid=0, rows=[ref]), {(0, DIGEST)}))
    losing(lambda: rows.persist([ref]))
    losing(lambda: rows.put([ref], [{"reward": np.ones(1, np.float32)}]))
    losing(lambda: ledger.expel("r.0"))
    losing(lambda: ledger.drop(1, "filtered"))
    assert not losing(lambda: ledger.rate("p", SuccessRate(0, 0.5))), "it is kept, and the answer lost"
    losing(lambda: ledger.begin_batch(0, [0]))
    losing(lambda: ledger.seal(TrainBatch(step=0, digest="b", rows=[ref], gids=[0])))
    losing(lambda: ledger.measured(0, []))
    losing(lambda: ledger.commit_step(0, []))
    counts = ledger.counts()
    assert (counts.admitted, counts.trained, dict(counts.dropped), counts.queued) == (3, 1, {"filtered": 1}, 1)
    assert losing(lambda: ledger.sweep(rows, 1)) == 1
    losing(lambda: ledger.begin_publish(1, 1))
    losing(lambda: ledger.attest(1, 1, DIGEST, ["r.0"]))
    assert losing(lambda: queue.claim(1))[0].group.gid == 2
    losing(lambda: ledger.reap([entry for entry in ledger.pending() if entry.entry_id == claims[2].entry_id], 9))
    again = losing(lambda: queue.claim(1))[0]
    assert (again.group.gid, again.deliveries) == (2, 2), "the release does not count, the reaping once"
    assert not losing(lambda: queue.abandon(again, "failed", 1)), "it was given back, and the answer lost"
    assert losing(lambda: ledger.reap([])) == [(2, "r.0: failed")]
    losing(lambda: ledger.note_scored([(2, 0.5)]))
    losing(ledger.next_epoch)
    losing(lambda: ledger.pause(True))
    losing(lambda: ledger.evaluated(1))
    losing(lambda: ledger.reported(1))
    losing(lambda: ledger.forget(Garbage((), ("group:9",))))
    losing(ledger.fenced.give_up_rows)
    assert ledger.fenced.take_set_back()
    assert (
        losing(
            lambda: ledger.start_lineage(RunPosition(lineage=1, step=1, next_gid=3, trained=1, dropped={"filtered": 1}))
        )
        == 1_000_003
    )
    losing(ledger.beat)
    losing(ledger.unlock)
    for look in (ledger.snapshot, ledger.pending, lambda: audit(connection, run, tmp_path)):
        losing(look)
    assert audit(connection, run, tmp_path).problems == ()
    assert client.scripts == {scripts.digest(name) for name in SCRIPTS}, "a script is not tried here"
    client.close()


def test_a_blocking_read_ends_before_the_sockets_patience(store: StoreUnderTest) -> None:
    assert not store.attested("r.0").wait(600)
    assert store.ledger.read_committed("0", 1, 1.5) == []
