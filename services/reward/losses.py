"""A memory of the items that lost worker processes, and how often, whoever asked for them."""

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from rolecall.v1 import reward_pb2

MAX_KEPT = 4096
"""Items that are remembered; of more, those that lost a worker last."""


@dataclass(frozen=True)
class Loss:
    """The workers that an item lost, and how."""

    number: int
    code: str
    """Code of the last one's result."""
    message: str


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

    def __init__(self) -> None:
        self._kept: OrderedDict[bytes, Loss] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._kept)

    def get(self, key: bytes) -> Loss | None:
        """The losses over what has `key`; None where there were none since it was scored last."""
        return self._kept.get(key)

    def note(self, key: bytes, code: str, message: str) -> None:
        """Counts one more."""
        known = self._kept.pop(key, None)
        self._kept[key] = Loss(1 if known is None else known.number + 1, code, message)
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)

    def forget(self, key: bytes) -> None:
        """Drops what has `key`: it was scored."""
        self._kept.pop(key, None)
