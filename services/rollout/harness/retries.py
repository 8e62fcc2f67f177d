"""The calls of a client that are one and the same: SDKs repeat a call whose answer did not reach them.

An agent may also ask the same twice on purpose and wants two answers then: another sample of the same thought. So a
body alone says nothing. A call is a repetition when its client says so (an Idempotency-Key, or the retry count that
OpenAI's and Anthropic's SDKs send), or when whoever asked the same before left without the answer. A retry count goes
on from the greatest one below it: a call that was left and comes after its own repetition is another one, whose answer
reaches nobody. A call that got no answer is forgotten: made again, it is tried again. Bound: the calls of one episode.
"""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from services.rollout.harness.calls import RefusedError

T = TypeVar("T")


@dataclass(eq=False)
class Exchange(Generic[T]):
    """One call, however often it was made."""

    digest: bytes
    """Digest of its path and body."""
    key: str
    """The Idempotency-Key that it came with; empty: it had none."""
    work: "asyncio.Task[T]"
    is_waited_for: Callable[[], bool]
    """Whether its client is still there."""
    retry_count: int = 0
    """Greatest retry count that it came with."""
    is_delivered: bool = False
    """Whether the whole answer was sent."""


class Exchanges(Generic[T]):
    """The calls of one episode."""

    def __init__(self) -> None:
        self._all: list[Exchange[T]] = []

    def earlier(self, digest: bytes, key: str, retry_count: int) -> Exchange[T] | None:
        """The call that this one repeats, whose path and body have `digest`; None: it is a new one. RefusedError for a
        key that stands for another.
        """
        if key:
            named = next((each for each in self._all if each.key == key), None)
            if named is not None and named.digest != digest:
                raise RefusedError(
                    422, "idempotency_key_reused", f"Idempotency-Key {key[:64]!r} stood for another call"
                )
            return named
        same = [each for each in reversed(self._all) if each.digest == digest]
        if retry_count:
            # the youngest of those that come before it, else the youngest
            found = max(same, key=lambda each: each.retry_count if each.retry_count < retry_count else -1, default=None)
        else:
            found = next((each for each in same if not (each.is_delivered or each.is_waited_for())), None)
        if found is not None:
            found.retry_count = max(found.retry_count, retry_count)
        return found

    def add(
        self, digest: bytes, key: str, retry_count: int, work: "asyncio.Task[T]", is_waited_for: Callable[[], bool]
    ) -> Exchange[T]:
        """A call that came for the first time."""
        exchange = Exchange(digest, key, work, is_waited_for, retry_count)
        self._all.append(exchange)
        work.add_done_callback(lambda done: self._forget(exchange, done))
        return exchange

    def _forget(self, exchange: Exchange[T], done: "asyncio.Task[T]") -> None:
        if done.cancelled() or done.exception() is not None:
            self._all.remove(exchange)
