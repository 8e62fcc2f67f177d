"""Channels: how a role calls another. Owns credentials, limits, retries and the interceptors of the calling side."""

from collections.abc import Sequence
from pathlib import Path

import grpc
from opentelemetry.instrumentation.grpc import aio_client_interceptors

from rolecall.address import is_loopback
from rolecall.errors import ConfigError
from rolecall.rpc import tls as tls_files
from rolecall.rpc.client_calls import AbandonedCalls, StreamCalls, UnaryCalls
from rolecall.rpc.options import channel_options
from rolecall.settings import RpcSection

DEFAULT_TIMEOUT_S = 30.0
"""Deadline of calls that name no other: every long call names its own, and what is left answers at once."""


def open_channel(
    target: str,
    rpc: RpcSection,
    *,
    idempotent: Sequence[str] = (),
    tls: bool | None = None,
    bearer_token: str | None = None,
    ca_file: Path | None = None,
    ours: bool = True,
    default_timeout_s: float = DEFAULT_TIMEOUT_S,
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
    tls: None, as the roles among themselves (mutual TLS when rpc.tls is set, else plaintext); True, TLS checked against
    `ca_file` or the system's
        roots, without a certificate of ours; False, plaintext.
    ours: False towards a server that may be anybody's, which is pinged less. bearer_token: sent with each call;
    ConfigError on plaintext. Plaintext beyond loopback is a ConfigError too, unless rpc.behind_mesh.
    """
    credentials = channel_credentials(target, rpc, tls=tls, ca_file=ca_file)
    tracing = aio_client_interceptors()  # type: ignore[no-untyped-call]
    interceptors = [
        UnaryCalls(target, default_timeout_s),
        StreamCalls(target, default_timeout_s),
        *tracing,
        AbandonedCalls(),
    ]
    options = channel_options(idempotent, loopback=is_loopback(target), ours=ours)
    if credentials is None:
        if bearer_token is not None:
            raise ConfigError(f"a bearer token for {target} needs TLS; it is never sent in the clear")
        return grpc.aio.insecure_channel(target, options, grpc.Compression.NoCompression, interceptors)
    if bearer_token is not None:
        credentials = tls_files.with_bearer_token(credentials, bearer_token)
    return grpc.aio.secure_channel(target, credentials, options, grpc.Compression.NoCompression, interceptors)


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
