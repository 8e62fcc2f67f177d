"""The connection of a role to the store: one factory, what a server must be, one way to call, one mapping of failures.

Calls are synchronous (redis-py with hiredis); async services make them in threads. Every call is safe to repeat,
scripts by their own design and commands by their nature, so a lost connection is retried, for at most RETRY_S. Then
StoreUnavailableError; StoreFullError when the server is out of memory. Not here: kinds of URLs (`clients`), what is
called (rows, ledger, prompts).

Bounds: clients.MAX_CONNECTIONS sockets a process; an attempt waits at most SOCKET_TIMEOUT_S each for a free socket, its
connection and its answer, so a call ends within CALL_DEADLINE_S; a blocking read waits at most MAX_BLOCK_S for
something to read.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from redis import exceptions
from redis.cluster import RedisCluster

from rolecall.errors import ConfigError, StoreFullError, StoreUnavailableError
from rolecall.settings import StoreSection
from rolecall.store import scripts
from rolecall.store.clients import Client, open_client

T = TypeVar("T")

RETRY_S = 10.0
SOCKET_TIMEOUT_S = 5.0
CALL_DEADLINE_S = RETRY_S + 3 * SOCKET_TIMEOUT_S
"""The last attempt begins within RETRY_S."""
MAX_BLOCK_S = 1.0

_LOST = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.InvalidResponse,
    exceptions.BusyLoadingError,
    exceptions.TryAgainError,
    exceptions.ClusterError,
    exceptions.RedisClusterException,
    exceptions.MasterDownError,
    exceptions.ReadOnlyError,
)
_PASSING = ("UNBLOCKED", "NOREPLICAS", "MISCONF", "BUSY")
"""First words of refusals that redis-py has no class for and that end by themselves, or once people saw to the server:
it was demoted under a blocking read, has too few replicas (min-replicas-to-write), cannot write its snapshot, or runs
somebody's long script.
"""
_REFUSED = (exceptions.AuthenticationError, exceptions.AuthorizationError, exceptions.NoPermissionError)


class Connection:
    """A role's way to the store. Threads may share it. `retry_s`: how long an unreachable server is tried again."""

    def __init__(self, client: Client, retry_s: float = RETRY_S) -> None:
        self._client = client
        self._retry_s = retry_s
        self._send: Callable[..., Any] = client.execute_command
        self.taken_on_trust: tuple[str, ...] = ()
        """What the servers did not let `connect` see, and store.durability vouches for."""

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
            except (*_LOST, exceptions.ResponseError) as error:
                if "ACL failure in script" in str(error):
                    raise ConfigError(
                        f"the store lets this user do less than this release asks: {error}; make its users again "
                        "(rolecall store-acl)"
                    ) from error
                if not isinstance(error, _LOST) and not str(error).startswith(_PASSING):
                    raise
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
        instead of one for each. A cluster's client takes no scripts into its pipelines: there one after another.
        """
        if isinstance(self._client, RedisCluster):
            return [self.script(name, keys, args) for args in calls]
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
            replies = list(pipeline.execute(raise_on_error=False))
            for reply in replies:
                if isinstance(reply, Exception):
                    raise reply  # as the server said it: redis-py would put words of its own before the first
            return replies

        return self.attempt(call) if commands else []

    def close(self) -> None:
        """Closes the sockets. Idempotent."""
        self._client.close()


def connect(
    section: StoreSection,
    *,
    verify: bool = True,
    timeout_s: float = SOCKET_TIMEOUT_S,
    retry_s: float = RETRY_S,
) -> Connection:
    """Connects to `store.url` and, to `verify`, checks that the server can keep the ledger's promises: the controller
    does, whose user may look at its settings. ConfigError names what to change; StoreUnavailableError when it cannot be
    reached for `retry_s`, each attempt waiting `timeout_s` at most for a socket, its connection and its answer.
    """
    if section.url is None:
        raise ConfigError(
            "store.url is not set, and no store of the run's own is there: start the role while `rolecall train` is "
            "under way, by the config.yaml in its run.dir, or set store.url (ROLECALL_STORE_URL) to the run's server"
        )
    connection = Connection(open_client(section.url.get_secret_value(), timeout_s), retry_s)
    try:
        if verify:
            servers = _servers(connection)
            connection.taken_on_trust = tuple(text for server in servers for text in _unmet(server, section))
            _check_memory(servers, section.max_bytes)
        else:
            connection.command("PING")
    except BaseException:
        connection.close()
        raise
    return connection


@dataclass(frozen=True)
class _Server:
    """The properties of one server, as it says them."""

    info: Mapping[str, Any]
    """INFO of the sections server, memory and persistence."""
    fsync: str | None
    """The value of appendfsync; None where it does not let this user ask."""
    replays: bool | None
    """Whether it would replay all of its append-only file after a restart; None where it does not let this user see."""


def _servers(connection: Connection) -> list[_Server]:
    """Asks every server that holds data."""
    client = connection.ledger
    places: list[Mapping[str, Any]] = [{}]
    if isinstance(client, RedisCluster):
        places = [{"target_nodes": node} for node in client.get_primaries()]  # type: ignore[no-untyped-call]
    return [connection.attempt(partial(_server, client, where)) for where in places]


def _unmet(server: _Server, section: StoreSection) -> Iterator[str]:
    """Compares `server` with what must be: ConfigError for what is not so. Yields what could not be seen, and is taken
    on the word of `section`.
    """
    _check_version(server.info)
    _check_eviction(server.info)
    if section.durability != "relaxed":
        yield from _check_durability(server, vouched=section.durability == "vouched")


def _check_memory(servers: Sequence[_Server], max_bytes: int) -> None:
    limits = [int(server.info.get("maxmemory", 0)) for server in servers]
    if all(limits) and sum(limits) < max_bytes:
        raise ConfigError(
            f"the store may take {sum(limits)} bytes (maxmemory{' of all nodes' if len(limits) > 1 else ''}) and "
            f"store.max_bytes is {max_bytes}: admission would count on memory that is not there; raise maxmemory or "
            "lower store.max_bytes"
        )


def _check_version(info: Mapping[str, Any]) -> None:
    name = "Valkey" if "valkey_version" in info else "Redis"
    version = str(info.get("valkey_version") or info["redis_version"])
    if tuple(int(part) for part in version.split(".")[:2]) < ((7, 2) if name == "Valkey" else (7, 0)):
        raise ConfigError(f"the store is {name} {version}; RoleCall needs Valkey >= 7.2 or Redis >= 7.0")


def _check_eviction(info: Mapping[str, Any]) -> None:
    policy = info.get("maxmemory_policy")
    if policy != "noeviction":
        raise ConfigError(
            f"the store may evict the ledger (maxmemory-policy {policy}); set maxmemory-policy noeviction"
        )


def _check_durability(server: _Server, *, vouched: bool) -> Iterator[str]:
    writes = "yes" if server.info.get("aof_enabled") else "no"
    if server.fsync is None and not vouched:
        raise ConfigError(
            "the store does not let this user ask for appendfsync (CONFIG GET), as managed servers do; let it (+config|"
            "get), or, where you know that nothing acknowledged is lost, say so: store.durability: vouched"
        )
    if server.fsync is None:
        yield "whether what it acknowledges is on disk (appendonly, appendfsync)"
    elif (writes, server.fsync) != ("yes", "always"):
        raise ConfigError(
            f"the store can lose acknowledged writes (appendonly {writes}, appendfsync {server.fsync}); set appendonly "
            "yes and appendfsync always, or store.durability: relaxed"
        )
    if server.replays is None and vouched:
        yield "the rights of its user `default`, with which it may replay its append-only file"
    elif not server.replays:
        raise ConfigError(
            "the store would lose the run at its next restart: a server may replay the transactions of its append-only "
            "file with the rights of the user `default`, and discard what that user may not do (redis#14541, "
            "valkey#3983); its rights are cut here, or not to be seen. Give it all of them, which lets nobody in while "
            "it is off: `ACL SETUSER default ~* &* +@all`, there and in the server's configuration; let store.url's "
            "user look (+acl|getuser); or set store.durability: relaxed"
        )


def _server(client: Client, where: Mapping[str, Any]) -> _Server:
    info: dict[str, Any] = {}
    for part in ("server", "memory", "persistence"):
        info |= client.info(part, **where)
    if info.get("loading"):  # until it has read its file it says that it has none
        raise exceptions.BusyLoadingError("it reads its append-only file")
    return _Server(info, _fsync(client, where), _default_user_may_all(client, where))


def _fsync(client: Client, where: Mapping[str, Any]) -> str | None:
    try:
        config = client.config_get("appendfsync", **where)
    except exceptions.NoPermissionError:
        return None
    except exceptions.ResponseError as error:
        if not _is_unknown(error):
            raise
        return None
    return next((_text(value) for value in config.values()), None)


def _default_user_may_all(client: Client, where: Mapping[str, Any]) -> bool | None:
    """None when this user may not look; true where the server has no such command, and so hardly a user whose rights
    were cut by it.
    """
    send: Callable[..., Any] = client.execute_command
    try:
        with suppress(exceptions.NoPermissionError):
            reply = send("ACL", "GETUSER", "default", **where)
            rights = dict(zip(reply[::2], reply[1::2], strict=True))
            return "~*" in _text(rights[b"keys"]).split() and _text(rights[b"commands"]).startswith("+@all")
        with suppress(exceptions.NoPermissionError):
            return True if send("ACL", "WHOAMI", **where) == b"default" else None
    except exceptions.ResponseError as error:
        if not _is_unknown(error):
            raise
        return True
    return None


def _is_unknown(error: exceptions.ResponseError) -> bool:
    """Whether the server has no such command, or had it renamed."""
    return "unknown command" in str(error).lower() or "unknown subcommand" in str(error).lower()


def _text(value: str | bytes | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""
