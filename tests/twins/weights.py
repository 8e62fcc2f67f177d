"""Weights of a few thousand numbers that train deterministically: the same batches give the same bits, in whatever
process.

They are one float64 vector, cut into named tensors for a weight channel. A step folds every bit of the batch's columns
into it. What weights "compute" (logprobs, values, probes, tokens) is hashed from their digest, so that two versions
differ and a restored one does not.
"""

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from rolecall.wire import Array

NUM_TENSORS = 6
TENSOR_SIZE = 512
TENSOR_BYTES = 8 * TENSOR_SIZE
END_TOKEN_ID = 2
VOCABULARY = 200


def initial(seed: int) -> Array:
    """Returns the float64 weights before the first step."""
    return np.random.default_rng(seed).standard_normal(NUM_TENSORS * TENSOR_SIZE)


def trained(weights: Array, rows: Sequence[Mapping[str, Array]]) -> Array:
    """Returns new weights, after a step on `rows`, in their order."""
    for row in rows:
        noise = np.random.default_rng(int(bits_of(row), 16)).standard_normal(weights.size)
        weights = weights * 0.999 + noise * 0.01
    return weights


def digest_of(weights: Array) -> str:
    """Returns a hex digest over every bit of `weights`."""
    return hashlib.sha256(weights.tobytes()).hexdigest()


def bits_of(row: Mapping[str, Array]) -> str:
    """Returns a hex digest over the names and bits of a row's columns."""
    state = hashlib.blake2b(digest_size=16)
    for name, array in sorted(row.items()):
        state.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        state.update(array.tobytes())
    return state.hexdigest()


def fingerprints_of(weights: Array) -> dict[str, int]:
    """Returns one fingerprint per tensor, by its name."""
    tensors = weights.reshape(NUM_TENSORS, TENSOR_SIZE)
    values = [int.from_bytes(hashlib.blake2b(tensor.tobytes(), digest_size=8).digest(), "little") for tensor in tensors]
    return {f"tensor.{i}": value for i, value in enumerate(values)}


def numbers_of(digest: str, token_ids: Sequence[int]) -> Array:
    """Returns float32 [T] in (-1, 0], 0 at index 0: what weights of this digest compute for these tokens."""
    text = f"{digest} {list(token_ids)}".encode()
    numbers = -np.random.default_rng(int(hashlib.blake2b(text, digest_size=8).hexdigest(), 16)).random(
        len(token_ids), np.float32
    )
    numbers[:1] = 0
    return numbers


def token_of(prompt_token_ids: Sequence[int], seed: int, digest: str, position: int) -> tuple[int, float]:
    """Returns token `position` of the response that weights of `digest` sample, and its logprob. About one token in
    eight is the end token.
    """
    text = f"{list(prompt_token_ids)}/{seed}/{digest}/{position}".encode()
    number = int.from_bytes(hashlib.blake2b(text, digest_size=4).digest(), "little")
    token = END_TOKEN_ID if number % 8 == 0 else 3 + number % (VOCABULARY - 3)
    return token, -1.0 - (number % 1000) / 1000
