"""The calls of a client that are one and the same: SDKs repeat a call whose answer did not reach them.

An agent may also ask the same twice on purpose and wants two answers then: another sample of the same thought. So a
body alone says nothing. A call is a repetition when its client says so (an Idempotency-Key, or the retry count of
OpenAI's SDKs), or when whoever asked the same before left without the answer. Bound: the calls of one episode.
"""

import asyncio
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from services.rollout.harness.chat import RefusedError

T = TypeVar("T")


@dataclass(eq=False)
class Exchange(Generic[T]):
    """One call, however often it was made."""

    digest: bytes
    """Digest of its body."""
    key: str
    """The Idempotency-Key that it came with; empty: it had none."""
    work: "asyncio.Task[T]"
    is_waited_for: Callable[[], bool]
    """Whether its client is still there."""
    is_delivered: bool = False
    """Whether the whole answer was sent."""


class Exchanges(Generic[T]):
    """The calls of one episode."""

    def __init__(self) -> None:
        self._all: list[Exchange[T]] = []

    def earlier(self, body: bytes, key: str, retry_count: str) -> Exchange[T] | None:
        """The call that this one repeats; None: it is a new one. RefusedError for a key that stands for another."""
        digest = hashlib.sha256(body).digest()
        if key:
            named = next((each for each in self._all if each.key == key), None)
            if named is not None and named.digest != digest:
                raise RefusedError(
                    422, "idempotency_key_reused", f"Idempotency-Key {key[:64]!r} stood for another call"
                )
            return named
        is_retry = retry_count not in ("", "0")
        for each in reversed(self._all):
            if each.digest == digest and (is_retry or not (each.is_delivered or each.is_waited_for())):
                return each
        return None

    def add(self, body: bytes, key: str, work: "asyncio.Task[T]", is_waited_for: Callable[[], bool]) -> Exchange[T]:
        """A call that is made for the first time."""
        exchange = Exchange(hashlib.sha256(body).digest(), key, work, is_waited_for)
        self._all.append(exchange)
        return exchange
