"""Bad bodies for any method, made from its descriptor: noise, messages of odd values, cut and bent ones, deep and large
ones.
"""

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from google.protobuf import struct_pb2
from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

from rolecall.rpc.options import MAX_MESSAGE_BYTES

UNREADABLE = frozenset({"deep", "too large"})
"""Kinds that no server may take."""
_INTEGERS = (0, 1, -1, 2, 7, 255, 2**31 - 1, -(2**31), 2**53, 2**63 - 1, -(2**63))
_NUMBERS = (0.0, -0.0, 0.5, 1.0, -1.0, 1e-300, 1e18, 1.7e308, float("inf"), float("-inf"), float("nan"))
_STRINGS = (
    "",
    "a",
    "\0",
    "../../etc/passwd",
    "/",
    "unix:/",
    "127.0.0.1:1",
    "s3://b/k",
    "{rl:x}:run",
    "%s%n",
    "\U0001f600" * 9,
)
_DEPTH = 5_000


@dataclass(frozen=True)
class Body:
    """What is sent."""

    kind: str
    data: bytes


class Bodies:
    """Bodies by a seed. `hints`: values that are right, by the name of a field, which half of the odd messages have."""

    def __init__(self, seed: int, hints: dict[str, object]) -> None:
        self._random = random.Random(seed)
        self._hints = hints

    def of(self, method: MethodDescriptor, kind: str | None = None) -> Body:
        """Returns the next body for `method`, of any kind, or of `kind`."""
        draw = self._random
        kind = kind or draw.choices(("noise", "odd", "cut", "bent", "deep"), (20, 45, 15, 17, 3))[0]
        return Body(kind, self._made[kind](self, method))

    def _noise(self, method: MethodDescriptor) -> bytes:
        return self._random.randbytes(self._random.choice((0, 1, 2, 7, 64, 300, 3000)))

    def _odd(self, method: MethodDescriptor) -> bytes:
        message = GetMessageClass(method.input_type)()
        self._fill(message, 0)
        return message.SerializeToString()

    def _cut(self, method: MethodDescriptor) -> bytes:
        data = self._odd(method)
        return data[: self._random.randrange(len(data) + 1)]

    def _bent(self, method: MethodDescriptor) -> bytes:
        data = bytearray(self._odd(method) or b"\0")
        for _ in range(self._random.randint(1, 8)):
            data[self._random.randrange(len(data))] = self._random.randrange(256)
        return bytes(data)

    def _deep(self, method: MethodDescriptor) -> bytes:
        """Groups within groups, which every reader must walk through: of an unknown field where none is known."""
        return b"\xfb\x07" * _DEPTH + b"\xfc\x07" * _DEPTH

    def _too_large(self, method: MethodDescriptor) -> bytes:
        return _length(9_999, b"\0" * (MAX_MESSAGE_BYTES + 1))

    def _bomb(self, method: MethodDescriptor) -> bytes:
        """As many of a repeated field as fit one message: two bytes each on the wire, and many more as objects."""
        return _length(_parts(method)[0].number, b"") * ((MAX_MESSAGE_BYTES - 64) // 2)

    _made: "dict[str, Callable[[Bodies, MethodDescriptor], bytes]]" = {
        "noise": _noise,
        "odd": _odd,
        "cut": _cut,
        "bent": _bent,
        "deep": _deep,
        "too large": _too_large,
        "bomb": _bomb,
    }

    def _fill(self, message: Message, depth: int) -> None:
        draw = self._random
        if isinstance(message, struct_pb2.Struct):
            value: float | list[Any] = 1.0
            for _ in range(draw.choice((0, 1, 5, 40))):  # readers give up at 100 messages within messages
                value = [value]
            message.update({"a": value})
            return
        for field in message.DESCRIPTOR.fields:
            hint = self._hints.get(field.name)
            if type(hint) is type(getattr(message, field.name)) and draw.random() < 0.5:
                setattr(message, field.name, hint)
            elif draw.random() < (0.8 if depth < 3 else 0.2):
                self._set(message, field, depth)

    def _set(self, message: Message, field: Any, depth: int) -> None:
        draw, value = self._random, getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, of = field.message_type.fields
            if of.message_type is None:
                value[self._scalar(key)] = self._scalar(of)
            else:
                self._fill(value[self._scalar(key)], depth + 1)
        elif field.message_type is not None:
            for _ in range(draw.randint(0, 3) if field.is_repeated else 1):
                self._fill(value.add() if field.is_repeated else value, depth + 1)
                if not field.is_repeated:
                    value.SetInParent()
        elif field.is_repeated:
            value.extend(self._scalar(field) for _ in range(draw.choice((0, 1, 3, 40))))
        else:
            setattr(message, field.name, self._scalar(field))

    def _scalar(self, field: Any) -> object:
        draw = self._random
        match field.cpp_type:
            case FieldDescriptor.CPPTYPE_BOOL:
                return draw.random() < 0.5
            case FieldDescriptor.CPPTYPE_ENUM:
                return draw.choice((*(value.number for value in field.enum_type.values), -1, 99))
            case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
                return draw.choice(_NUMBERS)
            case FieldDescriptor.CPPTYPE_STRING if field.type == FieldDescriptor.TYPE_BYTES:
                return draw.randbytes(draw.choice((0, 1, 4, 12, 40, 400)))
            case FieldDescriptor.CPPTYPE_STRING:
                return draw.choice((*_STRINGS, "x" * draw.choice((100, 5_000))))
        low, high = {
            FieldDescriptor.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
            FieldDescriptor.CPPTYPE_UINT32: (0, 2**32 - 1),
            FieldDescriptor.CPPTYPE_UINT64: (0, 2**64 - 1),
        }.get(field.cpp_type, (-(2**63), 2**63 - 1))
        return min(max(draw.choice(_INTEGERS), low), high)


def has_parts(method: MethodDescriptor) -> bool:
    """Whether the request has a list of messages, of which a bomb can be made."""
    return bool(_parts(method))


def _parts(method: MethodDescriptor) -> list[FieldDescriptor]:
    return [field for field in method.input_type.fields if field.is_repeated and field.message_type is not None]


def _length(number: int, data: bytes) -> bytes:
    """A field of `data` on the wire."""
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes([*out, value])
