"""The episodes that a kit plays: some of its own, or those of a data set, with what the policy says in each."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from pydantic import BaseModel, ConfigDict, ValidationError

from rolecall.conformance.check import wrong_fields
from rolecall.data.dataset import UID_FIELD, parse_messages
from rolecall.data.row_files import read_rows
from rolecall.errors import ConfigError
from rolecall.v1 import environment_pb2, trajectory_pb2

NUM_OWN = 3
"""Tasks of the kit's own."""
MAX_ROWS = 16
"""Episodes of a file that are played, the first ones; those that are marked come on top."""
TEXTS = ("hello", "1", "yes", "left", "42", "I do not know.", "2", "no", "right", "again", "stop")
"""What the policy says in an episode for which nothing else is given: the numbers of its turns come to have two digits,
which text would order otherwise.
"""
_SEED_STEP = 0x9E3779B97F4A7C15
_SEEDS = 2**63


class Marks(BaseModel):
    """The fields of a row that the kit reads, and the environment does not."""

    model_config = ConfigDict(frozen=True, strict=True)
    actions: list[str] | None = None
    """What the policy says, turn by turn; absent: TEXTS."""
    cannot_begin: bool = False
    """Whether the environment can never begin this task."""
    fails: bool = False
    """Whether the environment fails in this episode: in Reset, or in one of its actions."""


@dataclass(frozen=True)
class Row:
    """An episode that is played: a task, a seed, and what the policy says."""

    name: str
    """Name for people, as "line 3"."""
    task: environment_pb2.Task
    seed: int
    actions: Sequence[str]


@dataclass(frozen=True)
class Rows:
    """The episodes that a kit plays, by what is expected of them."""

    played: Sequence[Row]
    cannot_begin: Sequence[Row] = ()
    fails: Sequence[Row] = ()


def own_rows() -> Rows:
    """Tasks that say little, as a data set might hold them."""
    rows = []
    for i in range(NUM_OWN):
        task = environment_pb2.Task(
            uid=f"rolecall-conformance-{i}",
            messages=[trajectory_pb2.Message(role="user", content="Begin.")],
            ground_truth="42",
        )
        rows.append(Row(f"the kit's task {i}", task, _seed(i), [*TEXTS[i:], *TEXTS[:i]]))
    return Rows(rows)


def read_file(path: Path) -> Rows:
    """The rows of a data set, whose fields `prompt`, `ground_truth` and `uid` are read as in a run, and those of Marks.
    ConfigError naming the line that cannot be read.
    """
    played: list[Row] = []
    cannot_begin: list[Row] = []
    fails: list[Row] = []
    for number, fields in read_rows(path, "--items"):
        where = f"--items: {path}, line {number}"
        try:
            marks = Marks.model_validate({name: fields.pop(name) for name in Marks.model_fields if name in fields})
        except ValidationError as error:
            raise ConfigError(f"{where}: {wrong_fields(error)}") from error
        actions = TEXTS if marks.actions is None else marks.actions
        row = Row(f"line {number}", _task(fields, where, str(number)), _seed(number), actions)
        (cannot_begin if marks.cannot_begin else fails if marks.fails else played).append(row)
    if not played:
        raise ConfigError(f"--items: {path} holds no episode to play; write one JSON object a line, as in a data set")
    return Rows(played[:MAX_ROWS], cannot_begin, fails)


def _task(fields: dict[str, Any], where: str, default_uid: str) -> environment_pb2.Task:
    truths = fields.pop("ground_truth", None)
    truths = truths if isinstance(truths, list) else [truths or ""]
    uid = str(fields.pop(UID_FIELD, default_uid))
    turns = parse_messages(fields.pop("prompt"), where) if "prompt" in fields else ()
    task = environment_pb2.Task(
        uid=uid, messages=[trajectory_pb2.Message(role=role, content=content) for role, content in turns]
    )
    try:
        task.ground_truth, *others = truths
        task.other_ground_truths.extend(others)
        json_format.ParseDict({name: value for name, value in fields.items() if value is not None}, task.metadata)
    except (TypeError, ValueError, json_format.ParseError) as error:
        raise ConfigError(f"{where}: not a task: {error}; write ground_truth as text, or several as a list") from error
    return task


def _seed(number: int) -> int:
    """A seed of 63 bits."""
    return (number + 1) * _SEED_STEP % _SEEDS
