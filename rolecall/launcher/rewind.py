"""`rolecall rewind`: a run that is stopped, or a fine-tuning, goes on from a checkpoint that is not its newest, or from
the newest without the batches that were trained since.

Acts on the checkpoints alone, which any store of the run then finds to be not its own past: the next controller goes
back to the newest by itself, in a new lineage (services/controller/durable/recovery.py). Holds the run's lock, where
there is its directory: on another machine than the launcher's there need be none.
"""

from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import TextIO

from rolecall.checkpoint.manifest import RunCheckpoints
from rolecall.checkpoint.storage import open_storage
from rolecall.errors import CheckpointMismatchError, CheckpointMissingError
from rolecall.launcher.run_dir import run_lock
from rolecall.settings import JobSection, run_section_of

_APART = 10**6
"""Lineages from the highest that a checkpoint tells of to the new one. A store may have begun some since that
checkpoint, each one above the other.
"""


def rewind(run: str, step: int, out: TextIO) -> int:
    """Makes the checkpoint of `step` the newest of the run that `run` names (its directory or configuration); returns
    the exit code. CheckpointMissingError names those that there are; RunLockedError while a launcher works there.
    """
    section = run_section_of(Path(run), owns_checkpoints=True)
    with run_lock(section.dir) if section.dir.is_dir() else nullcontext():
        return _rewind(section, step, out)


def _rewind(section: JobSection, step: int, out: TextIO) -> int:
    url, checkpoints = section.checkpoints, RunCheckpoints(open_storage(section.checkpoints), num_kept=1)
    steps = checkpoints.steps()
    if step not in steps:
        there = f"those of steps {', '.join(map(str, steps))}" if steps else "none"
        raise CheckpointMissingError(f"{url} holds no checkpoint of step {step}; there are {there}")
    state = dict(checkpoints.read(step).state)
    if "lineage" in state:  # not of `rolecall sft`, which has no store
        state["lineage"] = max(_lineages(checkpoints)) + _APART
    checkpoints.go_back(step, state)
    gone = ", ".join(str(each) for each in steps if each > step)
    out.write(f"the checkpoint of step {step} is the newest in {url}{gone and f'; deleted: {gone}'}\n")
    out.write("--resume goes on from it, without the batches that were trained since\n")
    return 0


def _lineages(checkpoints: RunCheckpoints) -> Iterator[int]:
    for step in checkpoints.steps():
        with suppress(CheckpointMismatchError):  # one that was changed may be why people go back
            yield int(checkpoints.read(step).state["lineage"])
