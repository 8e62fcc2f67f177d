"""`rolecall rewind`: a run that is stopped, or a fine-tuning, goes on from a checkpoint that is not its newest, or from
the newest without the batches that were trained since.

Acts on the checkpoints alone, which any store of the run then finds to be not its own past: the next controller goes
back to the newest by itself, in a new lineage (services/controller/durable/recovery.py).
"""

import time
from pathlib import Path
from typing import TextIO

from rolecall.checkpoint.manifest import RunCheckpoints
from rolecall.checkpoint.storage import open_storage
from rolecall.errors import CheckpointMissingError, ConfigError, RunLockedError
from rolecall.launcher.plan import is_under_way
from rolecall.settings import run_section_of


def rewind(run: str, step: int, out: TextIO) -> int:
    """Makes the checkpoint of `step` the newest of the run that `run` names (its directory or configuration); returns
    the exit code. CheckpointMissingError names those that there are; RunLockedError while a launcher works there.
    """
    path = Path(run)
    file = path / "config.yaml" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{run} is neither a run directory with a config.yaml nor a configuration file")
    section = run_section_of(file)
    if section.dir.is_dir() and is_under_way(section.dir):
        raise RunLockedError(f"the run in {section.dir} is under way; stop it first")
    url, checkpoints = section.checkpoints, RunCheckpoints(open_storage(section.checkpoints), num_kept=1)
    steps = checkpoints.steps()
    if step not in steps:
        there = f"those of steps {', '.join(map(str, steps))}" if steps else "none"
        raise CheckpointMissingError(f"{url} holds no checkpoint of step {step}; there are {there}")
    state = dict(checkpoints.read(step).state)
    if "lineage" in state:  # not of `rolecall sft`, which has no store
        state["lineage"] = int(time.time())  # above any that a store has begun, of which each is one above another
    checkpoints.go_back(step, state)
    gone = ", ".join(str(each) for each in steps if each > step)
    out.write(f"the checkpoint of step {step} is the newest in {url}{gone and f'; deleted: {gone}'}\n")
    out.write("--resume goes on from it, without the batches that were trained since\n")
    return 0
