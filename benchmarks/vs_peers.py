"""Our estimators, losses, KL and corrections beside unmodified verl and TRL: values and gradients on random batches.

    .venv/bin/python benchmarks/vs_peers.py --verl-python /tmp/verl/bin/python --trl-python /tmp/trl/bin/python

Prints a row for each thing compared. Ends with 1 when one that must agree does not, or when a difference that
docs/algorithms.md tells of is gone."""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from benchmarks.peer_batch import EXACT, B, Batch, Row, T
from benchmarks.peer_cases import Arrays, Case, read_answers, write_cases
from benchmarks.peer_losses import loss_rows, trl_loss_rows
from benchmarks.peer_rows import advantage_rows, correction_rows, kl_rows

HERE = Path(__file__).resolve().parent
SINGLE = 1e-4
"""What two ways of float32 may be apart."""


@dataclass
class Told:
    """The outcome of all rows of one thing and peer."""

    num: int = 0
    worst: dict[str, float] = field(default_factory=dict)
    tolerance: float = EXACT
    differs: str = ""

    @property
    def is_as_expected(self) -> bool:
        """Agreement where that is due, and else a difference."""
        agrees = max(self.worst.values()) <= self.tolerance
        return agrees != bool(self.differs)


def answers(python: Path, script: str, cases: Sequence[Case]) -> list[Arrays]:
    """Returns the peer's answers to `cases`."""
    with tempfile.TemporaryDirectory(prefix="rolecall-vs-peers-") as directory:
        folder = Path(directory)
        write_cases(folder, cases)
        subprocess.run(
            [python, HERE / script, folder], check=True, cwd=folder, env={**os.environ, "PYTHONPATH": str(HERE.parent)}
        )
        return read_answers(folder, len(cases))


def compare(row: Row, theirs: Arrays, least: float, told: Told) -> None:
    """Adds to `told` how far the two are apart, relative to the greatest number of the peer's where that exceeds 1."""
    told.num, told.tolerance, told.differs = told.num + 1, max(row.tolerance, least), row.differs
    for name, ours in row.ours.items():
        other = theirs[name].astype(np.float64)
        mine = ours.astype(np.float64)
        if other.shape == (B, T) and name != "gradient":
            mask = row.case.inputs.get("response_mask", row.case.inputs.get("mask"))
            if mask is not None:
                mine, other = mine * mask, other * mask
        if name == "rewards":
            mine, other = mine * (mine != 0), other * (mine != 0)
        if row.up_to_scale:
            mine, other = (array / np.sqrt((array**2).mean()) for array in (mine, other))
        apart = float(np.abs(mine - other).max() / max(1.0, np.abs(other).max()))
        told.worst[name] = max(told.worst.get(name, 0.0), apart)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--verl-python", type=Path, help="the Python of an environment with requirements/vs_verl.txt")
    parser.add_argument("--trl-python", type=Path, help="the Python of an environment with requirements/vs_trl.txt")
    parser.add_argument("--batches", type=int, default=8, help="random batches of everything")
    parser.add_argument("--dtype", choices=["float64", "float32"], default="float64", help="what both sides compute in")
    arguments = parser.parse_args()
    pythons = {"verl": (arguments.verl_python, "peer_verl.py"), "TRL": (arguments.trl_python, "peer_trl.py")}
    least = SINGLE if arguments.dtype == "float32" else 0.0
    rows: list[Row] = []
    for seed in range(arguments.batches):
        for make in (advantage_rows, loss_rows, trl_loss_rows, kl_rows, correction_rows):
            rows += make(Batch(seed, arguments.dtype))
    print(f"{len(rows)} comparisons, {arguments.dtype}\n")
    table: dict[tuple[str, str], Told] = {}
    for peer, (python, script) in pythons.items():
        own = [row for row in rows if row.peer == peer]
        if python is not None:
            for row, theirs in zip(own, answers(python, script, [row.case for row in own]), strict=True):
                compare(row, theirs, least, table.setdefault((peer, row.what), Told()))
    print("| peer | what | batches | furthest apart | |\n|---|---|---|---|---|")
    for (peer, what), told in table.items():
        worst = ", ".join(f"{name} {apart:.1e}" for name, apart in told.worst.items())
        verdict = told.differs or "agree"
        said = verdict if told.is_as_expected else f"NOT AS EXPECTED ({verdict})"
        print(f"| {peer} | {what} | {told.num} | {worst} | {said} |")
    wrong = sum(not told.is_as_expected for told in table.values())
    agreeing = sum(told.is_as_expected and not told.differs for told in table.values())
    print(f"\n{agreeing} agree, {len(table) - agreeing - wrong} differ as told, {wrong} not as expected")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
