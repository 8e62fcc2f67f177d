"""Arrays to bytes and back, and what bytes are refused."""

import json
from typing import Any

import numpy as np
import pytest
from google.protobuf import struct_pb2

from rolecall.errors import InvalidInputError
from rolecall.v1.tensor_pb2 import DTYPE_INT32, DTYPE_UNSPECIFIED, Tensor
from rolecall.wire import decode_fields, decode_tensor, encode_tensor


@pytest.mark.parametrize("dtype", ["u1", "i2", "i4", "i8", "f2", "f4", "f8", ">i4"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (2, 3)])
def test_a_tensor_comes_back_as_it_was(dtype: str, shape: tuple[int, ...]) -> None:
    array = np.arange(np.prod(shape, dtype=int)).reshape(shape).astype(dtype)
    read = decode_tensor(encode_tensor(array), "x")
    assert read.shape == shape
    assert read.tolist() == array.tolist()


@pytest.mark.parametrize(
    ("size", "shape"),
    [
        (4, (2,)),
        (8, (1,)),
        (3, (1,)),
        (4, (-2,)),
        (4, (-1, -1)),
        (0, (2**53, -1, 2**31 - 1)),
        (0, (0, 2**62, 2**62)),
        (4, (1,) * 65),
        (4, (2**63 - 1, 2**63 - 1)),
    ],
)
def test_bytes_that_are_no_such_tensor_are_refused_by_the_name_of_their_field(
    size: int, shape: tuple[int, ...]
) -> None:
    with pytest.raises(InvalidInputError, match=r"^probe.token_ids: \d bytes do not hold int32 \["):
        decode_tensor(Tensor(dtype=DTYPE_INT32, shape=shape, data=b"x" * size), "probe.token_ids")


def test_a_dtype_that_is_none_is_refused() -> None:
    with pytest.raises(InvalidInputError, match=r"^x: dtype 0 is not one this side reads"):
        decode_tensor(Tensor(dtype=DTYPE_UNSPECIFIED, shape=[1], data=b"1234"), "x")


def test_whole_numbers_of_fields_come_back_whole() -> None:
    fields = struct_pb2.Struct()
    values: Any = {"big": 1e300, "calls": {"inputs": [[2**53, -1], []], "on": True, "none": None}, "half": 0.5, "n": 3}
    fields.update(values)
    assert json.dumps(decode_fields(fields), sort_keys=True) == json.dumps(values, sort_keys=True)
