"""The gRPC server of a role: limits, health, reflection, errors, tracing, TLS, graceful end. It knows nothing of what
the services do.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import TypeVar

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection
from opentelemetry.instrumentation.grpc import aio_server_interceptor, filters

from rolecall.address import host_of, is_loopback, is_unix
from rolecall.errors import ConfigError
from rolecall.rpc import tls as tls_files
from rolecall.rpc.callers import PUBLIC
from rolecall.rpc.decoding import Decoding
from rolecall.rpc.identity import Party, identify_for, require_party
from rolecall.rpc.listening import require_tls, why_not
from rolecall.rpc.options import LIVENESS, MAX_MESSAGE_BYTES, server_options
from rolecall.rpc.server_calls import ServerCalls
from rolecall.settings import RpcSection

logger = logging.getLogger(__name__)
_ServicerT = TypeVar("_ServicerT")

MAX_CALLS = 1024
"""Bound on calls under way; more are answered RESOURCE_EXHAUSTED by gRPC."""
_PORT_PATIENCE_S = 2.0
"""A port that was just given up may be held for a moment: by the process that ends, or by a client that reached itself
while nobody listened.
"""
_PORT_PAUSE_S = 0.1
_LAME_DUCK_S = 2.0
"""Time between NOT_SERVING and closing, for load balancers to look away."""
_PICK_UP_S = 0.2
"""The same on loopback, where there are none: calls that have arrived, and that gRPC has not handed over yet, would be
cancelled.
"""


class Server:
    """The gRPC server of one process. Add services, start, say when the role can serve, drain.

    Health: every added service and "" are NOT_SERVING until `set_serving(True)`; `liveness` is SERVING from the start.
    """

    def __init__(
        self,
        rpc: RpcSection,
        bind: str,
        *,
        setting: str = "",
        client_certificates: bool = True,
        max_age_s: float | None = None,
        max_message_bytes: int = MAX_MESSAGE_BYTES,
    ) -> None:
        """Prepares a server for `bind` (`host:port`, port 0 takes a free one, or `unix:/path`).

        setting: where the address was given, e.g. "actor.bind", for complaints. client_certificates: with rpc.tls,
        whether callers must present one signed by rpc.tls.ca_file; a public service may do without. max_age_s: age at
        which callers are asked to connect again (options.REPLICA_AGE_S); None: never. ConfigError when bind is beyond
        loopback without TLS, unless rpc.behind_mesh.
        """
        require_tls(bind, rpc, setting)
        self._rpc = rpc
        self._bind = bind
        self._setting = setting
        self._client_certificates = client_certificates
        self._names: list[str] = []
        # Held for the life of the process: freed with a server that still serves, gRPC's queue would wait without end
        # for what nobody ends.
        grpc.aio.init_grpc_aio()
        tracing = aio_server_interceptor(filter_=filters.negate(filters.health_check()))  # type: ignore[no-untyped-call]
        self._server = grpc.aio.server(
            interceptors=[tracing, ServerCalls(identify_for(rpc) if isinstance(rpc, Party) else None), Decoding()],
            options=server_options(max_age_s, max_message_bytes),
            maximum_concurrent_rpcs=MAX_CALLS,
            compression=grpc.Compression.NoCompression,
        )
        self._health = health.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)

    def add(
        self, add_to_server: Callable[[_ServicerT, grpc.aio.Server], None], servicer: _ServicerT, service_name: str
    ) -> None:
        """Serves `servicer`, e.g. add(actor_pb2_grpc.add_ActorServiceServicer_to_server, servicer,
        "rolecall.v1.ActorService"); before `start`. ConfigError when its methods have rules of who may call them, and
        the server was not made for a process of a run (`rolecall/rpc/identity.py`).
        """
        if service_name not in PUBLIC:
            require_party(self._rpc, service_name)
        add_to_server(servicer, self._server)
        self._names.append(service_name)

    async def start(self) -> str:
        """Listens and answers; returns the address with the port that was taken. ConfigError when the address is in use
        or cannot be bound.
        """
        if is_loopback(self._bind) if self._rpc.reflection is None else self._rpc.reflection:
            names = [*self._names, health.SERVICE_NAME, reflection.SERVICE_NAME]
            reflection.enable_server_reflection(names, self._server)
        await self.set_serving(False)
        await self._health.set(LIVENESS, health_pb2.HealthCheckResponse.SERVING)  # bounded: a table in this process
        address = await self._listen()
        await self._server.start()
        logger.debug("listening on %s", address)
        return address

    async def set_serving(self, serving: bool) -> None:
        """Health of all added services and of "": whether the role can do its job now."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in ["", *self._names]:
            await self._health.set(name, status)  # bounded: a table in this process

    async def drain(self, grace_s: float) -> None:
        """NOT_SERVING, a moment for load balancers and for calls that have just arrived, then no new calls; those under
        way get `grace_s` to finish and are cancelled after it.
        """
        await self._health.enter_graceful_shutdown()  # bounded: a table in this process
        await asyncio.sleep(min(_PICK_UP_S if is_loopback(self._bind) else _LAME_DUCK_S, grace_s / 2))
        await self._server.stop(grace_s)

    async def _listen(self) -> str:
        deadline = time.monotonic() + _PORT_PATIENCE_S
        while (port := await asyncio.to_thread(self._bound)) is None:
            # gRPC writes a line at each try that fails, so none is made before the address can be had
            while (problem := await asyncio.to_thread(why_not, self._bind)) and time.monotonic() < deadline:
                await asyncio.sleep(_PORT_PAUSE_S)
            if time.monotonic() >= deadline:
                named = f" ({self._setting})" if self._setting else ""
                raise ConfigError(
                    f"cannot listen on {self._bind}{named}: it {problem or 'cannot be bound; choose another'}"
                )
            await asyncio.sleep(_PORT_PAUSE_S)
        if is_unix(self._bind):
            return self._bind
        host = host_of(self._bind)
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def _bound(self) -> int | None:
        """The port that was taken, None when the address cannot be had at present."""
        if is_unix(self._bind) and why_not(self._bind):  # gRPC would replace a socket file that somebody listens on
            return None
        try:
            if self._rpc.tls is None:
                return self._server.add_insecure_port(self._bind)
            return self._server.add_secure_port(
                self._bind, tls_files.server_credentials(self._rpc.tls, self._client_certificates)
            )
        except RuntimeError:
            return None
