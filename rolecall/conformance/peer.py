"""The connection of a kit to somebody's server: one channel, whose calls are neither repeated nor translated, so that
what the server does is seen as it is.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import grpc

from rolecall.address import is_loopback
from rolecall.errors import ConfigError
from rolecall.rpc import status, tls
from rolecall.rpc.client_calls import UNREADABLE, method_of
from rolecall.rpc.options import MAX_MESSAGE_BYTES

T = TypeVar("T")
CONNECT_S = 5.0
"""Deadline of the first call: an address where nobody answers is told within it."""


_DEADLINES = {
    "Score": " (--timeout)",
    "RunEpisode": " (--timeout, and close_timeout_s)",
    "Reset": " (reset_timeout_s)",
    "Step": " (step_timeout_s)",
    "Close": " (close_timeout_s)",
}
"""What gives a method its deadline: an option of the command, or a field of what an environment says it is."""


class ReadableCalls(grpc.aio.UnaryUnaryClientInterceptor):
    """Ends of calls that gRPC leaves without words. One whose answer cannot be parsed is INTERNAL, as any other call
    that failed; one that ran into its deadline says how long that was, and what names it.
    """

    async def intercept_unary_unary(
        self,
        continuation: Callable[[grpc.aio.ClientCallDetails, Any], Any],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        began_at, timeout_s, nothing = time.monotonic(), client_call_details.timeout or 0.0, grpc.aio.Metadata()
        call = await continuation(client_call_details, request)  # bounded: each call names its deadline
        try:
            answer = await call  # bounded: each call names its deadline
        except grpc.aio.AioRpcError as error:
            is_own_word = time.monotonic() - began_at < 0.9 * timeout_s
            if error.code() is not grpc.StatusCode.DEADLINE_EXCEEDED or is_own_word:
                return call
            method = method_of(client_call_details).rpartition("/")[2]
            told = f"{method} was not answered within {timeout_s:g} s{_DEADLINES.get(method, '')}"
            raise grpc.aio.AioRpcError(error.code(), nothing, nothing, told) from error
        if answer is None:
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

    @property
    def way(self) -> str:
        """Says how it is called, and what to do where the server wants it otherwise."""
        if self.credentials is None:
            return "it was called in the clear: where it speaks TLS give --ca-file, or --tls for mutual TLS"
        return (
            "it was called over TLS: where it speaks none leave --ca-file, --tls and --bearer-token-file out; whom to "
            "trust says --ca-file, and where it asks for a certificate --tls has ours"
        )

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
