"""Items that are being scored, whoever waits for them: a caller whose deadline passes leaves, and when it sends them
again it waits for what goes on, or gets what was found. Begun anew with every call, a group that takes longer than
reward.timeout_s would never be scored.
"""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from rolecall.rpc import deadlines
from rolecall.v1 import reward_pb2

T = TypeVar("T")

LINGER_S = 300.0
"""Seconds after which what nobody waits for is dropped: longer than a caller pauses before it asks again."""


@dataclass(eq=False)
class _Begun(Generic[T]):
    """Items that were begun together."""

    task: "asyncio.Future[Sequence[T]]"
    num_left: int
    """Items whose outcome nobody has been given."""
    num_waiting: int = 0
    """Callers."""
    lingering: asyncio.TimerHandle | None = None


class Underway(Generic[T]):
    """The items that `score` is at, each once. Used from one event loop; `close` at the end."""

    def __init__(self, score: Callable[[Sequence[reward_pb2.ScoreItem]], Awaitable[Sequence[T]]]) -> None:
        """`score` gives one outcome per item, in order. It is called without its callers' deadlines."""
        self._score = score
        self._places: dict[bytes, tuple[_Begun[T], int]] = {}
        """Bounded by what callers wait for, and by LINGER_S for what they left."""

    async def outcomes(self, items: Sequence[reward_pb2.ScoreItem]) -> list[T]:
        """One per item, in order. What all callers have left goes on for LINGER_S."""
        keys = [hashlib.sha256(item.SerializeToString(deterministic=True)).digest() for item in items]
        self._begin({key: item for key, item in zip(keys, items, strict=True) if key not in self._places})
        places = [self._places[key] for key in keys]
        begun = {each for each, _ in places}
        for each in begun:
            self._join(each)
        try:
            await asyncio.wait([each.task for each in begun])  # bounded: by the caller's deadline
            for key, (each, _) in zip(keys, places, strict=True):
                each.num_left -= self._places.pop(key, None) is not None
            return [each.task.result()[index] for each, index in places]
        finally:
            for each in begun:
                self._leave(each)

    def close(self) -> None:
        """Ends what goes on."""
        for begun in {each for each, _ in self._places.values()}:
            self._drop(begun)

    def _begin(self, fresh: dict[bytes, reward_pb2.ScoreItem]) -> None:
        if fresh:
            with deadlines.without_deadline():
                begun = _Begun(asyncio.ensure_future(self._score(list(fresh.values()))), len(fresh))
            self._places |= {key: (begun, index) for index, key in enumerate(fresh)}

    def _join(self, begun: _Begun[T]) -> None:
        begun.num_waiting += 1
        if begun.lingering is not None:
            begun.lingering.cancel()
            begun.lingering = None

    def _leave(self, begun: _Begun[T]) -> None:
        begun.num_waiting -= 1
        if not begun.num_waiting and begun.num_left:
            begun.lingering = asyncio.get_running_loop().call_later(LINGER_S, self._drop, begun)

    def _drop(self, begun: _Begun[T]) -> None:
        begun.task.cancel()
        if begun.lingering is not None:
            begun.lingering.cancel()
        self._places = {key: place for key, place in self._places.items() if place[0] is not begun}
