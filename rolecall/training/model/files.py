"""safetensors files in and out, a tensor at a time, and text that stays. OSErrors are the caller's (rolecall/disk.py
`writing`).

Our own writer and reader, because those of safetensors take all tensors at once in memory, and know files on a disk
alone: here it is one tensor or a part of one at a time, from and to any storage, and `progressed` moves with every
chunk, so that a slow disk is told apart from one that hangs.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import BinaryIO

import torch

from rolecall.checkpoint.storage import Storage
from rolecall.errors import CheckpointMismatchError

CHUNK_BYTES = 64 * 2**20
"""Written at a time, and twice that synced at a time: at hang_s = 30 a disk of 5 MB/s is still taken for a living one.
"""
_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""The format's names of dtypes."""
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_HEADER_BYTES = 100_000_000
"""The format's own bound on a header."""
GROWING_HEADER_BYTES = 2**18
"""Room left for the header of a file whose tensors are not known yet: some 1,500 of them."""


def write_tensors(
    path: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], progressed: Callable[[], None]
) -> int:
    """Writes and syncs a safetensors file; returns the bytes of the tensors, which may be on any device. OSError."""
    with path.open("wb") as file:
        synced = 0

        def moved() -> None:
            nonlocal synced
            if file.tell() - synced >= CHUNK_BYTES:
                _flush(file)
                synced = file.tell()
            progressed()

        num_bytes = stream_tensors(file, tensors, metadata, moved)
        _flush(file)
        return num_bytes


def stream_tensors(
    file: BinaryIO, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str], progressed: Callable[[], None]
) -> int:
    """Writes a safetensors file to `file`, an opened one; returns the bytes of the tensors, which may be on any device.
    OSError.
    """
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    end = 0
    for name, tensor in tensors.items():
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    for tensor in tensors.values():
        for chunk in _chunks(tensor):
            file.write(chunk)
            progressed()
    return end


class GrowingFile:
    """A safetensors file on a disk, written before it is known what will be in it: room is left for its header. Holds
    no tensor. OSError.
    """

    def __init__(self, path: Path, max_bytes: int, progressed: Callable[[], None]) -> None:
        """Makes an empty file that takes tensors of `max_bytes` together, or one that is larger."""
        self.num_bytes = 0
        """Bytes of the tensors in it."""
        self._file = path.open("wb")
        self._file.seek(8 + GROWING_HEADER_BYTES)
        self._max_bytes = max_bytes
        self._progressed = progressed
        self._header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        self._header_bytes = len(json.dumps(self._header))

    def has_room(self, name: str, tensor: torch.Tensor) -> bool:
        """Whether the tensor can be added."""
        fits = self._header_bytes + len(json.dumps(self._entry(name, tensor))) <= GROWING_HEADER_BYTES
        return fits and (not self.num_bytes or self.num_bytes + tensor.nbytes <= self._max_bytes)

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Writes the tensor, which may be on any device, behind the others. ValueError when the header has no room for
        it.
        """
        entry = self._entry(name, tensor)
        self._header_bytes += len(json.dumps(entry))
        if self._header_bytes > GROWING_HEADER_BYTES:
            raise ValueError(f"no room in the header for {name!r}; ask has_room first")
        unsynced = 0
        for chunk in _chunks(tensor):
            self._file.write(chunk)
            unsynced += len(chunk)
            if unsynced >= CHUNK_BYTES:
                _flush(self._file)
                unsynced = 0
            self._progressed()
        self._header.update(entry)
        self.num_bytes += tensor.nbytes

    def complete(self) -> None:
        """Writes the header, syncs and closes."""
        self._file.seek(0)
        self._file.write(
            GROWING_HEADER_BYTES.to_bytes(8, "little") + json.dumps(self._header).encode().ljust(GROWING_HEADER_BYTES)
        )
        _flush(self._file)
        self._file.close()

    def close(self) -> None:
        """Closes, complete or not; idempotent."""
        self._file.close()

    def _entry(self, name: str, tensor: torch.Tensor) -> dict[str, object]:
        return {
            name: {
                "dtype": _NAMES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [self.num_bytes, self.num_bytes + tensor.nbytes],
            }
        }


class TensorFile:
    """A safetensors file in a storage. Reads what is asked for."""

    def __init__(self, storage: Storage, name: str) -> None:
        """FileNotFoundError; CheckpointMismatchError when it is no safetensors file."""
        self._storage = storage
        self._name = name
        length = int.from_bytes(storage.read(name, 0, 8), "little")
        try:
            header = json.loads(storage.read(name, 8, 8 + min(length, _HEADER_BYTES)))
        except ValueError as error:
            raise CheckpointMismatchError(
                f"{storage.url}/{name} is no safetensors file; restore another checkpoint"
            ) from error
        self.metadata: dict[str, str] = header.pop("__metadata__", {})
        self._entries: dict[str, dict[str, list[int]]] = header
        self._data = 8 + length

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of the tensor `name`."""
        return tuple(self._entries[name]["shape"])

    def part(self, name: str, slices: tuple[slice, ...] = ()) -> torch.Tensor:
        """Reads the part that `slices`, one for each of the first dimensions, cut from the tensor `name`. Whole rows of
        the first dimension are read, and no others.
        """
        entry = self._entries[name]
        dtype, shape = _DTYPES[str(entry["dtype"])], list(entry["shape"])
        start, end = entry["data_offsets"]
        rows, *others = slices or (slice(None),)
        if shape and slices:
            row_bytes = math.prod(shape[1:]) * dtype.itemsize
            first, last, _ = rows.indices(shape[0])
            start, end, shape[0] = start + first * row_bytes, start + last * row_bytes, last - first
        if start == end:
            return torch.empty(shape, dtype=dtype)[(slice(None), *others)[: len(shape)]]
        data = self._storage.read(self._name, self._data + start, self._data + end)
        return torch.frombuffer(data, dtype=dtype).view(shape)[(slice(None), *others)[: len(shape)]]


def write_text(path: Path, text: str) -> None:
    """Writes and syncs a text. OSError."""
    with path.open("wb") as file:
        file.write(text.encode())
        _flush(file)


def _chunks(tensor: torch.Tensor) -> Iterator[memoryview]:
    data: memoryview = tensor.detach().to("cpu").contiguous().flatten().view(torch.uint8).numpy().data
    for start in range(0, len(data), CHUNK_BYTES):
        yield data[start : start + CHUNK_BYTES]


def _flush(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())
