"""The columns of a trajectory: one table of names, dtypes, shapes, writers, and what each depends on.

A trajectory is a row of the store and a field is a column. Whatever lists columns follows from this table: the bytes
of a row, what actor and critic are asked to compute, what users' functions may read. A new column is a line here and
the code that writes it. No numpy: settings read it, too.

T = prompt + response tokens, all turns and segments. Index t of every per-token column speaks of `token_ids[t]`.
`logprobs[t]` is of token t given the tokens before it in its segment; a segment's first is 0. The stop token is kept
and has mask 1. `values[t]` is the value before token t (head output at t-1); a reward at t arrives after token t. Under
`bootstrap_truncated` a truncated trajectory bootstraps from `bootstrap_value`; a stopped one never does.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, Flag, auto

from rolecall.errors import InvalidInputError

TEACHER = "teacher"
"""Prefix of the columns of whichever reference teaches a trajectory, so that a batch with several teachers has one name
for what they say.
"""

TEXT_BYTES = 4
"""Bytes of a response's text for each token, in META."""
ROW_BYTES = 2048
"""Bytes of a row for its keys, the rest of META, columns that do not grow with tokens, and the store's own overhead."""


class Writer(Enum):
    """The role that writes a column, once."""

    ROLLOUT = "rollout"
    CONTROLLER = "controller"
    REFERENCE = "reference"
    CRITIC = "critic"
    ACTOR = "actor"


class Given(Enum):
    """The part that a run must have for its rows to hold a column."""

    ALWAYS = auto()
    TOKEN_REWARDS = auto()
    """A scorer that may reward tokens."""
    CRITIC = auto()
    ESTIMATOR = auto()
    """An estimator that needs the column."""
    TEACHER = auto()
    """Distillation."""
    TEACHER_TOPK = auto()
    """Distillation over the teacher's likeliest tokens."""
    SAMPLED_ROUTING = auto()
    """Replay of the sampler's routing (actor.router_replay r3)."""
    OLD_ROUTING = auto()
    """Replay of the old policy's routing (actor.router_replay r2)."""
    IMAGES = auto()
    """Prompts or environments that may show images (data.images_field, environments.*.max_image_bytes)."""
    REFERENCE = auto()
    """The reference in the column's name."""


class Plugin(Flag):
    """The kinds of users' functions that may read a column."""

    NONE = 0
    ESTIMATOR = auto()
    LOSS = auto()
    ANY = ESTIMATOR | LOSS


@dataclass(frozen=True)
class Column:
    """One column: its name, numpy dtype, writer and meaning, and what it depends on."""

    name: str
    dtype: str
    writer: Writer
    meaning: str
    given: Given = Given.ALWAYS
    plugins: Plugin = Plugin.NONE
    shape: tuple[int, ...] = (-1,)
    """-1 stands for T, or for a length of its own."""
    per_token: bool = True

    @property
    def is_wide(self) -> bool:
        """Whether a token has several numbers."""
        return len(self.shape) > 1

    def bytes_per_token(self, num: int) -> int:
        """Bytes in the store for each token, of `num` numbers where the column is wide; 0 for a column that does not
        grow with tokens.
        """
        itemsize = int(self.dtype[-1])
        return itemsize * (num if self.is_wide else 1) if self.per_token else 0


_ANY, _LOSS = Plugin.ANY, Plugin.LOSS
_ROLLOUT, _CONTROLLER, _CRITIC, _ACTOR, _REFERENCE = (
    Writer.ROLLOUT,
    Writer.CONTROLLER,
    Writer.CRITIC,
    Writer.ACTOR,
    Writer.REFERENCE,
)

REFERENCE_LOGPROBS = Column(
    "<reference>/logprobs",
    "<f4",
    _REFERENCE,
    "a reference's logprob; 0 where response_mask is 0",
    Given.REFERENCE,
    _LOSS,
)
"""Stands for one column of each reference, named by `reference_column`."""


def reference_column(instance: str) -> str:
    """Name of the column that the reference `instance` writes: float32 [T] logprobs, 0 where response_mask is 0. For
    TEACHER: the column of whichever reference teaches the row.
    """
    return REFERENCE_LOGPROBS.name.replace("<reference>", instance)


TOPK_IDS = f"{TEACHER}/topk_ids"
"""int32 [T, k]: the ids that the teacher gives the highest probability, the highest first."""
TOPK_LOGPROBS = f"{TEACHER}/topk_logprobs"
"""float32 [T, k]: the teacher's logprobs of TOPK_IDS."""
ROUTED_EXPERTS = "routed_experts"
"""uint8 [T, W]: the experts that the sampler sent each token to, in every layer (rolecall/data/model/mixture.py).
Nothing is computed from a last token, which no sampler routes: it has a copy of what stands before it.
"""
OLD_ROUTED_EXPERTS = "old_routed_experts"
"""uint8 [T, W]: those of the pass that gave `old_logprobs`."""

IMAGES = "images"
"""uint8 [bytes]: the images that the row shows, the prompt's before its environment's or agent's, a serialized Images
message (trajectory.proto), which says what each segment of the row shows of them; of a row of text nothing, 0 bytes.
"""

_TABLE = [
    Column("token_ids", "<i4", _ROLLOUT, "prompt, then what was sampled", plugins=_ANY),
    Column("response_mask", "u1", _ROLLOUT, "1 = sampled by the policy", plugins=_LOSS),
    Column(
        "rollout_logprobs", "<f4", _ROLLOUT, "sampler's logprob at its temperature; 0 where mask is 0", plugins=_ANY
    ),
    Column("policy_versions", "<i4", _ROLLOUT, "version that sampled the token; -1 where mask is 0", plugins=_ANY),
    Column(
        ROUTED_EXPERTS,
        "u1",
        _ROLLOUT,
        "the sampler's experts, as bytes",
        Given.SAMPLED_ROUTING,
        shape=(-1, -1),
    ),
    Column(IMAGES, "u1", _ROLLOUT, "files of the images that it shows, as a message", Given.IMAGES, per_token=False),
    Column("reward", "<f4", _CONTROLLER, "raw scalar reward", shape=(1,), per_token=False),
    Column("token_rewards", "<f4", _CONTROLLER, "raw per-token rewards; 0 where mask is 0", Given.TOKEN_REWARDS, _ANY),
    Column(
        "reward_components",
        "<f4",
        _CONTROLLER,
        "a value per component, by name; NaN: does not apply",
        per_token=False,
    ),
    Column(
        "reward_component_names",
        "u1",
        _CONTROLLER,
        "whose they are, as JSON: a run may be resumed with others",
        per_token=False,
    ),
    Column("values", "<f4", _CRITIC, "value before token t; 0 where mask is 0", Given.CRITIC, _ANY),
    Column(
        "bootstrap_value",
        "<f4",
        _CRITIC,
        "value after the last token",
        Given.CRITIC,
        Plugin.ESTIMATOR,
        shape=(1,),
        per_token=False,
    ),
    Column("old_logprobs", "<f4", _ACTOR, "policy's logprob before the batch's first update", plugins=_ANY),
    Column(
        "sum_squared_probs",
        "<f4",
        _ACTOR,
        "sum over the vocabulary of squared probabilities; 0 where mask is 0",
        Given.ESTIMATOR,
        Plugin.ESTIMATOR,
    ),
    Column(
        OLD_ROUTED_EXPERTS,
        "u1",
        _ACTOR,
        "experts chosen in the pass of old_logprobs, as bytes",
        Given.OLD_ROUTING,
        shape=(-1, -1),
    ),
    Column("loss_mask", "u1", _CONTROLLER, "subset of response_mask that is trained on", plugins=_LOSS),
    Column("advantages", "<f4", _CONTROLLER, "advantage of token t; 0 where loss_mask is 0", plugins=_LOSS),
    Column("returns", "<f4", _CONTROLLER, "regression target of values; 0 where loss_mask is 0", Given.CRITIC, _LOSS),
    Column(reference_column(TEACHER), "<f4", _REFERENCE, "its teacher's; 0 where mask is 0", Given.TEACHER, _LOSS),
    Column(
        TOPK_IDS,
        "<i4",
        _REFERENCE,
        "ids of the teacher's highest probabilities; 0 where mask is 0",
        Given.TEACHER_TOPK,
        shape=(-1, -1),
    ),
    Column(TOPK_LOGPROBS, "<f4", _REFERENCE, "their logprobs; 0 where mask is 0", Given.TEACHER_TOPK, shape=(-1, -1)),
]
COLUMNS = {column.name: column for column in _TABLE}


def column(name: str) -> Column:
    """The schema of `name`. InvalidInputError for a name outside it."""
    if name in COLUMNS:
        return COLUMNS[name]
    if name.endswith(reference_column("")):
        return replace(REFERENCE_LOGPROBS, name=name)
    raise InvalidInputError(
        f"column {name!r} is not in the trajectory schema; use one of {sorted(COLUMNS)} or {REFERENCE_LOGPROBS.name!r}"
    )


def columns_of(writer: Writer) -> tuple[str, ...]:
    """Names of the columns that `writer` writes, without those of single references."""
    return tuple(each.name for each in _TABLE if each.writer is writer)


def columns_for(plugin: Plugin) -> tuple[str, ...]:
    """Names of the columns that a user's function of kind `plugin` may read where a run has them, without those of
    single references.
    """
    return tuple(each.name for each in _TABLE if plugin in each.plugins)


def row_bytes(num_tokens: int, columns: Sequence[Column], widths: Mapping[str, int], *, num_rows: int = 1) -> int:
    """Bytes of `num_rows` stored trajectories of `num_tokens` tokens in all with `columns`. Of a wide column `widths`
    says by name how many numbers a token has. Left out are the prompt's messages and metadata, which a group holds
    once.
    """
    per_token = TEXT_BYTES + sum(each.bytes_per_token(widths[each.name] if each.is_wide else 1) for each in columns)
    return num_tokens * per_token + num_rows * ROW_BYTES
