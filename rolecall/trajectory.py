"""The one schema of a trajectory: names, dtypes, shapes, writers and readers of its columns.

A trajectory is a row of the store and a field is a column. T = prompt + response tokens, all turns.

Alignment: index t of every per-token column speaks of `token_ids[t]`. `logprobs[t]` is of token t given the tokens
before it; index 0 is 0. The stop token is kept and has mask 1. `values[t]` is the value before token t (head output at
t-1); a reward at t arrives after token t. Under `bootstrap_truncated` a truncated trajectory bootstraps from
`bootstrap_value`; a stopped one never does.

Ids: a group's `gid` is its admission number; a trajectory is `<gid>/<i>`, 0 <= i < G; the greedy response beside them,
where there is one, is `<gid>/<G>`.
"""

import hashlib
from dataclasses import dataclass
from enum import Enum

import numpy as np

from rolecall.errors import InvalidInputError
from rolecall.settings.algorithm.distillation import TEACHER
from rolecall.v1 import trajectory_pb2
from rolecall.wire import Array, decode_array

META = "meta"
"""The column that holds a serialized TrajectoryMeta."""


class Writer(Enum):
    """The role that writes a column, once."""

    ROLLOUT = "rollout"
    CONTROLLER = "controller"
    REFERENCE = "reference"
    CRITIC = "critic"
    ACTOR = "actor"


@dataclass(frozen=True)
class Column:
    """One column: numpy dtype, shape with -1 for T (or for a length of its own), writer, readers and meaning."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    per_token: bool
    writer: Writer
    readers: str
    meaning: str


def _column(
    name: str, dtype: str, shape: tuple[int, ...], per_token: bool, writer: Writer, readers: str, meaning: str
) -> Column:
    return Column(name, dtype, shape, per_token, writer, readers, meaning)


_ALL = [
    _column("token_ids", "<i4", (-1,), True, Writer.ROLLOUT, "all", "prompt, then what was sampled"),
    _column("response_mask", "u1", (-1,), True, Writer.ROLLOUT, "all", "1 = sampled by the policy"),
    _column(
        "rollout_logprobs",
        "<f4",
        (-1,),
        True,
        Writer.ROLLOUT,
        "actor",
        "sampler's logprob, temperature applied; 0 where mask is 0",
    ),
    _column(
        "policy_versions",
        "<i4",
        (-1,),
        True,
        Writer.ROLLOUT,
        "controller, actor",
        "version that sampled the token; -1 where mask is 0",
    ),
    _column("reward", "<f4", (1,), False, Writer.CONTROLLER, "controller", "raw scalar reward"),
    _column(
        "token_rewards",
        "<f4",
        (-1,),
        True,
        Writer.CONTROLLER,
        "controller",
        "raw per-token rewards, 0 where mask is 0; absent if the scorer gives none",
    ),
    _column(
        "reward_components",
        "<f4",
        (-1,),
        False,
        Writer.CONTROLLER,
        "controller",
        "one value per name in the run's component list",
    ),
    _column(
        "values", "<f4", (-1,), True, Writer.CRITIC, "controller, critic", "value before token t; 0 where mask is 0"
    ),
    _column("bootstrap_value", "<f4", (1,), False, Writer.CRITIC, "controller", "value after the last token"),
    _column(
        "old_logprobs",
        "<f4",
        (-1,),
        True,
        Writer.ACTOR,
        "controller, actor",
        "policy's logprob before the batch's first update",
    ),
    _column(
        "sum_squared_probs",
        "<f4",
        (-1,),
        True,
        Writer.ACTOR,
        "controller",
        "sum over the vocabulary of squared probabilities; 0 where mask is 0",
    ),
    _column(
        "loss_mask", "u1", (-1,), True, Writer.CONTROLLER, "actor, critic", "subset of response_mask that is trained on"
    ),
    _column(
        "advantages", "<f4", (-1,), True, Writer.CONTROLLER, "actor", "advantage of token t; 0 where loss_mask is 0"
    ),
    _column(
        "returns",
        "<f4",
        (-1,),
        True,
        Writer.CONTROLLER,
        "critic",
        "regression target of values; 0 where loss_mask is 0",
    ),
]
COLUMNS = {column.name: column for column in _ALL}

SAMPLED_COLUMNS = ("token_ids", "response_mask", "rollout_logprobs", "policy_versions")
"""What a rollout writes, beside META."""


def reference_column(instance: str) -> str:
    """Name of the column that the reference `instance` writes: float32 [T] logprobs, 0 where response_mask is 0. Also
    of TEACHER's.
    """
    return f"{instance}/logprobs"


TOPK_IDS = f"{TEACHER}/topk_ids"
"""int32 [T, k]: the ids that the teacher gives the highest probability, the highest first."""
TOPK_LOGPROBS = f"{TEACHER}/topk_logprobs"
"""float32 [T, k]: the teacher's logprobs of TOPK_IDS."""


def column(name: str) -> Column:
    """The schema of `name`. InvalidInputError for a name outside it."""
    if name in COLUMNS:
        return COLUMNS[name]
    if name.endswith("/logprobs"):
        return _column(name, "<f4", (-1,), True, Writer.REFERENCE, "controller, actor", "a reference's logprobs")
    if name == TOPK_IDS:
        return _column(
            name,
            "<i4",
            (-1, -1),
            True,
            Writer.REFERENCE,
            "actor",
            "ids of a teacher's highest probabilities; 0 where mask is 0",
        )
    if name == TOPK_LOGPROBS:
        return _column(name, "<f4", (-1, -1), True, Writer.REFERENCE, "actor", "their logprobs; 0 where mask is 0")
    raise InvalidInputError(
        f"column {name!r} is not in the trajectory schema; use one of {sorted(COLUMNS)} or '<reference>/logprobs'"
    )


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


def row_bytes(num_tokens: int, num_references: int, *, critic: bool, top_k: int = 0) -> int:
    """Bytes of one stored trajectory of `num_tokens` tokens: its columns, and 2 KiB for keys, meta and the store's own
    overhead; without the prompt's messages and metadata, which a group holds once.

    Per token: token_ids 4, response_mask 1, rollout_logprobs 4, policy_versions 4, loss_mask 1, advantages 4, returns
    4, old_logprobs 4, token_rewards 4, values 4 with a critic, 4 for each reference that speaks of the row, 8 for each
    of a teacher's `top_k` ids; sum_squared_probs 4 with an estimator that reads it (count it as a reference); and 4 for
    the response's text, once in meta.
    """
    per_token = 34 + 4 * critic + 4 * num_references + 8 * top_k
    return num_tokens * per_token + 2048


def seed_of(run_seed: int, gid: int, index: int) -> int:
    """The sampling seed of response `index` of group `gid`: 63 bits, the same whoever samples it and however often."""
    text = f"{run_seed}/{gid}/{index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1


def trajectory_id(gid: int, index: int) -> str:
    """`<gid>/<i>`."""
    return f"{gid}/{index}"


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
