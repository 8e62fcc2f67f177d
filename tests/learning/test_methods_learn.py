"""`make test-learning`: the published methods, each as its recipe sets it, take the sort-digits model above 0.9 through
the whole system.

Fixed seed, one model for all, real rollouts. Each run's curve is a line of runs/learning.md, whose table docs/log.md
keeps.
"""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from examples.sort_digits.quickstart import EVALUATION, HERE, read_jsonl, train_command

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "runs" / "learning.md"
EVERY_STEPS = 5
METHODS = ("grpo", "dr_grpo", "rloo", "reinforce_plus_plus", "gspo", "cispo", "dapo", "remax", "ppo")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("learning")
    subprocess.run([sys.executable, str(HERE / "prepare.py"), str(path)], check=True)
    TABLE.parent.mkdir(exist_ok=True)
    steps = [f"step {step}" for step in range(0, 21, EVERY_STEPS)]
    TABLE.write_text(f"| method | {' | '.join(steps)} | seconds |\n|{'---|' * (len(steps) + 2)}\n")
    return path


@pytest.mark.learning
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("method", METHODS)
def test_the_method_takes_the_model_above_nine_tenths(method: str, folder: Path, tmp_path: Path) -> None:
    started = time.monotonic()
    command = [
        *train_command(folder, 0, method),
        f"--evaluation.every_steps={EVERY_STEPS}",
        f"--run.dir={tmp_path / 'run'}",
    ]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1100, check=False
    )
    assert done.returncode == 0, done.stdout
    curve = [row[EVALUATION] for row in read_jsonl(tmp_path / "run" / "metrics.jsonl") if EVALUATION in row]
    with TABLE.open("a") as table:
        table.write(
            f"| {method} | "
            + " | ".join(f"{accuracy:.3f}" for accuracy in curve)
            + f" | {time.monotonic() - started:.0f} |\n"
        )
    assert curve[-1] > 0.9, curve
