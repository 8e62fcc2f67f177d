"""The record of a run that is read without asking anybody: `<run.dir>/last_status.json`.

`rolecall train` keeps it, and `rolecall status` reads it once nobody answers.
"""

import json
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from google.protobuf import json_format
from google.protobuf.message import Message

from rolecall.disk import replace_text
from rolecall.errors import InvalidInputError, RoleCallError
from rolecall.launcher.progress import STATES
from rolecall.settings import RunSection
from rolecall.trackers.finite import or_null
from rolecall.v1 import controller_pb2

FILE = "last_status.json"
"""File in run.dir."""
INTERRUPTED = 130
"""Exit code of a `rolecall train` that was asked to end."""


@dataclass(frozen=True)
class RunRecord:
    """The last that a launcher heard of its run."""

    status: controller_pb2.RunStatus
    at_s: float
    """When, in Unix seconds."""
    exit_code: int | None = None
    """The launcher's; None: it has not ended, or was killed."""
    failure: str = ""
    """Why it failed."""

    @property
    def how(self) -> str:
        """Says how the run ended, when its launcher is gone."""
        if self.exit_code is None:
            return "its rolecall train was killed or the machine went down; --resume goes on"
        if self.exit_code == 0:
            return (
                STATES.get(self.status.state, "done") if self.status.state == controller_pb2.RUN_STATE_DONE else "ended"
            )
        if self.exit_code == INTERRUPTED:
            return "interrupted; --resume goes on"
        return f"failed: {'; '.join(filter(None, [self.failure or self.status.error, 'see logs/']))}"


def keep_record(
    run: RunSection, status: controller_pb2.RunStatus, exit_code: int | None = None, failure: str = ""
) -> None:
    """Replaces the file, whole; before anything was heard, `status` being empty, with what was noted before. A full
    disk costs the note and nothing else.
    """
    with suppress(RoleCallError):
        if not status.run:
            before = read_record(run.dir)
            status = (
                before.status
                if before
                else controller_pb2.RunStatus(
                    run=run.name, state=controller_pb2.RUN_STATE_STARTING, total_steps=run.total_steps
                )
            )
        tree = {
            "at_s": time.time(),
            "exit_code": exit_code,
            "failure": failure,
            "status": json_format.MessageToDict(status),
        }
        replace_text(run.dir / FILE, json.dumps(tree) + "\n")


def read_record(run_dir: Path) -> RunRecord | None:
    """The record in a run's directory; None where there is none. InvalidInputError when it cannot be read."""
    path = run_dir / FILE
    if not path.is_file():
        return None
    try:
        tree = json.loads(path.read_text())
        status = json_format.ParseDict(tree["status"], controller_pb2.RunStatus())
        return RunRecord(status, tree["at_s"], tree["exit_code"], tree["failure"])
    except (ValueError, KeyError, json_format.ParseError) as error:
        raise InvalidInputError(f"{path} is no status of a run: {error!r}; remove it") from error


def as_json_line(status: controller_pb2.RunStatus, over: RunRecord | None = None) -> str:
    """The run for programs, a line: the fields of RunStatus, metrics by name, null for a number that is not finite;
    `over` is null while it is under way.
    """
    tree = _plain(status)
    tree |= {
        "state": STATES.get(status.state, "unknown"),
        "metrics": {metric.name: metric.value for metric in status.metrics},
    }
    tree["over"] = None if over is None else {"how": over.how, "exit_code": over.exit_code, "at_s": over.at_s}
    return json.dumps(or_null(tree)) + "\n"


def _plain(message: Message) -> dict[str, Any]:
    """Every field, those that are not set too: of messages null; integers as integers, enums by their names."""
    tree: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        value = getattr(message, field.name)
        if isinstance(value, Mapping):
            tree[field.name] = dict(value)
        elif isinstance(value, Message):
            tree[field.name] = _plain(value) if message.HasField(field.name) else None
        elif isinstance(value, Sequence) and not isinstance(value, str):
            tree[field.name] = [_plain(item) for item in value]
        else:
            tree[field.name] = value if field.enum_type is None else field.enum_type.values_by_number[value].name
    return tree
