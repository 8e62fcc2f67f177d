"""The connection of a kit to somebody's server: one channel, whose calls are neither repeated nor translated, so that
what the server does is seen as it is.
"""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc

from rolecall.address import is_loopback
from rolecall.errors import ConfigError
from rolecall.rpc import status, tls
from rolecall.rpc.client_calls import UNREADABLE
from rolecall.rpc.options import MAX_MESSAGE_BYTES

T = TypeVar("T")
CONNECT_S = 5.0
"""Deadline of the first call: an address where nobody answers is told within it."""


class ReadableCalls(grpc.aio.UnaryUnaryClientInterceptor):
    """The end of a call whose answer cannot be parsed: INTERNAL, as of any other call that failed."""

    async def intercept_unary_unary(
        self,
        continuation: Callable[[grpc.aio.ClientCallDetails, Any], Any],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        call = await continuation(client_call_details, request)  # bounded: each call names its deadline
        try:
            answer = await call  # bounded: each call names its deadline
        except grpc.aio.AioRpcError:
            return call
        if answer is None:
            nothing = grpc.aio.Metadata()
            raise grpc.aio.AioRpcError(grpc.StatusCode.INTERNAL, nothing, nothing, f"it answered {UNREADABLE}")
        return call


@dataclass(frozen=True)
class Peer:
    """An address, and how it is called."""

    address: str
    credentials: grpc.ChannelCredentials | None = None
    """TLS; None for plaintext."""
    token: str | None = None
    """A bearer token, sent with each call."""

    def open(self, *, with_token: bool = True) -> grpc.aio.Channel:
        """A channel of its own, which connects at its first call. Each call names its deadline."""
        options = [
            ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
            ("grpc.enable_retries", 0),
            ("grpc.use_local_subchannel_pool", 1),
        ]
        if is_loopback(self.address):
            options.append(("grpc.enable_http_proxy", 0))
        calls = [ReadableCalls()]
        if self.credentials is None:
            return grpc.aio.insecure_channel(
                self.address, options, interceptors=calls
            )  # bounded: each call names its deadline
        credentials = self.credentials
        token = self.token
        if token is not None and with_token:
            credentials = tls.with_bearer_token(credentials, lambda: token)
        return grpc.aio.secure_channel(
            self.address, credentials, options, interceptors=calls
        )  # bounded: each call names its deadline


async def told(call: Awaitable[T], address: str, method: str) -> T:
    """The answer to a call; a RoleCallError where there is none, or none that can be read."""
    try:
        return await call  # bounded: by its deadline
    except grpc.aio.AioRpcError as error:
        raise status.to_error(
            error.code(), error.details(), error.trailing_metadata(), target=address, method=method
        ) from error


def peer(address: str, *, ca_file: str | None, folder: Path | None, token: str | None) -> Peer:
    """Returns how `address` is called: over TLS with the roots in `ca_file` (a PEM file, or `system`), over mutual TLS
    with tls.crt, tls.key and ca.crt of `folder`, with a bearer token (which means TLS), or else in the clear.
    ConfigError for files that cannot be used.
    """
    if folder is not None:
        if ca_file is not None:
            raise ConfigError("--tls and --ca-file are two ways to say whom to trust; give one")
        credentials: grpc.ChannelCredentials | None = grpc.ssl_channel_credentials(
            tls.read_roots(folder / "ca.crt", "--tls ca.crt"),
            tls.read(folder / "tls.key", "--tls tls.key"),
            tls.read(folder / "tls.crt", "--tls tls.crt"),
        )
    elif ca_file is not None or token is not None:
        credentials = tls.public_credentials(None if ca_file in (None, "system") else Path(ca_file))
    else:
        credentials = None
    return Peer(address, credentials, token)
