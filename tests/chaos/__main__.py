"""Chaos runs from the command line: python -m tests.chaos --seed 0 --kills 100. `make chaos` calls it.

Runs the light system (or, with --real, torch and vLLM), kills it as often as asked, checks what was left and prints the
ledger and the table of times. Without staleness it also runs the same seed undisturbed and compares the weights after
every step, bit for bit. The folder of a failed run stays.
"""

import argparse
import logging
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

from rolecall.commands.ledger import ledger
from rolecall.settings.trainers import TrainingBackend
from tests.chaos.checker import Verdict
from tests.chaos.faults import PHASES, REAL_PHASES, SHIFT_PHASES
from tests.chaos.observer import Story
from tests.chaos.report import coverage, table
from tests.chaos.runs import light_chaos, real_chaos


def main() -> int:
    """Exit code: 0 when every promise held."""
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument(
        "--real",
        choices=get_args(TrainingBackend),
        help="with torch, vLLM and this back end; no option below is for it",
    )
    parser.add_argument(
        "--staleness", type=int, default=None, help="max_staleness; absent: 0 for even seeds, 2 for odd ones"
    )
    parser.add_argument("--lease", type=float, default=2.0, help="controller.lease_s")
    parser.add_argument("--hang", type=float, default=6.0, help="hang_s of every role")
    parser.add_argument("--down", type=int, default=3, help="targets that are down, or about to be, at a time")
    parser.add_argument("--shifts", action="store_true", help="rollouts and trainers share a device")
    parser.add_argument("--folder", type=Path, default=None, help="where to work; absent: a temporary folder")
    parser.add_argument("--keep", action="store_true", help="keep the folder of a run in which every promise held")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    staleness = arguments.staleness if arguments.staleness is not None else 2 * (arguments.seed % 2)
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="chaos-"))
    if arguments.real:
        story, verdict = real_chaos(folder, arguments.seed, arguments.kills, arguments.real)
    else:
        story, verdict = light_chaos(
            folder,
            arguments.seed,
            arguments.kills,
            staleness,
            arguments.lease,
            arguments.hang,
            arguments.down,
            takes_shifts=arguments.shifts,
        )
    say(story, verdict, REAL_PHASES if arguments.real else SHIFT_PHASES if arguments.shifts else PHASES)
    ledger(str(folder / "run" if arguments.real else folder / "killed" / "run"), None, False, sys.stdout)
    if not verdict.problems and not arguments.keep:
        shutil.rmtree(folder)
    else:
        sys.stdout.write(f"everything is in {folder}\n")
    return 1 if verdict.problems else 0


def say(story: Story, verdict: Verdict, phases: Mapping[str, Sequence[str]]) -> None:
    """The table and the ledger."""
    kills = story.num_kills
    lines = [
        table(story.records),
        coverage(story.records, phases),
        f"{kills} kills, {len(story.records)} faults in {story.wall_s:.0f} s ({60 * kills / story.wall_s:.0f} "
        f"kills a minute), {story.steps} steps",
        f"longest time without progress: {story.max_still_s:.1f} s, after {story.still_after}",
        f"trajectories judged live: {story.num_judged_live}",
        "  ".join(f"{name} {number}" for name, number in verdict.figures.items()),
        *(f"PROBLEM: {problem}" for problem in verdict.problems),
    ]
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    sys.exit(main())
