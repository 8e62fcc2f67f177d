"""What a failing environment does to learning: the number game, a share of whose training episodes is lost to the
infrastructure, learned in four ways of meeting that. See README.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.failing_game import WAYS
from benchmarks.machine import describe
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "guess_number"
RUN_S = 1800.0
ACCURACY = "eval/heldout/accuracy"
ENVIRONMENT = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}


def main() -> None:
    """Prints a line for each run as it ends: the share won of 800 held-out games that never fail."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shares", type=float, nargs="+", default=[0.0, 0.1, 0.3, 0.5, 0.9])
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--every", type=int, default=2, help="steps between evaluations")
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print("\n".join(describe()))
    steps = range(0, arguments.steps + 1, arguments.every)
    print(f"\n| lost | way | {' | '.join(f'step {step}' for step in steps)} | tokens sampled | s a step |")
    print("|---" * (len(steps) + 4) + "|")
    with tempfile.TemporaryDirectory(prefix="failing-") as temporary:
        folder = Path(temporary)
        prepare = [sys.executable, str(EXAMPLE / "prepare.py"), str(folder), "--seed", str(arguments.seed)]
        subprocess.run(prepare, check=True, env=ENVIRONMENT)
        for share in arguments.shares:
            for way in arguments.ways if share else ["again"]:
                print(
                    f"| {share:.0%} | {way if share else 'none'} | {learned(folder, share, way, arguments)} |",
                    flush=True,
                )


def learned(folder: Path, share: float, way: str, arguments: argparse.Namespace) -> str:
    """A whole run; its accuracies, and what it took."""
    run_dir = folder / f"{share}-{way.replace(' ', '-')}"
    address = f"127.0.0.1:{free_port()}"
    words = {
        "run.dir": run_dir,
        "run.seed": arguments.seed,
        "run.num_steps": arguments.steps,
        "model.path": folder / "model",
        "data.train": folder / "train.jsonl",
        "evaluation.sets.heldout.path": folder / "heldout.jsonl",
        "evaluation.sets.heldout.temperature": 1,
        "evaluation.sets.heldout.num_responses": 4,
        "evaluation.every_steps": arguments.every,
        "actor.optimizer.learning_rate": arguments.learning_rate,
        "environments.game.max_attempts": 1000,
        "environments.game.address": address,
        "reward.components.found.scorer.min": -1,
    }
    if way in ("masked", "left out"):
        words["algorithm.advantage.kind"] = "custom"
        words["algorithm.advantage.function"] = "benchmarks.failing_game:grpo_of_found"
        words["algorithm.advantage.options.in_baseline"] = str(way == "masked").lower()
    command = [sys.executable, "-m", "rolecall", "train", str(EXAMPLE / "task.yaml")]
    command += [f"--{key}={value}" for key, value in words.items()]
    served = [sys.executable, "-m", "benchmarks.failing_game", address, str(share), way]
    began_at = time.monotonic()
    with (folder / "log").open("a") as log:
        game = subprocess.Popen(served, cwd=ROOT, stdout=log, stderr=log, env=ENVIRONMENT)
        try:
            subprocess.run(command, check=True, stdout=log, stderr=log, timeout=RUN_S, env=ENVIRONMENT)
        except subprocess.CalledProcessError:
            sys.stderr.write((folder / "log").read_text()[-4000:])
            raise
        finally:
            game.terminate()
            game.wait(30)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    accuracies = [f"{row[ACCURACY]:.3f}" for row in rows if ACCURACY in row]
    tokens = max(row.get("rollout/sampled_tokens", 0) for row in rows)
    return " | ".join([*accuracies, f"{tokens:,.0f}", f"{(time.monotonic() - began_at) / arguments.steps:.1f}"])


if __name__ == "__main__":
    main()
