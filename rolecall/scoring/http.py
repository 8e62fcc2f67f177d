"""Calls of scorers that are HTTP servers and speak JSON, with the errors of a RewardService's client.

Owns the connections, the deadline of a call, the bound on what an answer holds, and what a status means. When a call
may be made is json_server.py's.
"""

import asyncio
import email.utils
import json
import logging
import ssl
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import urlsplit

import httpx2

from rolecall.address import is_loopback
from rolecall.errors import (
    ConfigError,
    DeadlineError,
    InvalidInputError,
    PermissionDeniedError,
    RateLimitedError,
    RoleCallError,
    ScorerError,
    ScorerUnavailableError,
    UnauthenticatedError,
    VersionMismatchError,
)
from rolecall.rpc import deadlines
from rolecall.settings import RpcSection, ScorerServer

logging.getLogger("httpx2").setLevel(logging.WARNING)  # else it says a line for each call

MAX_ANSWER_BYTES = 16 * 2**20
"""A longer answer is not read on."""
MAX_TOLD_CHARS = 200
"""What is told of the text of an error."""
_AWAY = (408, 425, 502, 503, 504)
_MISPLACED = (301, 302, 303, 307, 308, 404, 405, 410, 421)
"""Another server answers at the URL, or this one knows no such model: UNIMPLEMENTED, in the words of gRPC."""


class HttpCarrier:
    """Calls of one HTTP server; `close` at the end."""

    def __init__(self, scorer: ScorerServer, rpc: RpcSection, token: Callable[[], str] | None) -> None:
        """The server at the scorer's URL, called with what `token` gives. ConfigError when its answers, or the token,
        would be seen on the way, and for unreadable roots.
        """
        url = urlsplit(scorer.address)
        here = is_loopback(f"{url.hostname}:{url.port or 80}")
        if url.scheme == "http" and token is not None:
            raise ConfigError(f"a bearer token for {scorer.address} needs https://; it is never sent in the clear")
        if url.scheme == "http" and not here and not rpc.behind_mesh:
            raise ConfigError(
                f"{scorer.address} is beyond this machine and has no TLS; use https://, or set rpc.behind_mesh when a "
                "service mesh encrypts it"
            )
        self._url = scorer.address.rstrip("/")
        self._look_path = scorer.look_path
        self._token = token
        self._client = httpx2.AsyncClient(
            verify=_trust(scorer) if url.scheme == "https" else True,
            timeout=None,  # each call has one deadline, its own
            limits=httpx2.Limits(
                max_connections=2 * scorer.max_calls
            ),  # a second call beside each slow one has its own
            trust_env=not here,
        )

    def encoded(self, body: Any) -> bytes:
        """Returns the JSON of `body`."""
        return json.dumps(body).encode()

    async def call(self, path: str, body: bytes | None, timeout_s: float) -> Any:
        """Returns the JSON that the server answers to the JSON `body`, posted to `path`; to None, which is a GET, what
        it says of itself. Raises what a RewardService's answer of that kind would: see `status_error`.
        """
        url = f"{self._url}{self._look_path if body is None else path}"
        method = "GET" if body is None else "POST"
        timeout_s = deadlines.child_timeout_s(timeout_s)
        headers = {"content-type": "application/json"} if body is not None else {}
        if self._token is not None:
            headers["authorization"] = f"Bearer {self._token()}"
        try:
            async with asyncio.timeout(timeout_s):
                async with self._client.stream(method, url, content=body, headers=headers) as response:
                    data = await _read(response, url)
        except TimeoutError as error:
            raise DeadlineError(f"{url} did not answer within {timeout_s:.1f} s") from error
        except httpx2.HTTPError as error:
            raise ScorerUnavailableError(f"{url} cannot be reached: {error or type(error).__name__}") from error
        if response.status_code != 200:
            raise status_error(url, response.status_code, data, response.headers.get("retry-after"))
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as error:  # what is nested too deep is not read
            raise ScorerError(f"{url} answered what is no JSON: {_told(data)!r}") from error

    async def close(self) -> None:
        """Closes the connections."""
        await self._client.aclose()  # bounded: calls under way were given up by then


def status_error(url: str, status: int, data: bytes, retry_after: str | None) -> RoleCallError:
    """The error that an HTTP status is, by what gRPC makes of it and the table in reward.proto makes of that: away and
    misplaced servers are waited for, a refused request is the item's, and any other flaw may pass.
    """
    message = f"{url} answered {status}: {_told(data)}"
    if status == 429 or (status == 503 and retry_after is not None):
        return RateLimitedError(message, retry_after_s=str(seconds_of(retry_after)))
    if status in _AWAY:
        return ScorerUnavailableError(message)
    if status == 401:
        return UnauthenticatedError(message)
    if status == 403:
        return PermissionDeniedError(message)
    if status in _MISPLACED:
        return VersionMismatchError(message)
    if 400 <= status < 500:
        return InvalidInputError(message)
    return RoleCallError(message, code=f"HTTP_{status}")


def seconds_of(retry_after: str | None) -> float:
    """The seconds that a Retry-After header asks for, which may be a date; 0 where it asks for none, or is neither."""
    if retry_after is None:
        return 0.0
    if retry_after.strip().isdecimal():
        return float(retry_after)
    try:
        return max(0.0, email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time())
    except ValueError:
        return 0.0


async def _read(response: httpx2.Response, url: str) -> bytes:
    data = bytearray()
    async for part in response.aiter_bytes():  # bounded: the call's timeout is around it
        data += part
        if len(data) > MAX_ANSWER_BYTES:
            raise ScorerError(f"{url} answered more than {MAX_ANSWER_BYTES} bytes")
    return bytes(data)


def _told(data: bytes) -> str:
    return data[: 4 * MAX_TOLD_CHARS].decode(errors="replace")[:MAX_TOLD_CHARS]


def _trust(scorer: ScorerServer) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=None if scorer.ca_file in (None, "system") else scorer.ca_file)
    except OSError as error:
        raise ConfigError(f"ca_file: cannot read {scorer.ca_file}: {error}; name a file of PEM roots") from error
