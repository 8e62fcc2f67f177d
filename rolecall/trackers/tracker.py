"""The seam of trackers, what they learn of the run, and how samples become tables."""

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from rolecall.disk import replace_text
from rolecall.errors import RoleCallError
from rolecall.settings import RunSettings, SftSettings

ID_FILE = "tracker_run_id"
"""File in the run's directory: the id under which remote trackers know the run."""
END_FILE = "tracker_end"
"""File in the run's directory, where no process has remote trackers open: what they were last told."""
_CREDENTIALS = re.compile(
    r"(?<=://)[^/@\s]*@|(?<=[?&])[^=&\s]*(?:pass|token|secret|key)[^=&\s]*=[^&\s]*", re.IGNORECASE
)
"""Secrets of a URL: the user and password, and parameters of the query that are named like one."""


@runtime_checkable
class Tracker(Protocol):
    """Takes the numbers and samples of a run. One thread calls it; what it raises is counted and never ends the run."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of `step` by name.

        A step may come twice (training, then evaluation) with other names, and again when a call failed.
        """

    def keep_samples(self, step: int, samples: Sequence[Mapping[str, Any]]) -> None:
        """Trajectories for people to read, of the weights after `step` steps."""

    def close(self) -> None:
        """Writes what is buffered."""


class End(Enum):
    """The way a run stands as its trackers are closed."""

    DONE = auto()
    FAILED = auto()
    """Failed for good: starting again cannot help."""
    STOPPED = auto()
    """This process was told to end before the run was over; another may go on."""
    GOES_ON = auto()
    """This process failed, and another goes on."""


def note_end(run_dir: Path, end: End | None) -> None:
    """Keeps what the remote trackers were told; None: they are open. A full disk costs the note and nothing else."""
    with suppress(RoleCallError):
        if end is None:
            (run_dir / END_FILE).unlink(missing_ok=True)
        else:
            replace_text(run_dir / END_FILE, end.name + "\n")


def shows_a_run_that_goes_on(run_dir: Path) -> bool:
    """Whether remote trackers know the run, and whoever told them last did not say that it is over or was stopped."""
    file = run_dir / END_FILE
    return (run_dir / ID_FILE).is_file() and (not file.is_file() or file.read_text().strip() == End.GOES_ON.name)


@runtime_checkable
class Ending(Protocol):
    """A tracker that shows how its run ended."""

    def end(self, how: End) -> None:
        """Shows it. `close` follows."""


@dataclass(frozen=True)
class TrackedRun:
    """The run as a tracker learns of it."""

    id: str
    """16 hex digits; the same after restarts of the controller and after --resume."""
    name: str
    dir: Path
    configuration: Mapping[str, Any]
    """Sections as in the configuration file, without credentials: no `trackers` section, no user or password in any
    URL.
    """

    @classmethod
    def of(cls, settings: RunSettings | SftSettings) -> "TrackedRun":
        """The run of `settings`, whose directory exists. DiskFullError, RoleCallError when its id cannot be kept."""
        return cls(
            _kept_id(settings.run.dir / ID_FILE), settings.run.name, settings.run.dir, shown_configuration(settings)
        )


def shown_configuration(settings: RunSettings | SftSettings) -> dict[str, Any]:
    """The configuration for other people's servers, without what may be a credential. The critic's optimizer is whole,
    with what follows the actor's.

    The options of a user's tracker may hold a key, so the section `trackers` is left out.
    """
    dumped = settings.model_dump(mode="json", exclude={"trackers"})
    if isinstance(settings, RunSettings) and settings.critic_optimizer is not None:
        dumped["critic"]["optimizer"] = settings.critic_optimizer.model_dump(mode="json")
    return {section: without_credentials(values) for section, values in dumped.items()}


def tables_of(samples: Sequence[Mapping[str, Any]]) -> dict[str, tuple[list[str], list[list[Any]]]]:
    """(columns, rows) by the samples' "set". A cell is a string, a number or None; a conversation is a turn per
    line.
    """
    tables: dict[str, tuple[list[str], list[list[Any]]]] = {}
    for name in dict.fromkeys(str(sample.get("set", "samples")) for sample in samples):
        members = [sample for sample in samples if str(sample.get("set", "samples")) == name]
        columns = list(dict.fromkeys(key for sample in members for key in sample))
        tables[name] = (columns, [[_cell(sample.get(column)) for column in columns] for sample in members])
    return tables


def _cell(value: object) -> str | int | float | None:
    if value is None or isinstance(value, str | int | float):
        return value
    turns = value if isinstance(value, list) else []
    if turns and all(isinstance(turn, list | tuple) and len(turn) == 2 for turn in turns):
        return "\n".join(f"{role}: {content}" for role, content in turns)
    return json.dumps(value, ensure_ascii=False, default=str)


def without_credentials(value: Any) -> Any:
    """`value`, of dicts, lists and scalars, without what the URLs in its strings hold of users, passwords and keys."""
    if isinstance(value, dict):
        return {key: without_credentials(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_credentials(item) for item in value]
    return _CREDENTIALS.sub("", value) if isinstance(value, str) else value


def _kept_id(path: Path) -> str:
    kept = path.read_text().strip() if path.exists() else ""
    if kept:
        return kept
    id = secrets.token_hex(8)
    replace_text(path, id + "\n")
    return id
