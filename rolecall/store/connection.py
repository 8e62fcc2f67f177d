"""The connection of a role to the store: one factory for every kind of URL, one way to call, one mapping of failures.

Calls are synchronous (redis-py with hiredis); async services make them in threads. Every call is safe to repeat,
scripts by their own design and commands by their nature, so a lost connection is retried, for at most RETRY_S. Then
StoreUnavailableError; StoreFullError when the server is out of memory. Not here: what is called (rows, ledger,
prompts).

Bounds: MAX_CONNECTIONS sockets a process; an attempt waits at most SOCKET_TIMEOUT_S each for a free socket, its
connection and its answer, so a call ends within CALL_DEADLINE_S; a blocking read waits at most MAX_BLOCK_S for
something to read.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, TypeAlias, TypeVar
from urllib.parse import parse_qsl, urlsplit

import redis
from redis import exceptions
from redis.backoff import NoBackoff
from redis.cluster import RedisCluster
from redis.retry import Retry
from redis.sentinel import Sentinel

from rolecall.errors import ConfigError, StoreFullError, StoreUnavailableError
from rolecall.settings import StoreSection
from rolecall.store import scripts

Client: TypeAlias = "redis.Redis | RedisCluster"
T = TypeVar("T")

RETRY_S = 10.0
SOCKET_TIMEOUT_S = 5.0
CALL_DEADLINE_S = RETRY_S + 3 * SOCKET_TIMEOUT_S
"""The last attempt begins within RETRY_S."""
MAX_BLOCK_S = 1.0
MAX_CONNECTIONS = 64

_LOST = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.BusyLoadingError,
    exceptions.TryAgainError,
    exceptions.ClusterDownError,
    exceptions.SlotNotCoveredError,
    exceptions.MasterDownError,
    exceptions.ReadOnlyError,
)
_REFUSED = (exceptions.AuthenticationError, exceptions.AuthorizationError, exceptions.NoPermissionError)


class Connection:
    """A role's way to the store. Threads may share it. `retry_s`: how long an unreachable server is tried again."""

    def __init__(self, client: Client, retry_s: float = RETRY_S) -> None:
        self._client = client
        self._retry_s = retry_s
        self._send: Callable[..., Any] = client.execute_command

    @property
    def ledger(self) -> Client:
        """Client of the server that holds the ledger."""
        return self._client

    @property
    def rows(self) -> Client:
        """Client of the servers that hold the row shards."""
        return self._client

    def attempt(self, operation: Callable[[], T]) -> T:
        """Returns what `operation` returns, repeated while the server cannot be reached, for at most `retry_s`. The
        operation must be safe to repeat.
        """
        deadline, pause = time.monotonic() + self._retry_s, 0.02
        while True:
            try:
                return operation()
            except _REFUSED as error:
                raise ConfigError(
                    f"the store refuses this user: {error}; check the user, password and rights of store.url"
                ) from error
            except exceptions.OutOfMemoryError as error:
                raise StoreFullError(
                    f"the store is full ({error}); raise store.max_bytes or lower what is in flight"
                ) from error
            except _LOST as error:
                if time.monotonic() + pause > deadline:
                    raise StoreUnavailableError(
                        f"the store did not answer for {self._retry_s:.0f} s: {error}; see its log"
                    ) from error
            time.sleep(pause)
            pause = min(2 * pause, 0.5)

    def command(self, *args: str | bytes | int | float) -> Any:
        """Answer of one command, which must be safe to repeat."""
        return self.attempt(lambda: self._send(*args))

    def script(self, name: str, keys: Sequence[str], args: Sequence[str | bytes | int]) -> list[Any]:
        """Raw answer of script `name`: an array whose first element is its verdict."""
        digest = scripts.digest(name)

        def call() -> Any:
            try:
                return self._send("EVALSHA", digest, len(keys), *keys, *args)
            except exceptions.NoScriptError:
                return self._send("EVAL", scripts.source(name), len(keys), *keys, *args)

        reply = self.attempt(call)
        assert isinstance(reply, list)
        return reply

    def script_many(
        self, name: str, keys: Sequence[str], calls: Sequence[Sequence[str | bytes | int]]
    ) -> list[list[Any]]:
        """Raw answers of script `name` to each of `calls`, run in their order, in two round trips (and two fsyncs)
        instead of one for each.
        """
        if not calls:
            return []
        first = self.script(name, keys, calls[0])  # from here on the server knows the script
        digest = scripts.digest(name)
        try:
            return [first, *self.pipeline([("EVALSHA", digest, len(keys), *keys, *args) for args in calls[1:]])]
        except exceptions.NoScriptError:  # it has started anew since
            return [self.script(name, keys, args) for args in calls]

    def pipeline(self, commands: Sequence[tuple[str | bytes | int, ...]]) -> list[Any]:
        """Answers of `commands`, sent in one round trip per server; not a transaction, each must be safe to repeat."""

        def call() -> list[Any]:
            pipeline = self._client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            return list(pipeline.execute())

        return self.attempt(call) if commands else []

    def close(self) -> None:
        """Closes the sockets. Idempotent."""
        self._client.close()


def connect(section: StoreSection, *, timeout_s: float = SOCKET_TIMEOUT_S, retry_s: float = RETRY_S) -> Connection:
    """Connects to `store.url` and checks that the server can keep the ledger's promises. ConfigError names what to
    change; StoreUnavailableError when it cannot be reached for `retry_s`, each attempt waiting `timeout_s` at most for
    a socket, its connection and its answer.
    """
    if section.url is None:
        raise ConfigError("store.url is not set; the embedded store's URL is known once it runs (EmbeddedStore.start)")
    connection = Connection(_client(section.url.get_secret_value(), timeout_s), retry_s)
    try:
        _verify(connection, section.durability)
    except BaseException:
        connection.close()
        raise
    return connection


def _client(url: str, timeout_s: float) -> Client:
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
            return RedisCluster.from_url(
                f"{'rediss' if secure else 'redis'}://{rest}", max_connections=MAX_CONNECTIONS, **options
            )
        if scheme in ("redis+sentinel", "rediss+sentinel"):
            return _through_sentinel(rest, {**options, "ssl": True} if secure else options)
        if scheme in ("redis", "rediss", "unix"):
            options.pop("socket_connect_timeout") if scheme == "unix" else None
            pool = redis.BlockingConnectionPool.from_url(
                url, max_connections=MAX_CONNECTIONS, timeout=timeout_s, **options
            )
            return redis.Redis.from_pool(pool)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"store.url is not a usable {scheme} URL: {error}") from error
    except exceptions.RedisClusterException as error:
        raise StoreUnavailableError(f"no node of the cluster in store.url answers: {error}") from error
    raise ConfigError(f"store.url has scheme {scheme!r}; use redis, rediss, unix, redis+sentinel or redis+cluster")


def _through_sentinel(rest: str, options: dict[str, Any]) -> redis.Redis:
    parts = urlsplit(f"//{rest}")
    hosts = parts.netloc.rpartition("@")[2].split(",")
    service = parts.path.strip("/")
    addresses = [(host, int(port or 26379)) for host, _, port in (item.partition(":") for item in hosts)]
    if not service or not addresses[0][0]:
        raise ValueError("write redis+sentinel://host:port[,host:port]/service")
    login = {name: value for name, value in (("username", parts.username), ("password", parts.password)) if value}
    sentinel = Sentinel(addresses, sentinel_kwargs={**options, **dict(parse_qsl(parts.query))}, **options)  # type: ignore[no-untyped-call]
    client: redis.Redis = sentinel.master_for(service, **options, **login)  # type: ignore[no-untyped-call]
    return client


def _verify(connection: Connection, durability: str) -> None:
    for info, config, replays in _servers(connection, durability == "strict"):
        name = "Valkey" if "valkey_version" in info else "Redis"
        version = str(info.get("valkey_version") or info["redis_version"])
        if tuple(int(part) for part in version.split(".")[:2]) < ((7, 2) if name == "Valkey" else (7, 0)):
            raise ConfigError(f"the store is {name} {version}; RoleCall needs Valkey >= 7.2 or Redis >= 7.0")
        if config.get("maxmemory-policy") != "noeviction":
            raise ConfigError(
                f"the store may evict the ledger (maxmemory-policy {config.get('maxmemory-policy')}); set "
                "maxmemory-policy noeviction"
            )
        if durability == "strict" and (config.get("appendonly"), config.get("appendfsync")) != ("yes", "always"):
            found = f"appendonly {config.get('appendonly')}, appendfsync {config.get('appendfsync')}"
            raise ConfigError(
                f"the store can lose acknowledged writes ({found}); set appendonly yes and appendfsync always, or "
                "store.durability: relaxed"
            )
        if not replays:
            raise ConfigError(
                "the store would lose the run at its next restart: a server may replay the transactions of its "
                "append-only file with the rights of the user "
                "`default`, and discard what that user may not do (redis#14541, valkey#3983); its rights are cut "
                "here, or not to be seen. Give it all "
                "of them, which lets nobody in while it is off: `ACL SETUSER default ~* &* +@all`, there and in "
                "the server's configuration; let store.url's "
                "user look (+acl|getuser); or set store.durability: relaxed"
            )


def _servers(connection: Connection, strict: bool) -> list[tuple[dict[str, Any], dict[str, str], bool]]:
    """Asks each server what it is, how it keeps data, and whether it would replay all of it, which is asked where
    `strict`.
    """
    client = connection.ledger
    names = ("maxmemory-policy", "appendonly", "appendfsync")
    targets = client.get_primaries() if isinstance(client, RedisCluster) else [None]  # type: ignore[no-untyped-call]

    def ask(target: Any) -> tuple[dict[str, Any], dict[str, str], bool]:
        where = {} if target is None else {"target_nodes": target}
        config = client.config_get(*names, **where)
        replays = not strict or _default_user_may_all(client, where)
        return client.info("server", **where), {_text(key): _text(value) for key, value in config.items()}, replays

    return [connection.attempt(partial(ask, target)) for target in targets]


def _default_user_may_all(client: Client, where: Mapping[str, Any]) -> bool:
    """False also when this user may not look; true where the server has no such command, and so hardly a user whose
    rights were cut by it.
    """
    send: Callable[..., Any] = client.execute_command
    try:
        with suppress(exceptions.NoPermissionError):
            reply = send("ACL", "GETUSER", "default", **where)
            rights = dict(zip(reply[::2], reply[1::2], strict=True))
            return "~*" in _text(rights[b"keys"]).split() and _text(rights[b"commands"]).startswith("+@all")
        with suppress(exceptions.NoPermissionError):
            return bool(send("ACL", "WHOAMI", **where) == b"default")
    except exceptions.ResponseError as error:
        if "unknown command" not in str(error):
            raise
        return True
    return False


def _text(value: str | bytes | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""
