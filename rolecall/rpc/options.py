"""Settings of gRPC that servers and channels share."""

import json
from collections.abc import Sequence
from typing import Any

MAX_MESSAGE_BYTES = 16 * 2**20
"""Largest message either way, stated on both sides; bulk data goes through the store or the weight channel."""

_COMMON: tuple[tuple[str, Any], ...] = (
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    # Pings more often than every 30 s are answered with GOAWAY by servers that keep gRPC's defaults.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)


def server_options() -> list[tuple[str, Any]]:
    """Without SO_REUSEPORT a second server on a port fails instead of silently taking every other connection."""
    return [*_COMMON, ("grpc.so_reuseport", 0), ("grpc.http2.min_recv_ping_interval_without_data_ms", 20_000), ("grpc.keepalive_permit_without_calls", 1)]


def channel_options(idempotent: Sequence[str], *, loopback: bool) -> list[tuple[str, Any]]:
    """`idempotent`: full names of the methods that gRPC may repeat by itself, e.g. `rolecall.v1.RewardService/Score`."""
    options = [
        *_COMMON,
        ("grpc.enable_retries", 1),
        ("grpc.service_config_disable_resolution", 1),
        ("grpc.initial_reconnect_backoff_ms", 200),
        ("grpc.min_reconnect_backoff_ms", 1_000),
        ("grpc.max_reconnect_backoff_ms", 5_000),
    ]
    if loopback:
        options.append(("grpc.enable_http_proxy", 0))
    if idempotent:
        options.append(("grpc.service_config", _retry_config(idempotent)))
    return options


def _retry_config(idempotent: Sequence[str]) -> str:
    names = []
    for method in idempotent:
        service, separator, name = method.strip("/").partition("/")
        if not separator or not name:
            raise ValueError(f"{method!r} is not a full method name such as rolecall.v1.RewardService/Score")
        names.append({"service": service, "method": name})
    retry = {"maxAttempts": 4, "initialBackoff": "0.1s", "maxBackoff": "2s", "backoffMultiplier": 2, "retryableStatusCodes": ["UNAVAILABLE"]}
    return json.dumps({"methodConfig": [{"name": names, "retryPolicy": retry}]})
