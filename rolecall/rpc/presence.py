"""A look at an address before a run starts: is what is wanted there, nobody yet, or something else?"""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rolecall.address import endpoints_of, is_unix, unix_path
from rolecall.errors import (
    ConfigError,
    DeadlineError,
    NotFoundError,
    RoleCallError,
    UnauthenticatedError,
    UnavailableError,
    VersionMismatchError,
)

LOOK_S = 3.0
"""Deadline of a connection, and then of an answer."""

Ask = Callable[[grpc.aio.Channel], Awaitable[None]]
"""One call with the deadline LOOK_S; what it raises says who answers. ConfigError: the end of a sentence that begins
with the address.
"""


def health_of(service: str) -> Ask:
    """Asks for the health of `service`, which each of our servers knows from its start on, whatever it is."""

    async def ask(channel: grpc.aio.Channel) -> None:
        stub = cast(Any, health_pb2_grpc.HealthStub)(channel)  # its published types lack the calls
        await stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=LOOK_S)

    return ask


async def look(address: str, channel: grpc.aio.Channel, ask: Ask, *, wanted: str, through_mesh: bool) -> str:
    """Returns what is said of the address; empty when what is wanted answers there, else it may still come up.
    ConfigError, the end of a sentence that begins with the address, when something else listens.

    wanted: what is looked for, e.g. "rolecall.v1.ActorService". through_mesh: a proxy of this machine takes every
    connection, whoever is behind it, so that one that breaks says nothing.
    """
    if not await asyncio.to_thread(is_taken, address):
        return "nobody listens there yet"
    try:
        await ask(channel)
    except (NotFoundError, VersionMismatchError) as error:
        raise ConfigError(f"answers and is no {wanted}; correct the address") from error
    except UnauthenticatedError as error:
        raise ConfigError(f"refuses the credentials ({error.message}); correct the certificate or the token") from error
    except (UnavailableError, DeadlineError) as error:
        if through_mesh or channel.get_state() in (grpc.ChannelConnectivity.READY, grpc.ChannelConnectivity.IDLE):
            return "it is not ready yet"
        words = (
            error.message.rpartition("last error: ")[2]
            if "last error: " in error.message
            else "no word of gRPC in answer to ours"
        )
        raise ConfigError(
            f"is somebody else's: what listens there speaks no gRPC, or with other certificates ({words}); correct "
            "address or TLS"
        ) from error
    except ConfigError:
        raise
    except RoleCallError as error:
        return f"it answers, and failed when it was asked ({error.message})"
    return ""


def is_taken(address: str) -> bool:
    """Whether any endpoint accepts connections."""
    return any(_accepts(endpoint) for endpoint in ([address] if is_unix(address) else endpoints_of(address)))


def _accepts(endpoint: str) -> bool:
    with suppress(OSError):
        if endpoint.startswith("unix"):
            path = (
                "\0" + endpoint.partition(":")[2]
                if endpoint.startswith("unix-abstract:")
                else str(Path(unix_path(endpoint)))
            )
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(LOOK_S)
                probe.connect(path)  # bounded: by settimeout, one line up
                return True
        host, _, port = endpoint.rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), timeout=LOOK_S):
            return True
    return False
