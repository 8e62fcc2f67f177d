"""The page /metrics of a process, for Prometheus: plain HTTP on loopback or behind a mesh, mutual TLS elsewhere.

Owns the listener and its thread; what the page says is the registry's. It answers one scrape at a time, each within
TIMEOUT_S, so that whoever connects and says nothing costs the next scrape that long and the role nothing.
"""

import logging
import socket
import ssl
import threading
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import REGISTRY, make_wsgi_app

from rolecall.address import host_of
from rolecall.errors import UnavailableError
from rolecall.rpc.listening import require_tls, why_not
from rolecall.rpc.tls import mutual_credentials
from rolecall.settings import RpcSection, TlsSection

logger = logging.getLogger(__name__)
SETTING = "telemetry.metrics_bind"
TIMEOUT_S = 2.0
"""Longest wait for a scraper: for its handshake, its request and each part of the answer that it takes."""


class _Scrape(WSGIRequestHandler):
    """One scrape: bounded in time, and not worth a line of the log."""

    timeout = TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""


class _Listener(WSGIServer):
    """The listener, which reads the files of TLS again when they changed."""

    def __init__(self, host: str, port: int, tls: TlsSection | None) -> None:
        if host == "0.0.0.0" and socket.has_dualstack_ipv6():
            host = "::"  # as gRPC takes it: everywhere, also where a pod has no other address than of IPv6
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self.address_family = family
        self._tls = None if tls is None else _Tls(tls)
        super().__init__((str(address[0]), port), _Scrape)
        self.set_app(make_wsgi_app(REGISTRY))

    def server_bind(self) -> None:
        """Binds; over IPv6 everywhere is everywhere of IPv4, too, whatever the machine's default."""
        if self.address_family == socket.AF_INET6:
            self.socket.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
        super().server_bind()

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accepts a connection; its handshake is the handler's, within its timeout."""
        connection, address = super().get_request()
        if self._tls is None:
            return connection, address
        return self._tls.context().wrap_socket(connection, server_side=True, do_handshake_on_connect=False), address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A scraper that left, said nothing or has no certificate ends its own scrape alone."""
        logger.debug("a scrape by %s failed", client_address, exc_info=True)


class _Tls:
    """Mutual TLS by the files of a section, as they are at each connection."""

    def __init__(self, section: TlsSection) -> None:
        """ConfigError when the files cannot be used."""
        mutual_credentials(section)
        self._section = section
        self._stamp = self._look()
        self._context = self._load()

    def context(self) -> ssl.SSLContext:
        """The newest that can be read."""
        try:
            if (stamp := self._look()) != self._stamp:
                self._context, self._stamp = self._load(), stamp
        except OSError as error:  # half-way through a rotation: the next scrape tries again
            logger.warning("keeping the old TLS certificate of %s: %s", SETTING, error)
        return self._context

    def _look(self) -> list[int]:
        section = self._section
        return [path.stat().st_mtime_ns for path in (section.certificate_file, section.key_file, section.ca_file)]

    def _load(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(cafile=self._section.ca_file)
        context.load_cert_chain(self._section.certificate_file, self._section.key_file, password=lambda: b"")
        return context


def serve_metrics(bind: str, rpc: RpcSection) -> str:
    """Answers GET /metrics at `bind` from a thread of its own, as long as the process lives; returns the page's URL.

    ConfigError when it reaches others in the clear: as for every listener, that takes rpc.tls or rpc.behind_mesh.
    UnavailableError when it cannot be had.
    """
    require_tls(bind, rpc, SETTING)
    try:
        listener = _Listener(host_of(bind), int(bind.rpartition(":")[2]), rpc.tls)
    except OSError as error:
        problem = why_not(bind) or f"cannot be listened on ({error.strerror})"
        raise UnavailableError(f"nothing shows metrics on {bind} ({SETTING}): it {problem}") from error
    threading.Thread(target=listener.serve_forever, name="metrics", daemon=True).start()
    return f"{'http' if rpc.tls is None else 'https'}://{bind.rpartition(':')[0]}:{listener.server_port}/metrics"
