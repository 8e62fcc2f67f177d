"""Settings of gRPC that servers and channels share."""

import json
from collections.abc import Sequence
from typing import Any

LIVENESS = "liveness"
"""Health name that is SERVING as long as the process answers; the others say whether the role can do its job."""

MAX_MESSAGE_BYTES = 16 * 2**20
"""Largest message either way, stated on both sides; bulk data goes through the store or the weight channel."""
MAX_GROUP_BYTES = 128 * 2**20
"""The same where a RewardService is called, and where one is served that compares responses, for a group is never cut:
64 responses of 131,072 tokens with their ids are 64 MiB, before what their prompt has besides.
"""

KEEPALIVE_S = 10.0
"""A connection with calls under way on which nothing moved for this long is pinged..."""
KEEPALIVE_TIMEOUT_S = 10.0
"""Longest wait for the answer to a ping before the connection is given up: a peer that hangs or lost its network fails
its calls within 20 s, whatever their deadline.
"""
STRANGERS_KEEPALIVE_S = 330.0
"""The same of a connection to somebody else's server. One that keeps gRPC's defaults closes it, with all calls
on it, at the third ping of a long call that comes within 300 s of the one before.
"""
REPLICA_AGE_S = 60.0
"""Age, give or take a tenth, at which a server of which there may be several asks its callers to connect again: gRPC
looks a name up only then, and would never find a replica that came. Calls under way end on the old connection, however
long they take.
"""


def _sizes(max_message_bytes: int) -> list[tuple[str, Any]]:
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
    ]


def _keepalive(after_s: float) -> list[tuple[str, Any]]:
    return [
        ("grpc.keepalive_time_ms", int(after_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
        # of pings that were sent for other reasons; 60 s otherwise
        ("grpc.http2.ping_timeout_ms", int(KEEPALIVE_TIMEOUT_S * 1000)),
    ]


def server_options(max_age_s: float | None = None, max_message_bytes: int = MAX_MESSAGE_BYTES) -> list[tuple[str, Any]]:
    """Returns the options of a server, whose connections live for about `max_age_s`; None: as long as both ends do.
    SO_REUSEPORT is off, so that a second server on a port fails instead of silently taking every other connection.
    """
    age = [] if max_age_s is None else [("grpc.max_connection_age_ms", int(max_age_s * 1000))]
    return [
        *age,
        *_sizes(max_message_bytes),
        *_keepalive(KEEPALIVE_S),
        ("grpc.so_reuseport", 0),
        # Pings of a client whose call has nothing to hear yet: the third within 300 s would end its connection, and all
        # calls on it.
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.keepalive_permit_without_calls", 1),
    ]


def channel_options(
    idempotent: Sequence[str], *, loopback: bool, ours: bool = True, max_message_bytes: int = MAX_MESSAGE_BYTES
) -> list[tuple[str, Any]]:
    """`idempotent`: full names of the methods that gRPC may repeat by itself, e.g. `rolecall.v1.RewardService/Score`.

    ours: whether the servers take our pings. Where the target stands for several addresses, calls take turns over those
    that can be reached, and a repeated call goes to the next.
    """
    options = [
        *_sizes(max_message_bytes),
        *_keepalive(KEEPALIVE_S if ours else STRANGERS_KEEPALIVE_S),
        ("grpc.enable_retries", 1),
        # A request larger than this buffer would not be repeated.
        ("grpc.per_rpc_retry_buffer_size", max_message_bytes),
        ("grpc.service_config", _service_config(idempotent)),
        ("grpc.service_config_disable_resolution", 1),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 5_000),
        # Otherwise channels of one process to one address share their connection, its failures and its wait until it
        # is tried again: a new process at an address would seem as dead as the one before it.
        ("grpc.use_local_subchannel_pool", 1),
    ]
    if ours:
        options.append(("grpc.http2.max_pings_without_data", 0))  # without a bound
    if loopback:
        options.append(("grpc.enable_http_proxy", 0))
    return options


def _service_config(idempotent: Sequence[str]) -> str:
    names = []
    for method in idempotent:
        service, separator, name = method.strip("/").partition("/")
        if not separator or not name:
            raise ValueError(f"{method!r} is not a full method name such as rolecall.v1.RewardService/Score")
        names.append({"service": service, "method": name})
    retry = {
        "maxAttempts": 4,
        "initialBackoff": "0.1s",
        "maxBackoff": "2s",
        "backoffMultiplier": 2,
        "retryableStatusCodes": ["UNAVAILABLE"],
    }
    methods = [{"name": names, "retryPolicy": retry}] if names else []
    return json.dumps({"loadBalancingConfig": [{"round_robin": {}}], "methodConfig": methods})
