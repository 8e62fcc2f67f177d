"""A memory of the items that lost worker processes, and how often, whoever asked for them."""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rolecall.v1 import reward_pb2

MAX_KEPT = 4096
"""Items that are remembered; of more, those that lost a worker last."""
LAPSE_S = 600.0
"""Seconds after which an item is tried once more: workers may have been killed from outside, or stood still."""


@dataclass(frozen=True)
class Loss:
    """The workers that an item lost, and how."""

    number: int
    """Calls in which it lost any: what befalls all workers at once counts once for equal items of a call."""
    code: str
    """Code of the last one's result."""
    message: str
    call: int
    """Number of the last of those calls."""
    at: float
    """Time of the last, by the memory's clock."""


def key_of(component: int, items: Sequence[reward_pb2.ScoreItem]) -> bytes:
    """The same for `items` of a component under whatever ids."""
    digest = hashlib.sha256(component.to_bytes(4, "big"))
    for item in items:
        nameless = reward_pb2.ScoreItem()
        nameless.CopyFrom(item)
        nameless.id = nameless.group = ""
        data = nameless.SerializeToString(deterministic=True)
        digest.update(len(data).to_bytes(8, "big") + data)
    return digest.digest()


class Losses:
    """A memory of losses by key. Used under a lock."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._kept: OrderedDict[bytes, Loss] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._kept)

    def recent(self, key: bytes) -> Loss | None:
        """The losses over what has `key`; None where there were none for LAPSE_S, or since it was scored last."""
        loss = self._kept.get(key)
        return None if loss is None or self._clock() - loss.at > LAPSE_S else loss

    def note(self, key: bytes, call: int, code: str, message: str) -> int:
        """Counts one more, once for each `call`; how many there are."""
        known = self._kept.pop(key, None)
        number = 1 if known is None else known.number + (known.call != call)
        self._kept[key] = Loss(number, code, message, call, self._clock())
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        return number

    def forget(self, key: bytes) -> None:
        """Drops what has `key`: it was scored."""
        self._kept.pop(key, None)
