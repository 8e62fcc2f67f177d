"""TLS to the store with certificates of both sides, renewed while connections come and go.

The servers at hand speak no TLS, so a front with a certificate speaks it for them and asks its peers for theirs.
"""

import shutil
import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from pydantic import SecretStr

from rolecall.errors import ConfigError
from rolecall.settings import StoreSection, TlsSection
from rolecall.store.connection import connect
from rolecall.store.ledger import Ledger
from rolecall.store.probe import find_store
from tests.contract.peer import Authority
from tests.fixtures_servers import one_group_from_admission_to_training
from tests.servers import DURABLE, Clustered, PlainServer, PlainServers, until


class Front:
    """Speaks mutual TLS on `port` for the server on another port."""

    def __init__(self, authority: Authority, behind: int) -> None:
        pair = authority.issue("store")
        self._context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self._context.load_cert_chain(pair.certificate_file, pair.key_file)
        self._context.load_verify_locations(pair.ca_file)
        self._context.verify_mode = ssl.CERT_REQUIRED
        self._behind = behind
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._opened: list[socket.socket] = []
        self.port = int(self._listener.getsockname()[1])
        self.serials: list[Any] = []
        """Serial numbers of the certificates shown, one for each connection."""
        threading.Thread(target=self._accept, daemon=True).start()

    def hang_up(self) -> None:
        """Ends all connections."""
        while self._opened:
            with suppress(OSError):
                self._opened.pop().shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Ends all connections and takes no more."""
        self._listener.close()
        self.hang_up()

    def _accept(self) -> None:
        with suppress(OSError):  # the listener is closed at the end
            while True:
                near, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=[near], daemon=True).start()

    def _serve(self, raw: socket.socket) -> None:
        with suppress(OSError), self._context.wrap_socket(raw, server_side=True) as near:
            self.serials.append((near.getpeercert() or {})["serialNumber"])
            with socket.create_connection(("127.0.0.1", self._behind)) as far:
                self._opened += [near, far]
                back = threading.Thread(target=_pump, args=[far, near], daemon=True)
                back.start()
                _pump(near, far)
                back.join(30)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(65536):
            sink.sendall(data)
    for end in (source, sink):
        with suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def authority(tmp_path: Path) -> Authority:
    return Authority(tmp_path / "authority")


@pytest.fixture
def front(authority: Authority, servers: PlainServers) -> Iterator[Front]:
    front = Front(authority, servers.start(**DURABLE).port)
    yield front
    front.close()


def files(pair: TlsSection) -> str:
    return f"ssl_ca_certs={pair.ca_file}&ssl_certfile={pair.certificate_file}&ssl_keyfile={pair.key_file}"


def ports_of(node: PlainServer) -> set[int]:
    """The ports that a node of a cluster names to clients."""
    return {master[1] for _, _, master, *_ in node.command("CLUSTER", "SLOTS")}


def section(url: str) -> StoreSection:
    return StoreSection(url=SecretStr(url))


def test_a_store_behind_mutual_tls_is_used_with_the_files_that_the_url_names(
    front: Front, authority: Authority
) -> None:
    connection = connect(section(f"rediss://127.0.0.1:{front.port}?{files(authority.issue('controller'))}"))
    ledger = Ledger(connection, "run")
    assert (ledger.lock(0.1), ledger.position().ctl) == (1, 1)
    connection.close()


def test_a_role_without_a_certificate_is_told_what_to_add(front: Front, authority: Authority) -> None:
    url = f"rediss://127.0.0.1:{front.port}?ssl_ca_certs={authority.ca_file}"
    with pytest.raises(ConfigError, match="ssl_certfile=FILE&ssl_keyfile=FILE"):
        find_store(section(url))


def test_a_renewed_certificate_is_shown_at_the_next_connection(
    front: Front, authority: Authority, tmp_path: Path
) -> None:
    pair = authority.issue("controller")
    connection = connect(section(f"rediss://127.0.0.1:{front.port}?{files(pair)}"))
    Ledger(connection, "run").lock(0.1)
    before = set(front.serials)
    renewed = authority.issue("renewed")
    shutil.copy(renewed.certificate_file, pair.certificate_file)
    shutil.copy(renewed.key_file, pair.key_file)
    front.hang_up()
    assert Ledger(connection, "run").position().ctl == 1
    assert front.serials[-1] not in before
    connection.close()


def test_sentinels_and_the_master_that_they_name_are_both_reached_over_mutual_tls(
    front: Front, authority: Authority, servers: PlainServers
) -> None:
    lines = (f"sentinel monitor main 127.0.0.1 {front.port} 1", "sentinel down-after-milliseconds main 1000000")
    before_sentinel = Front(authority, servers.start("--sentinel", lines=lines).port)
    url = f"rediss+sentinel://127.0.0.1:{before_sentinel.port}/main?{files(authority.issue('controller'))}"
    connection = connect(section(url))
    assert Ledger(connection, "run").lock(0.1) == 1
    connection.close()
    before_sentinel.close()


def test_a_group_lives_on_a_cluster_each_node_of_which_is_reached_over_mutual_tls(
    authority: Authority, servers: PlainServers
) -> None:
    cluster = Clustered(servers)
    fronts = [Front(authority, node.port) for node in cluster.masters]
    for node, before in zip(cluster.masters, fronts, strict=True):
        node.command("CONFIG", "SET", "cluster-announce-port", before.port)
    announced = {before.port for before in fronts}
    until(lambda: all(ports_of(node) == announced for node in cluster.masters), "the ports of the fronts")
    hosts = ",".join(f"127.0.0.1:{before.port}" for before in fronts)
    connection = connect(section(f"rediss+cluster://{hosts}?{files(authority.issue('controller'))}"))
    one_group_from_admission_to_training(connection, "run")
    connection.close()
    for node, before in zip(cluster.masters, fronts, strict=True):
        held = node.command("DBSIZE")
        assert not held or before.serials, "a key came by another way"
        before.close()
    assert sum(bool(before.serials) for before in fronts) > 1
