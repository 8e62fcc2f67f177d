"""Channels: how a role calls another. Owns credentials, limits, retries and the interceptors of the calling side."""

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
from opentelemetry.instrumentation.grpc import aio_client_interceptors

from rolecall.address import is_loopback
from rolecall.errors import ConfigError
from rolecall.rpc import tls as tls_files
from rolecall.rpc.client_calls import AbandonedCalls, StreamCalls, UnaryCalls
from rolecall.rpc.identity import Party
from rolecall.rpc.options import MAX_MESSAGE_BYTES, channel_options
from rolecall.settings import RpcSection

DEFAULT_TIMEOUT_S = 30.0
"""Deadline of calls that name no other: every long call names its own, and what is left answers at once."""

_OpenWith = Callable[[grpc.ChannelCredentials], grpc.aio.Channel]


def open_channel(
    target: str,
    rpc: RpcSection,
    *,
    idempotent: Sequence[str] = (),
    tls: bool | None = None,
    bearer_token: Callable[[], str] | None = None,
    ca_file: Path | None = None,
    ours: bool = True,
    server_name: str | None = None,
    default_timeout_s: float = DEFAULT_TIMEOUT_S,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
) -> grpc.aio.Channel:
    """A channel to `target` (`host:port`, `unix:/path` or a gRPC target); connects at the first call. Close it when
    done.

    A target that stands for several replicas (`dns:///name:port`, `ipv4:10.0.0.1:9000,10.0.0.2:9000`) is called in
    turn, those that cannot be reached left out until they can.

    Every call has a deadline: its own `timeout` or `default_timeout_s`, and never more than the RPC on whose behalf
    it is made has left. Calls raise the RoleCallError the server raised; statuses that are not ours become
    UnavailableError, DeadlineError and so on.

    idempotent: full names of methods that may be repeated by themselves, on another replica if there is one, while a
    peer is UNAVAILABLE: gone, or hung for
        20 s (at most 4 attempts, within the call's deadline).
    tls: None, as the roles among themselves (mutual TLS when rpc.tls is set, else plaintext and the token of this
    process, where a method asks who calls), whose files are read again when they change; True, TLS checked against
    `ca_file` or the system's
        roots, without a certificate of ours; False, plaintext.
    ours: False towards a server that may be anybody's, which is pinged less. server_name: what the server's certificate
    must name, where that is not the target's host. bearer_token: what it gives is sent with each call;
    ConfigError on plaintext. Plaintext beyond loopback is a ConfigError too, unless rpc.behind_mesh.
    """
    renewal = tls_files.Renewal(rpc.tls) if tls is None and rpc.tls is not None else None
    credentials = channel_credentials(target, rpc, tls=tls, ca_file=ca_file)
    token = rpc.token_for(loopback=is_loopback(target)) if isinstance(rpc, Party) and tls is None else None
    tracing = aio_client_interceptors()  # type: ignore[no-untyped-call]
    interceptors = [
        UnaryCalls(target, default_timeout_s, token),
        StreamCalls(target, default_timeout_s, token),
        *tracing,
        AbandonedCalls(),
    ]
    options = channel_options(idempotent, loopback=is_loopback(target), ours=ours, max_message_bytes=max_message_bytes)
    if server_name is not None and credentials is not None:
        options.append(("grpc.ssl_target_name_override", server_name))
    if credentials is None:
        if bearer_token is not None:
            raise ConfigError(f"a bearer token for {target} needs TLS; it is never sent in the clear")
        return grpc.aio.insecure_channel(target, options, grpc.Compression.NoCompression, interceptors)
    if bearer_token is not None:
        credentials = tls_files.with_bearer_token(credentials, bearer_token)

    def open_with(newest: grpc.ChannelCredentials) -> grpc.aio.Channel:
        return grpc.aio.secure_channel(target, newest, options, grpc.Compression.NoCompression, interceptors)

    # a bearer token goes with somebody else's service, whose roots alone we have
    if renewal is None or bearer_token is not None:
        return open_with(credentials)
    return RenewedChannel(credentials, renewal, open_with)


def channel_credentials(
    target: str, rpc: RpcSection, *, tls: bool | None = None, ca_file: Path | None = None
) -> grpc.ChannelCredentials | None:
    """Credentials for `target`, None for plaintext; see `open_channel`."""
    if tls is True:
        return tls_files.public_credentials(ca_file)
    if tls is None and rpc.tls is not None:
        return tls_files.mutual_credentials(rpc.tls)
    if not is_loopback(target) and not rpc.behind_mesh:
        raise ConfigError(
            f"{target} is beyond this machine and the connection has no TLS; set rpc.tls, or for somebody "
            "else's service the ca_file of its section (`system` for this machine's roots), or rpc.behind_mesh when a "
            "service mesh encrypts it"
        )
    return None


class RenewedChannel(grpc.aio.Channel):
    """A channel whose certificate and roots may be replaced under it. gRPC fixes the credentials of a channel when it
    is made, so calls that begin after the files changed go through a new one, and those under way end on the old one.
    Used from one event loop.
    """

    def __init__(self, credentials: grpc.ChannelCredentials, renewal: tls_files.Renewal, open_with: _OpenWith) -> None:
        self._renewal = renewal
        self._open_with = open_with
        self._current = open_with(credentials)
        self._under_way: Counter[grpc.aio.Channel] = Counter()
        """Calls on each channel, the replaced ones too."""
        self._closing: set[asyncio.Task[None]] = set()

    def call(self, method: "_Method", request: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Begins a call on the newest channel."""
        credentials = self._renewal.credentials()
        if credentials is not None:
            replaced, self._current = self._current, self._open_with(credentials)
            self._close_if_idle(replaced)
        channel = self._current
        call = method.of(channel)(*request, **options)
        self._under_way[channel] += 1
        call.add_done_callback(lambda _: self._ended(channel))
        return call

    def _ended(self, channel: grpc.aio.Channel) -> None:
        self._under_way[channel] -= 1
        self._close_if_idle(channel)

    def _close_if_idle(self, channel: grpc.aio.Channel) -> None:
        if channel is not self._current and not self._under_way[channel]:
            del self._under_way[channel]
            closing = asyncio.ensure_future(channel.close())
            self._closing.add(closing)
            closing.add_done_callback(self._closing.discard)

    async def close(self, grace: float | None = None) -> None:
        """Closes it, as grpc.aio's does, with the channels that were replaced."""
        channels = {self._current, *self._under_way}
        # bounded: by `grace`, after which gRPC cancels what is left
        await asyncio.gather(*(channel.close(grace) for channel in channels), *self._closing)

    async def __aenter__(self) -> "RenewedChannel":
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    def get_state(self, try_to_connect: bool = False) -> grpc.ChannelConnectivity:
        """State of the newest channel."""
        return self._current.get_state(try_to_connect)

    async def wait_for_state_change(self, last_observed_state: grpc.ChannelConnectivity) -> None:
        """Waits for the newest channel's."""
        await self._current.wait_for_state_change(last_observed_state)

    async def channel_ready(self) -> None:
        """Waits for the newest channel."""
        await self._current.channel_ready()

    def unary_unary(self, *arguments: Any, **options: Any) -> Any:
        """Makes a method as grpc.aio's does, and so do the others."""
        return _Method(self, "unary_unary", arguments, options)

    def unary_stream(self, *arguments: Any, **options: Any) -> Any:
        return _Method(self, "unary_stream", arguments, options)

    def stream_unary(self, *arguments: Any, **options: Any) -> Any:
        return _Method(self, "stream_unary", arguments, options)

    def stream_stream(self, *arguments: Any, **options: Any) -> Any:
        return _Method(self, "stream_stream", arguments, options)


class _Method:
    """A method of a stub, which outlives the channel that a call of it takes."""

    def __init__(self, channel: RenewedChannel, kind: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        self._channel = channel
        self._kind = kind
        self._arguments = arguments
        self._options = options

    def __call__(self, *request: Any, **options: Any) -> Any:
        return self._channel.call(self, request, options)

    def of(self, channel: grpc.aio.Channel) -> Any:
        """The same method of a channel of gRPC's."""
        make = {
            "unary_unary": channel.unary_unary,
            "unary_stream": channel.unary_stream,
            "stream_unary": channel.stream_unary,
            "stream_stream": channel.stream_stream,
        }[self._kind]
        return make(*self._arguments, **self._options)
