"""Arrays to bytes and back: raw little-endian, lengths checked before anything is allocated; fields of a data set.

Owns the mapping between protobuf DTypes and numpy dtypes. bfloat16 has no numpy dtype and is refused here: weights
never travel as Tensors.
"""

from collections.abc import Sequence
from math import prod
from typing import Any, TypeAlias

import numpy as np
from google.protobuf import json_format, struct_pb2
from numpy.typing import NDArray

from rolecall.errors import InvalidInputError
from rolecall.v1 import tensor_pb2

Array: TypeAlias = NDArray[Any]

_DTYPES: dict[int, np.dtype[Any]] = {
    tensor_pb2.DTYPE_UINT8: np.dtype("u1"),
    tensor_pb2.DTYPE_INT16: np.dtype("<i2"),
    tensor_pb2.DTYPE_INT32: np.dtype("<i4"),
    tensor_pb2.DTYPE_INT64: np.dtype("<i8"),
    tensor_pb2.DTYPE_FLOAT16: np.dtype("<f2"),
    tensor_pb2.DTYPE_FLOAT32: np.dtype("<f4"),
    tensor_pb2.DTYPE_FLOAT64: np.dtype("<f8"),
}
_CODES = {dtype: code for code, dtype in _DTYPES.items()}


def encode_tensor(array: Array) -> tensor_pb2.Tensor:
    """Copies `array` into a Tensor. InvalidInputError for a dtype outside the contract."""
    dtype = array.dtype.newbyteorder("<")
    if dtype not in _CODES:
        raise InvalidInputError(
            f"dtype {array.dtype} is not a Tensor dtype; convert to one of {sorted(map(str, _CODES))}"
        )
    return tensor_pb2.Tensor(dtype=_CODES[dtype], shape=array.shape, data=array.astype(dtype, copy=False).tobytes())  # type: ignore[arg-type]


def decode_tensor(tensor: tensor_pb2.Tensor, what: str) -> Array:
    """A read-only view of the bytes in `tensor`. `what` names the field in errors."""
    dtype = _DTYPES.get(tensor.dtype)
    if dtype is None:
        raise InvalidInputError(
            f"{what}: dtype {tensor.dtype} is not one this side reads; send one of the Tensor dtypes, not bfloat16"
        )
    return decode_array(tensor.data, dtype, tuple(tensor.shape), what)


def decode_array(data: bytes, dtype: np.dtype[Any] | str, shape: Sequence[int], what: str) -> Array:
    """A read-only view of little-endian `data` as `shape`; one extent may be -1. InvalidInputError when the length does
    not fit.
    """
    dtype = np.dtype(dtype).newbyteorder("<")
    known = prod(n for n in shape if n != -1) * dtype.itemsize
    free = list(shape).count(-1)
    fits = len(data) == known if not free else known and len(data) % known == 0
    cause: ValueError | None = None
    if free <= 1 and min(shape, default=0) >= -1 and fits:
        try:
            return np.frombuffer(data, dtype).reshape(shape)
        except ValueError as error:  # of no element, with more dimensions or longer ones than numpy has
            cause = error
    raise InvalidInputError(
        f"{what}: {len(data)} bytes do not hold {dtype} {list(shape)}; the writer and the reader disagree on its shape"
    ) from cause


EXACT = 2**53
"""Whole numbers up to it are float64s."""


def decode_fields(fields: struct_pb2.Struct) -> dict[str, Any]:
    """Returns the values of `fields` by name, as JSON's. A Struct knows one kind of number, float64: whole numbers come
    as int, as they were, where it holds them exactly.
    """
    return {name: _whole_numbers(value) for name, value in json_format.MessageToDict(fields).items()}


def _whole_numbers(value: Any) -> Any:
    match value:
        case float() if abs(value) <= EXACT and value.is_integer():
            return int(value)
        case list():
            return [_whole_numbers(item) for item in value]
        case dict():
            return {name: _whole_numbers(item) for name, item in value.items()}
    return value
