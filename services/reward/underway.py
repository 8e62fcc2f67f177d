"""Items that are being scored, whoever waits for them: a caller whose deadline passes leaves, and when it sends them
again it waits for what goes on, or gets what was found. Begun anew with every call, a group that takes longer than
reward.timeout_s would never be scored.
"""

import asyncio
import hashlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

from rolecall.rpc import deadlines
from rolecall.v1 import reward_pb2

logger = logging.getLogger(__name__)
T = TypeVar("T")

LINGER_S = 3600.0
"""Seconds after which what nobody waits for is dropped. Longer than a caller that finds its scorer slow leaves it alone
with all its groups waiting; an outcome takes a kilobyte.
"""
Units: TypeAlias = Callable[[Sequence[reward_pb2.ScoreItem]], Sequence[Sequence[int]]]
"""Places of items that are scored, and waited for, together."""


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

    def __init__(self, score: Callable[[Sequence[reward_pb2.ScoreItem]], Awaitable[Sequence[T]]], units: Units) -> None:
        """`score` gives one outcome per item, in order. It is called for each of the `units` of a call, at the same
        time, without the callers' deadlines.
        """
        self._score = score
        self._units = units
        self._places: dict[bytes, tuple[_Begun[T], int]] = {}
        """Bounded by what callers wait for, and by LINGER_S for what they left."""

    async def outcomes(self, items: Sequence[reward_pb2.ScoreItem]) -> list[T]:
        """One per item, in order. What all callers have left goes on for LINGER_S."""
        if not items:
            return []
        keys = [hashlib.sha256(item.SerializeToString(deterministic=True)).digest() for item in items]
        self._begin({key: item for key, item in zip(keys, items, strict=True) if key not in self._places})
        places = [self._places[key] for key in keys]
        begun = {each for each, _ in places}
        for each in begun:
            self._join(each)
        try:
            await asyncio.wait([each.task for each in begun])  # bounded: by the caller's deadline
            for key, place in zip(keys, places, strict=True):
                if self._places.get(key) == place:  # no other caller was given it, and had it begun anew
                    del self._places[key]
                    place[0].num_left -= 1
            return [each.task.result()[index] for each, index in places]
        finally:
            for each in begun:
                self._leave(each)

    def close(self) -> None:
        """Ends what goes on."""
        for begun in {each for each, _ in self._places.values()}:
            self._drop(begun)

    def _begin(self, fresh: dict[bytes, reward_pb2.ScoreItem]) -> None:
        keys, items = list(fresh), list(fresh.values())
        for unit in self._units(items):
            with deadlines.without_deadline():
                begun = _Begun(asyncio.ensure_future(self._score([items[place] for place in unit])), len(unit))
            begun.task.add_done_callback(_note_failure)
            self._places |= {keys[place]: (begun, index) for index, place in enumerate(unit)}

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


def _note_failure(task: "asyncio.Future[Sequence[T]]") -> None:
    """Has an error that no caller waits for any more seen by somebody."""
    if not task.cancelled() and task.exception() is not None:
        logger.error("items could not be scored", exc_info=task.exception())
