"""Fingerprints: 64 bits over a tensor's bytes that notice any change of value, order or length, computed where the
tensor is.

Owns the hash and the digest over a whole model. It guards against mistakes (a swapped, skipped or stale tensor), not
against an adversary.

The hash. The bytes, as they lie in memory order, are little-endian signed 64-bit words x_i (the last one padded with
zeros). Each word is mixed, y_i = m ^ (m >> 32) with m = x_i * MULTIPLIER, and words are summed in blocks of BLOCK with
a multiplier of their own per position; block sums are mixed and summed the same way, and the length goes in last. All
arithmetic is modulo 2^64, so every device and every chunking gives the same number. Two different tensors of one length
agree with probability about 2^-33 or less.
"""

import functools
import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from rolecall.v1 import weights_pb2

BLOCK = 2**15
"""Words per block. On CPUs its table of position multipliers and its temporaries stay in a core's cache, and torch
works on so few words in the calling thread alone: threads that meet after every operation stand still on a busy
machine.
"""
_WORD = 8
"""Bytes of a word."""
_BLOCKS_AT_ONCE = 128
"""Blocks hashed by one set of kernels on a GPU: bounds the temporaries to twice their 32 MiB."""
_BLOCKS_A_TASK = 8
"""Blocks, of 2 MiB, that one thread hashes before it looks for more."""
_MAX_THREADS = 8
"""Most threads that hash: as many reach the speed of the memory."""
_MULTIPLIER = 0x9E3779B97F4A7C15 - 2**64
_MASK = 2**64 - 1


def fingerprint(tensor: torch.Tensor) -> int:
    """The fingerprint of `tensor` (any dtype, shape and device) as an unsigned 64-bit number. Waits for the device."""
    return unsigned(fingerprint_on_device(tensor))[0]


def fingerprint_on_device(tensor: torch.Tensor) -> torch.Tensor:
    """The fingerprint as an int64 [1] tensor on the tensor's device, without waiting for it."""
    data = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    num_bytes = data.numel()
    if num_bytes % _WORD:
        data = torch.nn.functional.pad(data, (0, _WORD - num_bytes % _WORD))
    elif data.storage_offset() % _WORD:
        data = data.clone()
    blocks = _block_sums(data.view(torch.int64))
    blocks = _mix_(blocks ^ (blocks >> 29))
    total = (blocks * _position_multipliers(blocks.numel(), blocks.device, salt=1)).sum(dtype=torch.int64).reshape(1)
    return _mix_(total + num_bytes)


def unsigned(fingerprints: torch.Tensor) -> list[int]:
    """int64 [n] fingerprints as unsigned numbers on the host; one wait for all of them."""
    values: list[int] = fingerprints.tolist()
    return [value & _MASK for value in values]


def digest(manifest: weights_pb2.WeightManifest, fingerprints: Sequence[int]) -> str:
    """Hex digest over names, dtypes, shapes and fingerprints, in the manifest's order. ValueError when the counts
    differ.
    """
    state = hashlib.sha256()
    for spec, value in zip(manifest.parameters, fingerprints, strict=True):
        state.update(f"{spec.name}\0{spec.dtype}\0{','.join(map(str, spec.shape))}\0{value:016x}\n".encode())
    return state.hexdigest()


def _block_sums(words: torch.Tensor) -> torch.Tensor:
    """int64 [blocks]: the sum of each block, the last one perhaps short."""
    if words.device.type != "cpu":
        return _sums_of(words, _BLOCKS_AT_ONCE)
    parts = torch.split(words, _BLOCKS_A_TASK * BLOCK)
    if len(parts) == 1:
        return _sums_of(words, 1)
    return torch.cat(list(_threads().map(_sums_of, parts, [1] * len(parts))))


@functools.lru_cache(maxsize=1)
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1), thread_name_prefix="fingerprints")


def _sums_of(words: torch.Tensor, blocks_at_once: int) -> torch.Tensor:
    """The sums in this thread. The temporaries are allocated once: new ones for each block would be pages that the
    kernel has to clear, which takes longer than the arithmetic.
    """
    at_once = blocks_at_once * BLOCK
    table = _position_multipliers(BLOCK, words.device, salt=0)
    mixed, shifted = words.new_empty((2, min(at_once, len(words))))
    sums = []
    for start in range(0, len(words), at_once):
        part = words[start : start + at_once]
        values, scratch = mixed[: len(part)], shifted[: len(part)]
        torch.mul(part, _MULTIPLIER, out=values)
        torch.bitwise_right_shift(values, 32, out=scratch)
        values ^= scratch
        whole = len(part) // BLOCK * BLOCK
        if whole:
            sums.append(values[:whole].view(-1, BLOCK).mul_(table).sum(dim=1))
        if whole < len(part):
            rest = values[whole:]
            sums.append(rest.mul_(table[: len(rest)]).sum().reshape(1))
    return torch.cat(sums) if sums else words.new_zeros(0)


def _mix_(values: torch.Tensor) -> torch.Tensor:
    values *= _MULTIPLIER
    values ^= values >> 32
    return values


@functools.lru_cache(maxsize=32)
def _position_multipliers(count: int, device: torch.device, *, salt: int) -> torch.Tensor:
    """Odd pseudo-random int64 [count], the same on every machine: splitmix64 of the position."""
    values = torch.arange(1, count + 1, dtype=torch.int64) * _MULTIPLIER + salt
    for shift, factor in ((30, 0xBF58476D1CE4E5B9 - 2**64), (27, 0x94D049BB133111EB - 2**64)):
        values = (values ^ ((values >> shift) & (2 ** (64 - shift) - 1))) * factor
    return ((values ^ ((values >> 31) & (2**33 - 1))) | 1).to(device)
