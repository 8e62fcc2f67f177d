"""Whether the run in a folder has nothing left to do, which `rolecall train --resume` says before it starts anything.

Reads what the run's last launcher, its last checkpoint and its evaluations left, and asks nobody. In doubt the run goes
on: its controller knows what is still to do.
"""

import json
from collections.abc import Iterator
from pathlib import Path

from rolecall.errors import InvalidInputError
from rolecall.identity import newest_checkpoint
from rolecall.launcher.run_record import read_record
from rolecall.settings import RunSettings
from rolecall.v1 import controller_pb2


def is_finished(settings: RunSettings) -> bool:
    """Whether all steps were trained, evaluated at their end and kept. Raises as `newest_checkpoint`."""
    try:
        record = read_record(settings.run.dir)
    except InvalidInputError:  # cut off, or of another release
        return False
    last = settings.run.total_steps
    if record is None or record.exit_code != 0 or record.status.state != controller_pb2.RUN_STATE_DONE:
        return False
    if last == 0 or record.status.step != last or not settings.evaluation.sets.keys() <= _evaluated(settings, last):
        return False  # a run that is stopped within its last evaluation is done without it
    newest = newest_checkpoint(settings)
    return newest is not None and newest.step == last


def _evaluated(settings: RunSettings, step: int) -> set[str]:
    """The sets of which metrics.jsonl has numbers at `step`."""
    try:
        names = [name for name in _names(settings.run.dir / "metrics.jsonl", step) if name.startswith("eval/")]
    except (ValueError, TypeError, KeyError):  # no JSON, no object, or no step in it
        return set()
    return {name.split("/")[1] for name in names}


def _names(path: Path, step: int) -> Iterator[str]:
    if not path.is_file():
        return
    with path.open() as file:
        for line in file:
            if '"eval/' in line and line.endswith("\n") and (row := json.loads(line))["step"] == step:
                yield from row
