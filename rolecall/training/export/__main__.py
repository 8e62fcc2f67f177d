"""`rolecall export CHECKPOINT DIR`: a checkpoint as a plain Hugging Face model directory, on any machine that reads the
checkpoint.

A process of its own, because the command line reaches no torch. Exit codes as in rolecall/commands/cli.py.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import get_args

from rolecall.checkpoint.manifest import Committed, RunCheckpoints, read_committed
from rolecall.checkpoint.storage import open_storage
from rolecall.errors import CheckpointMissingError, ConfigError
from rolecall.settings import Dtype, run_section_of
from rolecall.terminal import exit_code, say


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the process."""
    parser = argparse.ArgumentParser(
        prog="rolecall export",
        description="write a checkpoint as a plain Hugging Face model directory",
        allow_abbrev=False,
    )
    parser.add_argument(
        "checkpoint",
        metavar="CHECKPOINT",
        help="a step's folder, the folder of all (its newest is taken), or a run directory; path or URL",
    )
    parser.add_argument("directory", type=Path, metavar="DIR", help="where to; new or empty")
    parser.add_argument("--role", choices=["actor", "critic"], default="actor", help="whose model (actor)")
    parser.add_argument("--dtype", choices=get_args(Dtype), help="of the weights; absent: what the run computed in")
    parser.add_argument(
        "--model",
        type=Path,
        metavar="DIR",
        help="where the run's model.path or critic.path is now; only adapters need it",
    )
    arguments = parser.parse_args(argv)
    return exit_code(lambda: _export(arguments))


def _export(arguments: argparse.Namespace) -> int:
    directory: Path = arguments.directory
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise ConfigError(f"DIR {directory} is {'not empty' if directory.is_dir() else 'a file'}; name a new directory")
    checkpoint = find(arguments.checkpoint)
    from rolecall.training.export.export import export

    num_bytes = export(*checkpoint.share(arguments.role), directory, dtype=arguments.dtype, base=arguments.model)
    say(f"{arguments.role} of step {checkpoint.step}: {num_bytes / 1e6:.1f} MB of weights in {directory}\n")
    return 0


def find(place: str) -> Committed:
    """The checkpoint that `place` names, or the newest in it. CheckpointMissingError."""
    storage = open_storage(place)
    try:
        return read_committed(storage)
    except CheckpointMissingError:
        is_run = (Path(place) / "config.yaml").is_file()
        url = run_section_of(Path(place)).checkpoints if is_run else place
        latest = RunCheckpoints(open_storage(url), 1).latest()
    if latest is None:
        raise CheckpointMissingError(
            f"{url} holds no committed checkpoint; name a run directory, a folder of checkpoints, or one of its steps"
        )
    return latest


if __name__ == "__main__":
    sys.exit(main())
