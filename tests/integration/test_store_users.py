"""What each role's user of the store may do, on a real server that holds two runs."""

import io
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from pydantic import SecretStr

from rolecall.commands.cli import main
from rolecall.commands.store_acl import store_acl
from rolecall.errors import ConfigError
from rolecall.settings import StoreSection
from rolecall.store.audit import audit
from rolecall.store.connection import Connection, connect
from rolecall.store.embedded import EmbeddedStore
from rolecall.store.ledger import Ledger
from rolecall.store.sealed import read_ctl
from rolecall.store.users import ROLES, rights
from tests.conftest import MakeSettings
from tests.fixtures_servers import StartServer, make_cluster, one_group_from_admission_to_training
from tests.ports import free_port
from tests.servers import DURABLE, PlainServers, Replicated, until
from tests.twins.launched import write_light_config

ADMIN = {"username": "admin", "password": "pw"}
RUNS = ("one", "two")


class Server:
    """A server with the users of two runs."""

    def __init__(self, port: int, folder: Path) -> None:
        self._folder = folder
        self._opened: list[Connection] = []
        self.admin = redis.Redis(port=port, decode_responses=True, **ADMIN)  # type: ignore[arg-type]

    def connect(self, run: str, role: str) -> Connection:
        """A connection as `role` makes it."""
        url = SecretStr((self._folder / run / role / "store-url").read_text())
        self._opened.append(connect(StoreSection(url=url), verify=role == "controller"))
        return self._opened[-1]

    def close(self) -> None:
        for connection in self._opened:
            connection.close()
        self.admin.close()


@pytest.fixture(params=["redis", "redis+cluster"])
def server(
    request: pytest.FixtureRequest, start_server: StartServer, make_settings: MakeSettings, tmp_path: Path
) -> Iterator[Server]:
    acl, admin = tmp_path / "users.acl", "user admin on >pw ~* &* +@all"
    acl.write_text(f"{admin}\n")
    cluster = {"cluster_enabled": "yes", "cluster_port": str(free_port())} if "cluster" in request.param else {}
    port = start_server(**DURABLE, **cluster, aclfile=str(acl))
    lines = [admin]
    for run in RUNS:
        store = {"url": f"{request.param}://anybody:secret@127.0.0.1:{port}"}
        settings = make_settings(run={"name": run, "dir": str(tmp_path / "run"), "num_steps": 1}, store=store)
        store_acl(settings, tmp_path / run, io.StringIO())
        lines += (tmp_path / run / "users.acl").read_text().splitlines()
    acl.write_text("".join(f"{line}\n" for line in dict.fromkeys(lines)))
    if cluster:
        make_cluster(port, **ADMIN)
    server = Server(port, tmp_path)
    server.admin.acl_load()
    yield server
    server.close()


def test_every_role_does_its_work_as_its_own_user_and_tries_nothing_else(server: Server) -> None:
    for run, trainer in zip(RUNS, ("actor", "critic"), strict=True):
        controller = server.connect(run, "controller")
        one_group_from_admission_to_training(
            controller, run, server.connect(run, "rollout"), server.connect(run, trainer)
        )
        assert server.connect(run, "reference").command("HGET", f"{{rl:{run}}}:run", "ctl") == b"1"
    refused = server.admin.execute_command("ACL", "LOG")  # type: ignore[no-untyped-call]
    assert [entry for entry in refused if "client|" not in str(entry)] == []


def test_a_user_of_an_earlier_release_commits_nothing_halfway_and_is_told_to_be_made_again(server: Server) -> None:
    rules = rights("rollout", "one").replace(" ~{rl:one}:played", "")
    (user,) = (
        name for name in map(str, server.admin.acl_users()) if name.startswith("one.") and name.endswith("rollout")
    )
    server.admin.execute_command("ACL", "SETUSER", user, "resetkeys", *rules.split())  # type: ignore[no-untyped-call]
    controller, rollout = server.connect("one", "controller"), server.connect("one", "rollout")
    with pytest.raises(ConfigError, match=r"make its users again \(rolecall store-acl\)|refuses this user"):
        one_group_from_admission_to_training(controller, "one", rollout, controller)
    counts = Ledger(controller, "one").counts()
    assert (counts.queued + counts.generating, counts.committed) == (4, 0)


def test_users_work_through_sentinels_and_on_the_replica_that_takes_over(
    servers: PlainServers, make_settings: MakeSettings, tmp_path: Path
) -> None:
    acl = tmp_path / "users.acl"
    acl.write_text("user admin on >pw ~* &* +@all\n")
    replicated = Replicated(servers, login=("admin", "pw"), aclfile=str(acl))
    store = {"url": replicated.url.replace("://", "://anybody:secret@")}
    settings = make_settings(run={"name": "one", "dir": str(tmp_path / "run"), "num_steps": 1}, store=store)
    store_acl(settings, tmp_path / "one", io.StringIO())
    acl.write_text(acl.read_text() + (tmp_path / "one" / "users.acl").read_text())
    for data in replicated.data:
        data.command("ACL", "LOAD")
    server = Server(replicated.master.port, tmp_path)
    roles = {role: server.connect("one", role) for role in ROLES}
    one_group_from_admission_to_training(roles["controller"], "one", roles["rollout"], roles["actor"])
    assert server.admin.wait(2, 10_000) == 2
    before = replicated.master_port()
    replicated.kill_master()
    until(lambda: replicated.master_port() != before, "another master")
    assert Ledger(roles["controller"], "one").counts().trained == 4
    for role in ("actor", "critic", "reference", "rollout"):
        assert read_ctl(roles[role], "one") == 1
    with pytest.raises((redis.ResponseError, ConfigError), match=r"(?i)no permission|NOPERM|refuses this user"):
        roles["rollout"].command("HSET", "{rl:one}:run", "ctl", "9")
    server.close()


RUN, ROW = "{rl:one}:", "{rl:one:0}:row:0/0:r.0-1"
FORGED = ("EVAL", "return redis.call(unpack(ARGV))", 1)
REFUSED: dict[str, list[tuple[Any, ...]]] = {
    "controller": [
        ("FLUSHALL",),
        ("CONFIG", "SET", "appendonly", "no"),
        ("ACL", "SETUSER", "one.rollout", "~*"),
        ("SHUTDOWN",),
        ("KEYS", "*"),
        ("HGET", "{rl:two}:run", "ctl"),
        ("HSET", "{rl:two:0}:row:0/0:r.0-1", "reward", "1"),
        (*FORGED, RUN, "HSET", "{rl:two}:run", "ctl", "9"),
    ],
    "rollout": [
        ("FLUSHALL",),
        ("CONFIG", "GET", "*"),
        ("SCAN", "0"),
        ("SCRIPT", "FLUSH"),
        ("DEL", ROW),
        ("HGET", "{rl:two}:run", "ctl"),
        ("XRANGE", "{rl:two}:prompts", "-", "+"),
        ("HSET", RUN + "run", "ctl", "9"),
        ("HGET", RUN + "batch:0", "group"),
        ("HSET", RUN + "versions", "7", "1 d 1"),
        ("HSET", RUN + "garbage", "group:1", ""),
        ("XADD", RUN + "dead", "*", "gid", "1"),
        (*FORGED, RUN, "HSET", RUN + "run", "ctl", "9"),
        (*FORGED, RUN, "DEL", RUN + "prompts"),
        (*FORGED, RUN, "HGET", "{rl:two}:run", "ctl"),
    ],
    "actor": [
        ("FLUSHALL",),
        ("INFO",),
        ("DEL", ROW),
        ("HSET", ROW, "reward", "9"),
        ("HSET", RUN + "run", "ctl", "9"),
        ("HSETNX", RUN + "batch:0", "group", "9"),
        ("XRANGE", RUN + "prompts", "-", "+"),
        (*FORGED, ROW, "HSET", ROW, "reward", "9"),
        (*FORGED, ROW, "HSETNX", RUN + "batch:9", "group", "9"),
        ("HGET", "{rl:two:0}:row:0/0:r.0-1", "reward"),
    ],
    "reference": [("HGET", RUN + "batch:0", "group"), ("HSET", ROW, "reward", "9"), ("UNLINK", ROW)],
}


@pytest.mark.parametrize("server", ["redis"], indirect=True)
def test_no_role_reaches_beyond_its_part_of_its_run_by_a_command_or_a_script(server: Server, tmp_path: Path) -> None:
    one_group_from_admission_to_training(server.connect("one", "controller"), "one")
    for role, commands in {**REFUSED, "critic": REFUSED["actor"]}.items():
        client = server.connect("one", role).ledger
        for command in commands:
            with pytest.raises(redis.ResponseError, match=r"(?i)no permission|NOPERM|can't access"):
                client.execute_command(*command)  # type: ignore[no-untyped-call]
    assert Ledger(server.connect("one", "controller"), "one").position().step == 1
    assert audit(server.connect("one", "controller"), "one", tmp_path).problems == ()


def test_a_wrong_or_missing_password_is_a_clear_error_for_every_role(
    make_embedded_store: Callable[[], EmbeddedStore],
) -> None:
    server = make_embedded_store()
    server.start()
    for role in ROLES:
        connect(StoreSection(url=SecretStr(server.url_of(role))), verify=role == "controller").close()
        password = server.url_of(role).partition("@")[0].rpartition(":")[2]
        for wrong in (server.url_of(role).replace(password, "guess"), f"unix://{server.url.partition('@')[2]}"):
            with pytest.raises(ConfigError, match=r"the store refuses this user: .*; check the user, password"):
                connect(StoreSection(url=SecretStr(wrong)), verify=role == "controller")


def test_the_command_writes_for_the_owner_alone_and_says_what_is_for_whom(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, folder = write_light_config(tmp_path), tmp_path / "users"
    words = ["store-acl", str(config), str(folder)]
    assert main(words) == 2
    assert "store.url is not set" in capsys.readouterr().err
    words += ["--store.url", "redis+sentinel://me:mine@a:1,b:2/main?db=1"]
    assert main(words) == 0
    said = capsys.readouterr().out.splitlines()
    files = [folder / "users.acl", *(folder / role / "store-url" for role in ROLES)]
    for file, line in zip(files, said, strict=True):
        assert line.startswith(f"{file}: ")
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    for role, file in zip(ROLES, files[1:], strict=True):
        start, _, password = file.read_text().partition("@")[0].rpartition(":")
        assert start.startswith("redis+sentinel://")
        assert start.endswith(f".{role}")
        assert file.read_text().endswith("@a:1,b:2/main?db=1")
        assert password not in files[0].read_text()
    assert main(words) == 2
    assert "users.acl exists; delete it to make new passwords" in capsys.readouterr().err
    made = [file.read_text() for file in files]
    assert main([*words, "--once"]) == 0
    assert [file.read_text() for file in files] == made


def test_a_role_that_has_no_part_in_the_store_has_no_user() -> None:
    with pytest.raises(ValueError, match="'reward' does not use the store"):
        rights("reward", "run")
