"""Plain Valkey servers as people run them: one by one, behind sentinels, as a cluster. All are real processes."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis

from tests.ports import free_port

DURABLE = {"appendonly": "yes", "appendfsync": "always"}
READY_S = 30.0
"""Deadline of a server, of sentinels that know each other, and of a cluster that agrees."""


def until(holds: Callable[[], object], what: str, timeout_s: float = READY_S) -> None:
    """Returns once `holds` does; TimeoutError says `what` did not come."""
    deadline = time.monotonic() + timeout_s
    while not holds():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not come within {timeout_s:g} s")
        time.sleep(0.02)


@dataclass
class PlainServer:
    """One server process, or sentinel."""

    binary: str
    folder: Path
    port: int
    arguments: tuple[str, ...]
    process: "subprocess.Popen[bytes] | None" = None

    def start(self) -> None:
        """Starts it, also again with what its folder holds; returns when it answers."""
        self.process = subprocess.Popen([self.binary, str(self.folder / "server.conf"), *self.arguments])
        until(self._listens, f"the server on port {self.port}")

    def command(self, *words: str | int) -> Any:
        """What it answers."""
        client = redis.Redis(port=self.port, socket_timeout=5.0)
        try:
            return client.execute_command(*words)  # type: ignore[no-untyped-call]
        finally:
            client.close()

    def replication(self) -> dict[str, Any]:
        """What it says of its replication."""
        client = redis.Redis(port=self.port, socket_timeout=5.0)
        try:
            found: dict[str, Any] = client.info("replication")
            return found
        finally:
            client.close()

    def signal(self, number: signal.Signals) -> None:
        """Sends it a signal."""
        assert self.process is not None
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        """Ends it by kill -9."""
        assert self.process is not None
        self.process.kill()
        self.process.wait(30)

    def stop(self) -> None:
        """Ends it, whatever it does."""
        if self.process is not None and self.process.poll() is None:
            self.signal(signal.SIGCONT)
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.kill()

    def _listens(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


class PlainServers:
    """The servers of one test, which end with it."""

    def __init__(self, folder: Path, binary: str) -> None:
        self._folder = folder
        self._binary = binary
        self.all: list[PlainServer] = []

    def start(self, *arguments: str, lines: Sequence[str] = (), **options: str) -> PlainServer:
        """Starts a server with the given options, and more `lines` of its configuration, on a free port."""
        port = free_port()
        folder = self._folder / str(port)
        folder.mkdir(parents=True)
        settings = {
            "port": str(port),
            "bind": "127.0.0.1",
            "dir": str(folder),
            "save": '""',
            "repl-diskless-sync-delay": "0",
            "logfile": str(folder / "log"),
            **options,
        }
        text = [
            f"{name.replace('_', '-')} {value}"
            for name, value in settings.items()
            if not ("--sentinel" in arguments and name.startswith("repl"))
        ]
        (folder / "server.conf").write_text("\n".join([*text, *lines]) + "\n")
        self.all.append(PlainServer(self._binary, folder, port, arguments))
        self.all[-1].start()
        return self.all[-1]

    def stop(self) -> None:
        """Ends all of them."""
        for server in self.all:
            server.stop()


class Replicated:
    """A master, two replicas and three sentinels, two of which must agree; replicas and sentinels log in with `login`,
    user and password, where one is given.

    Until a master is ended here, no silence of which a busy machine is the cause is taken for its end.
    """

    def __init__(self, servers: PlainServers, login: tuple[str, str] | None = None, **options: str) -> None:
        logins: tuple[str, ...] = ()
        if login is not None:
            user, password = login
            options |= {"masteruser": user, "masterauth": password}
            logins = (f"sentinel auth-user main {user}", f"sentinel auth-pass main {password}")
        self.master = servers.start(**DURABLE, **options)
        of_master = {"replicaof": f"127.0.0.1 {self.master.port}"}
        self.data = [self.master, *(servers.start(**DURABLE, **options, **of_master) for _ in range(2))]
        lines = (
            f"sentinel monitor main 127.0.0.1 {self.master.port} 2",
            "sentinel down-after-milliseconds main 60000",
            "sentinel failover-timeout main 5000",
            *logins,
        )
        self.sentinels = [servers.start("--sentinel", lines=lines) for _ in range(3)]
        until(lambda: self.num_replicas() == 2, "the replicas")
        until(lambda: all(self._knows(sentinel) for sentinel in self.sentinels), "sentinels that know each other")
        self.url = f"redis+sentinel://{','.join(f'127.0.0.1:{item.port}' for item in self.sentinels)}/main"

    @property
    def replicas(self) -> list[PlainServer]:
        """The servers that were replicas at the start."""
        return self.data[1:]

    def num_replicas(self) -> int:
        """Replicas that follow the master."""
        said = self.master.replication()
        return sum(said.get(f"slave{i}", {}).get("state") == "online" for i in range(2))

    def master_port(self) -> int:
        """The port of the master that the first sentinel knows."""
        return int(self.sentinels[0].command("SENTINEL", "GET-MASTER-ADDR-BY-NAME", "main")[1])

    def changes_of_master(self) -> list[str]:
        """What the first sentinel wrote of who was down and who took over, in order."""
        told = ("+sdown master", "+odown", "+try-failover", "+switch-master", "-failover")
        lines = (self.sentinels[0].folder / "log").read_text().splitlines()
        return [line for line in lines if any(event in line for event in told)]

    def cut_off(self) -> None:
        """From here on the replicas get nothing more of what the master acknowledges."""
        for replica in self.replicas:
            replica.signal(signal.SIGSTOP)
        self.master.command("CLIENT", "KILL", "TYPE", "replica")

    def kill_master(self) -> None:
        """Ends the master, which sentinels notice after a second."""
        for sentinel in self.sentinels:
            sentinel.command("SENTINEL", "SET", "main", "down-after-milliseconds", 1000)
        self.master.kill()

    def lose_master(self) -> None:
        """Ends the master after `cut_off`: one of the replicas takes over as it stands."""
        self.kill_master()
        for replica in self.replicas:
            replica.signal(signal.SIGCONT)

    def demote(self, *how: str) -> None:
        """Has a replica take over from a master that lives and goes on acknowledging for a while."""
        self.sentinels[0].command("SENTINEL", "FAILOVER", "main", *how)

    def _knows(self, sentinel: PlainServer) -> bool:
        said = sentinel.command("SENTINEL", "MASTER", "main")
        return bool(said[b"num-slaves"] == said[b"num-other-sentinels"] == b"2")


class Clustered:
    """A cluster of three masters, each with `num_replicas` replicas."""

    def __init__(self, servers: PlainServers, num_replicas: int = 0) -> None:
        self._servers = servers
        self.masters = [self._node() for _ in range(3)]
        self.replicas = [self._node() for _ in range(3 * num_replicas)]
        for first, node in zip((0, 5461, 10923), self.masters, strict=True):
            node.command("CLUSTER", "ADDSLOTSRANGE", first, {0: 5460, 5461: 10922, 10923: 16383}[first])
        for index, node in enumerate([*self.masters, *self.replicas]):
            node.command("CLUSTER", "SET-CONFIG-EPOCH", index + 1)
        self._meet([*self.masters, *self.replicas])
        for index, replica in enumerate(self.replicas):
            master = self.masters[index % 3]
            replica.command("CLUSTER", "REPLICATE", self.id_of(master))
        until(lambda: all(node.replication().get("master_link_status") == "up" for node in self.replicas), "replicas")
        self.url = f"redis+cluster://{','.join(f'127.0.0.1:{node.port}' for node in self.masters)}"

    def id_of(self, node: PlainServer) -> str:
        """Its name in the cluster."""
        return str(node.command("CLUSTER", "MYID").decode())

    def slot_of(self, key: str) -> int:
        """The slot that holds `key`."""
        return int(self.masters[0].command("CLUSTER", "KEYSLOT", key))

    def owner_of(self, slot: int) -> PlainServer:
        """The master that holds `slot`."""
        ports = {
            master[1]
            for first, last, master, *_ in self.masters[0].command("CLUSTER", "SLOTS")
            if first <= slot <= last
        }
        return next(node for node in [*self.masters, *self.replicas] if node.port in ports)

    def add_node(self) -> PlainServer:
        """A master more, which owns no slot yet."""
        node = self._node()
        node.command("CLUSTER", "MEET", "127.0.0.1", self.masters[0].port, self._bus_port())
        self.masters.append(node)
        number = len(self.masters) + len(self.replicas)
        until(lambda: all(self._agrees(one, number) for one in self.masters), "a cluster that agrees")
        return node

    def move(self, slot: int, target: PlainServer, pause_s: float = 0.0) -> None:
        """Moves `slot`, a key at a time with a pause after each, as tools that reshard do."""
        source = self.owner_of(slot)
        target.command("CLUSTER", "SETSLOT", slot, "IMPORTING", self.id_of(source))
        source.command("CLUSTER", "SETSLOT", slot, "MIGRATING", self.id_of(target))
        while keys := source.command("CLUSTER", "GETKEYSINSLOT", slot, 1):
            source.command("MIGRATE", "127.0.0.1", target.port, keys[0], 0, 5000)
            time.sleep(pause_s)
        for node in (target, source, *self.masters):
            node.command("CLUSTER", "SETSLOT", slot, "NODE", self.id_of(target))

    def _node(self) -> PlainServer:
        return self._servers.start(
            **DURABLE, cluster_enabled="yes", cluster_port=str(free_port()), cluster_node_timeout="2500"
        )

    def _meet(self, nodes: list[PlainServer]) -> None:
        first, *others = nodes
        for node in others:
            node.command("CLUSTER", "MEET", "127.0.0.1", first.port, self._bus_port())
        until(lambda: all(self._agrees(node, len(nodes)) for node in nodes), "a cluster that agrees")

    def _bus_port(self) -> int:
        return int(self.masters[0].command("CONFIG", "GET", "cluster-port")[b"cluster-port"])

    @staticmethod
    def _agrees(node: PlainServer, number: int) -> bool:
        text = dict(line.split(":") for line in node.command("CLUSTER", "INFO").decode().split())
        return text["cluster_state"] == "ok" and int(text["cluster_known_nodes"]) == number
