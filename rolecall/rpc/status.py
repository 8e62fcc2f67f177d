"""Errors on the wire: a RoleCallError becomes a status with google.rpc.ErrorInfo (AIP-193), and back into the same
class.

Owns the mapping both ways; it makes no calls. Statuses without our ErrorInfo (from gRPC itself, a mesh, or somebody
else's scorer) become the error nearest in meaning, naming target and method.
"""

import re
from collections.abc import Iterable, Sequence
from typing import Any

import grpc
from google.protobuf import any_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from rolecall import errors
from rolecall.errors import RoleCallError

DOMAIN = "rolecall"
_DETAILS_KEY = "grpc-status-details-bin"
# All metadata of a response must stay under the 8 KiB that gRPC implementations accept by default; the message travels
# twice, once in base64.
_MAX_MESSAGE_BYTES = 1500
_MAX_DETAIL_CHARS = 200
_MAX_DETAILS = 8
_TOO_LARGE = re.compile(
    r"\bmessage (after decompression )?(is )?(larger than max|exceeds (the )?maximum (configured message )?size)",
    re.IGNORECASE,
)
"""How gRPC's implementations say, with RESOURCE_EXHAUSTED, that a message is beyond a size limit: no pause would help.
"""

_CUT_OFF = re.compile(r"\bRST_STREAM\b")
"""How gRPC says, with INTERNAL, that the stream ended without a status: a proxy between had to break it off, its own
connection being gone, after the first answer had passed. Servers that fail send a status.
"""
_PROXY_TIMEOUT = re.compile(r"^(upstream request timeout|stream timeout)$")
"""How Envoy says, with UNAVAILABLE, that a route's timeout is shorter than the call."""


def _by_reason() -> dict[str, type[RoleCallError]]:
    found: dict[str, type[RoleCallError]] = {}
    level: list[type[RoleCallError]] = [RoleCallError]
    while level:
        for kind in level:
            found.setdefault(kind.reason, kind)
        level = [child for kind in level for child in kind.__subclasses__()]
    return found


_CLASSES = _by_reason()

_PLAIN: dict[grpc.StatusCode, tuple[type[RoleCallError], str]] = {
    grpc.StatusCode.UNAVAILABLE: (errors.UnavailableError, "cannot be reached"),
    grpc.StatusCode.CANCELLED: (errors.UnavailableError, "cancelled the call"),
    grpc.StatusCode.ABORTED: (errors.UnavailableError, "aborted the call"),
    grpc.StatusCode.DEADLINE_EXCEEDED: (errors.DeadlineError, "did not answer in time"),
    grpc.StatusCode.RESOURCE_EXHAUSTED: (errors.RateLimitedError, "takes no more calls for now"),
    grpc.StatusCode.INVALID_ARGUMENT: (errors.InvalidInputError, "refused the request"),
    grpc.StatusCode.OUT_OF_RANGE: (errors.InvalidInputError, "refused the request"),
    grpc.StatusCode.NOT_FOUND: (errors.NotFoundError, "does not know what was asked for"),
    grpc.StatusCode.ALREADY_EXISTS: (errors.ConflictError, "has it already"),
    grpc.StatusCode.FAILED_PRECONDITION: (errors.ConflictError, "is in another state"),
    grpc.StatusCode.UNIMPLEMENTED: (
        errors.VersionMismatchError,
        "does not serve this method; is it another service, or another release?",
    ),
    grpc.StatusCode.UNAUTHENTICATED: (
        errors.UnauthenticatedError,
        "refused the credentials; check the certificate or the bearer token",
    ),
    grpc.StatusCode.PERMISSION_DENIED: (
        errors.PermissionDeniedError,
        "refused this caller; check its certificate or token, and a mesh's policies",
    ),
}


def code_of(error: RoleCallError) -> grpc.StatusCode:
    """Canonical status of an error."""
    return grpc.StatusCode[error.status]


def trailing_metadata(error: RoleCallError) -> tuple[tuple[str, bytes], ...]:
    """The metadata that carries `error` beside its status code and message."""
    details = dict(list(error.details.items())[:_MAX_DETAILS])
    info = error_details_pb2.ErrorInfo(
        reason=error.reason,
        domain=DOMAIN,
        metadata={key: str(value)[:_MAX_DETAIL_CHARS] for key, value in details.items()},
    )
    status = status_pb2.Status(code=code_of(error).value[0], message=short_message(error))
    status.details.add().Pack(info)
    return ((_DETAILS_KEY, status.SerializeToString()),)


def short_message(error: RoleCallError) -> str:
    """The message, cut to what fits a response's metadata."""
    encoded = error.message.encode()
    return (
        error.message
        if len(encoded) <= _MAX_MESSAGE_BYTES
        else encoded[:_MAX_MESSAGE_BYTES].decode(errors="ignore") + "..."
    )


def to_error(
    code: grpc.StatusCode, details: str | None, metadata: Iterable[Any] | None, *, target: str, method: str
) -> RoleCallError:
    """The exception that the server raised, or the nearest one for a status that is not ours.

    `metadata`: the trailing (key, value) pairs. What google.rpc.RetryInfo says is the detail `retry_after_s`."""
    info, pause = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
    for detail in _details(metadata):
        _ = detail.Unpack(info) or detail.Unpack(pause)
    if info.domain == DOMAIN and info.reason in _CLASSES:
        return _CLASSES[info.reason](details or info.reason, **dict(info.metadata))
    kind, what = _PLAIN.get(code, (RoleCallError, f"failed with {code.name}"))
    remedy = ""
    if kind is errors.RateLimitedError and _TOO_LARGE.search(details or ""):
        kind, what = errors.ExhaustedError, "is at a limit"
        remedy = "; send less in a message, or raise the limit of the side that refused it"
    if code is grpc.StatusCode.INTERNAL and _CUT_OFF.search(details or ""):
        kind, what = errors.UnavailableError, "was cut off"
    if _PROXY_TIMEOUT.search(details or ""):
        remedy = (
            "; a proxy's timeout is shorter than the call: set the route's timeout and its idle timeout to 0 in the "
            "mesh"
        )
    own = (
        {"retry_after_s": f"{pause.retry_delay.ToTimedelta().total_seconds():g}"}
        if pause.HasField("retry_delay")
        else {}
    )
    text = f"{target} {what} ({method}): {details or code.name}{remedy}"
    return kind(text, target=target, method=method, code=code.name, **own)


def _details(metadata: Iterable[Any] | None) -> Sequence[any_pb2.Any]:
    for key, value in metadata or ():
        if key == _DETAILS_KEY:
            try:
                status: status_pb2.Status = status_pb2.Status.FromString(value)
            except DecodeError:
                return ()
            return list(status.details)
    return ()
