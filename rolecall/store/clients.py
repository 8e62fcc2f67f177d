"""The client of a `store.url`: one server, a server found through sentinels, or a cluster.

Owns what a URL may say. Query parameters are redis-py's: `ssl_ca_certs`, `ssl_certfile` and `ssl_keyfile` name the
files of TLS, which are read anew at every connection, so that renewed certificates are used. Not here: what is asked of
a server, and what becomes of failed calls (`connection`).
"""

import time
from contextlib import suppress
from typing import Any, TypeAlias
from urllib.parse import unquote, urlsplit

import redis
from redis import exceptions
from redis.backoff import NoBackoff
from redis.cluster import ClusterNode, RedisCluster, cleanup_kwargs
from redis.connection import Connection, SSLConnection, parse_url
from redis.retry import Retry
from redis.sentinel import Sentinel, SentinelConnectionPool

from rolecall.errors import ConfigError, StoreUnavailableError

Client: TypeAlias = "redis.Redis | RedisCluster"

MAX_CONNECTIONS = 64
SENTINEL_PORT = 26379
SENTINEL_TIMEOUT_S = 1.0
"""Deadline of a sentinel's connection, and again of its answer."""
LOOK_S = 1.0
"""Pause between two questions to the sentinels, who is the master."""


class _MasterPool(SentinelConnectionPool):
    """Sockets to the master. redis-py asks the sentinels for it at a new connection only, and a master that was demoted
    keeps its connections for ten seconds, in which it acknowledges what is lost.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)  # type: ignore[no-untyped-call]
        self._looked_at = time.monotonic()

    def get_connection(self, *args: Any, **options: Any) -> Any:
        """A socket to the master that the sentinels named at most LOOK_S ago, if they answered."""
        now = time.monotonic()
        if now - self._looked_at > LOOK_S:
            self._looked_at = now
            with suppress(exceptions.ConnectionError, exceptions.TimeoutError):  # the master may live without them
                self.get_master_address()  # type: ignore[no-untyped-call]
        return super().get_connection(*args, **options)


class _Cluster(RedisCluster):
    """A client that waits where redis-py fails: a slot may be moving to a node that owns none yet, and that is in no
    table of the cluster.
    """

    def get_node(
        self, host: str | None = None, port: int | None = None, node_name: str | None = None
    ) -> ClusterNode | None:
        """The node of that name; TryAgainError when the table does not have it."""
        node: ClusterNode | None = super().get_node(host, port, node_name)  # type: ignore[no-untyped-call]
        if node is None:
            raise exceptions.TryAgainError(f"{node_name} owns no slot yet")
        return node

    def pipeline(self, *args: Any, **options: Any) -> Any:
        """A pipeline, which follows redirections as this client does."""
        pipeline = super().pipeline(*args, **options)  # type: ignore[no-untyped-call]
        pipeline.get_node = self.get_node
        return pipeline


def open_client(url: str, timeout_s: float) -> Client:
    """A client of `url`, each attempt of which waits at most `timeout_s` for a socket, its connection and its answer.
    ConfigError when the URL cannot be used; StoreUnavailableError when no node of a cluster answers.
    """
    options: dict[str, Any] = {
        "socket_timeout": timeout_s,
        "socket_connect_timeout": timeout_s,
        "protocol": 2,
        "retry": Retry(NoBackoff(), 0),
    }
    scheme, _, rest = url.partition("://")
    secure = scheme.startswith("rediss")
    try:
        if scheme in ("redis+cluster", "rediss+cluster"):
            return _of_cluster(rest, secure, options)
        if scheme in ("redis+sentinel", "rediss+sentinel"):
            return _through_sentinels(rest, secure, options)
        return _of_server(url, timeout_s, options)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"store.url is not a usable {scheme} URL: {error}") from error
    except exceptions.RedisClusterException as error:
        raise StoreUnavailableError(f"no node of the cluster in store.url answers: {error}") from error


def _of_server(url: str, timeout_s: float, options: dict[str, Any]) -> redis.Redis:
    if url.startswith("unix"):
        options.pop("socket_connect_timeout")
    pool = redis.BlockingConnectionPool.from_url(url, max_connections=MAX_CONNECTIONS, timeout=timeout_s, **options)
    _require_known(pool.connection_class, pool.connection_kwargs)
    return redis.Redis.from_pool(pool)


def _of_cluster(rest: str, secure: bool, options: dict[str, Any]) -> RedisCluster:
    parts = urlsplit(f"//{rest}")
    nodes = [ClusterNode(host, port) for host, port in _addresses(parts.netloc, 6379)]  # type: ignore[no-untyped-call]
    query = _query(parts.query)
    _require_known(SSLConnection if secure else Connection, query)
    if unread := query.keys() - cleanup_kwargs(**query).keys():  # type: ignore[no-untyped-call]
        raise ValueError(f"a cluster's client does not read {', '.join(sorted(unread))}; leave it out")
    options = {**options, **_login(parts.username, parts.password), **query}
    if secure:
        options["ssl"] = True
    return _Cluster(startup_nodes=nodes, max_connections=MAX_CONNECTIONS, **options)


def _through_sentinels(rest: str, secure: bool, options: dict[str, Any]) -> redis.Redis:
    """User and password before the hosts are the server's; `username` and `password` of the query the sentinels'. TLS
    is that of both.
    """
    parts = urlsplit(f"//{rest}")
    service = parts.path.strip("/")
    if not service:
        raise ValueError("write redis+sentinel://host:port[,host:port]/service")
    query = _query(parts.query)
    if unread := {name for name in query if not name.startswith("ssl_")} - {"username", "password"}:
        raise ValueError(f"a sentinel's client does not read {', '.join(sorted(unread))}; leave it out")
    options = {**options, **{name: value for name, value in query.items() if name.startswith("ssl_")}}
    if secure:
        options["ssl"] = True
    logins: dict[str, Any] = {name: query[name] for name in ("username", "password") if name in query}
    soon = {"socket_timeout": SENTINEL_TIMEOUT_S, "socket_connect_timeout": SENTINEL_TIMEOUT_S}
    of_sentinels = {**options, **soon, **logins}
    sentinel = Sentinel(_addresses(parts.netloc, SENTINEL_PORT), sentinel_kwargs=of_sentinels, **options)  # type: ignore[no-untyped-call]
    client: redis.Redis = sentinel.master_for(  # type: ignore[no-untyped-call]
        service,
        connection_pool_class=_MasterPool,
        max_connections=MAX_CONNECTIONS,
        **_login(parts.username, parts.password),
    )
    return client


def _require_known(kind: type[Connection], options: dict[str, Any]) -> None:
    """ValueError or TypeError when `options` are not those of such a connection: a pool looks at them when it first
    connects, and a cluster's client drops what it does not know.
    """
    try:
        kind(**options)
    except exceptions.RedisError as error:
        raise ValueError(error) from error


def _addresses(netloc: str, default_port: int) -> list[tuple[str, int]]:
    found = [urlsplit(f"//{item}") for item in netloc.rpartition("@")[2].split(",")]
    if not all(item.hostname for item in found):
        raise ValueError("it names no host")
    return [(str(item.hostname), item.port or default_port) for item in found]


def _login(username: str | None, password: str | None) -> dict[str, str]:
    given = (("username", username), ("password", password))
    return {name: unquote(value) for name, value in given if value}


def _query(query: str) -> dict[str, Any]:
    """The parameters as redis-py reads them, with their types."""
    parsed: dict[str, Any] = parse_url(f"redis://?{query}")  # type: ignore[no-untyped-call]
    return {name: value for name, value in parsed.items() if name not in ("host", "port", "db", "connection_class")}
