"""The one encoding of a trajectory: its columns as bytes, ids and seeds.

Columns stand in rolecall/columns.py.

Turn t of an episode is what was sampled between two answers of its environment, t >= 1. A row has one segment, or
several one after another, where its episode's conversations do not go on from one another: each is computed by itself.

Ids: a group's `gid` is its admission number; a trajectory is `<gid>/<i>`, 0 <= i < G; the greedy response beside them,
where there is one, is `<gid>/<G>`.
"""

import hashlib
from itertools import pairwise

import numpy as np

from rolecall.columns import COLUMNS, Given, Writer, column, columns_of
from rolecall.errors import InvalidInputError
from rolecall.v1 import trajectory_pb2
from rolecall.wire import Array, decode_array

META = "meta"
"""The column that holds a serialized TrajectoryMeta."""

SAMPLED_COLUMNS = tuple(name for name in columns_of(Writer.ROLLOUT) if COLUMNS[name].given is Given.ALWAYS)
"""Columns that a rollout always writes, beside META."""


def encode_column(name: str, array: Array, num_tokens: int) -> bytes:
    """`array` as the bytes of column `name`, its dtype and length checked against the schema and T = `num_tokens`."""
    spec = column(name)
    if array.dtype != np.dtype(spec.dtype):
        raise InvalidInputError(f"column {name!r} is {np.dtype(spec.dtype)}, not {array.dtype}; convert before writing")
    if array.ndim != len(spec.shape) or (spec.per_token and array.shape[0] != num_tokens):
        needed = [num_tokens if spec.per_token else "n", *("k" for _ in spec.shape[1:])]
        raise InvalidInputError(f"column {name!r} has shape {array.shape}; it needs [{', '.join(map(str, needed))}]")
    return array.tobytes()


def decode_column(name: str, data: bytes, num_tokens: int) -> Array:
    """The read-only array in the bytes of column `name` of a trajectory of T = `num_tokens` tokens."""
    spec = column(name)
    return decode_array(
        data, spec.dtype, (num_tokens, *spec.shape[1:]) if spec.per_token else spec.shape, f"column {name!r}"
    )


def seed_of(run_seed: int, gid: int, index: int) -> int:
    """The sampling seed of response `index` of group `gid`: 63 bits, the same whoever samples it and however often."""
    text = f"{run_seed}/{gid}/{index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def turn_seed(seed: int, turn: int) -> int:
    """The sampling seed of turn `turn`, 1 and up, of an episode whose response has `seed`; the first has that one."""
    return seed if turn == 1 else seed_of(seed, turn, 0)


def trajectory_id(gid: int, index: int) -> str:
    """`<gid>/<i>`."""
    return f"{gid}/{index}"


def segment_lengths(ref: trajectory_pb2.RowRef) -> tuple[int, ...]:
    """Tokens of each segment of the row `ref`, in order. InvalidInputError where one has none."""
    bounds = [0, *ref.segment_starts, ref.num_tokens]
    lengths = tuple(end - start for start, end in pairwise(bounds))
    if min(lengths) < 1:
        raise InvalidInputError(f"row {ref.id}: a segment of {min(lengths)} tokens; segment_starts and num_tokens grow")
    return lengths


def rows_of(message: trajectory_pb2.CommittedGroup | trajectory_pb2.TrainBatch) -> list[trajectory_pb2.RowRef]:
    """Every row that belongs to `message`, those of greedy responses last: what must be there while it is kept, and is
    deleted with it.
    """
    if isinstance(message, trajectory_pb2.TrainBatch):
        return [*message.rows, *message.greedy_rows]
    return [*message.rows, message.greedy_row] if message.HasField("greedy_row") else list(message.rows)


def is_truncated(meta: trajectory_pb2.TrajectoryMeta) -> bool:
    """Whether the response hit its length bound instead of stopping."""
    return meta.finish_reason == trajectory_pb2.FINISH_REASON_LENGTH
