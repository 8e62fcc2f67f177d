"""`make quickstart`: makes the sort-digits job on disk, trains it through the whole system, and shows what changed.

A plain client of the `rolecall` command: what it prints comes from the run's metrics.jsonl and samples.jsonl, and so
can yours.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from rolecall.errors import ConfigError
from rolecall.settings import recipe_file, recipe_names

HERE = Path(__file__).resolve().parent
CRITIC = ["--critic.optimizer.learning_rate=3.0e-4"]
"""What this task sets of a critic, where the method has one."""
EVALUATION = "eval/heldout/accuracy"
NUM_SAMPLES = 5


def main() -> int:
    """Exit code of the training command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--recipe", metavar="NAME|FILE", help=f"as of rolecall train: a file, or one of {', '.join(recipe_names())}"
    )
    parser.add_argument(
        "--folder", type=Path, help="where everything goes; must not exist (default: a new one under runs/)"
    )
    arguments, overrides = parser.parse_known_args()
    try:
        recipe = recipe_file(arguments.recipe).stem if arguments.recipe else "default"
    except ConfigError as error:
        parser.error(error.message)
    folder = (
        arguments.folder or Path("runs") / f"sort_digits-{recipe}-seed{arguments.seed}-{time.strftime('%Y%m%d-%H%M%S')}"
    ).resolve()
    started = time.monotonic()
    # Idle threads that sleep instead of spinning cost nothing alone and are several times faster on a machine that
    # others use too.
    environment = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}
    subprocess.run(
        [sys.executable, str(HERE / "prepare.py"), str(folder), "--seed", str(arguments.seed)],
        check=True,
        env=environment,
    )
    prepared = time.monotonic()
    code = subprocess.run(
        [*train_command(folder, arguments.seed, arguments.recipe), *overrides], check=False
    ).returncode
    ended = time.monotonic()
    if code == 0:
        report(folder, prepare_s=prepared - started, train_s=ended - prepared)
    return code


def train_command(folder: Path, seed: int, recipe: str | None = None) -> list[str]:
    """`rolecall train` on the files in `folder`, with the method of a recipe."""
    paths = {
        "run.dir": "run",
        "model.path": "model",
        "data.train": "train.jsonl",
        "evaluation.sets.heldout.path": "heldout.jsonl",
    }
    words = [f"--{key}={folder / name}" for key, name in paths.items()]
    if recipe is not None:
        words += ["--recipe", recipe, *(CRITIC if "critic" in yaml.safe_load(recipe_file(recipe).read_text()) else [])]
    return [sys.executable, "-m", "rolecall", "train", str(HERE / "task.yaml"), *words, f"--run.seed={seed}"]


def report(folder: Path, *, prepare_s: float, train_s: float) -> None:
    """Prints accuracy and answers before and after, where the model and the curves are, and where the time went."""
    run = folder / "run"
    metrics, samples = read_jsonl(run / "metrics.jsonl"), read_jsonl(run / "samples.jsonl")
    evaluations = [row for row in metrics if EVALUATION in row]
    first, last = evaluations[0], evaluations[-1]
    print(
        f"\nHeld-out greedy accuracy, 1,000 prompts: {first[EVALUATION]:.3f} before, {last[EVALUATION]:.3f} after "
        f"{last['step']} steps\n"
    )
    before, after = (answers(samples, row["step"]) for row in (first, last))
    print(f"  {'prompt':<14}{'wanted':<10}{'before':<10}after")
    for prompt in [prompt for prompt in before if prompt in after][:NUM_SAMPLES]:
        print(
            "  "
            f"{prompt:<14}{before[prompt]['ground_truth']:<10}{before[prompt]['response']:<10}{after[prompt]['response']}"
        )
    model = folder / "trained"
    subprocess.run(
        [sys.executable, "-m", "rolecall", "export", str(run), str(model)], check=True, stdout=subprocess.DEVNULL
    )
    steps_s = sum(row.get("time/step_s", 0.0) for row in metrics)
    evaluation_s = sum(row.get("eval/heldout/time_s", 0.0) for row in metrics)
    startup_s = first["time_s"] - first.get("eval/heldout/time_s", 0.0)
    rest_s = train_s - steps_s - evaluation_s - startup_s
    print(f"\nModel:  {model}\nCurves: {plot(metrics, run / 'curves.png')}")
    print(
        f"Time:   {prepare_s + train_s:.0f} s = prepare {prepare_s:.0f} + start-up {startup_s:.0f} + steps "
        f"{steps_s:.0f} "
        f"+ evaluation {evaluation_s:.0f} + checkpoint and the rest {rest_s:.0f}"
    )


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """One object per line."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def answers(samples: list[dict[str, Any]], step: int) -> dict[str, dict[str, Any]]:
    """Held-out samples of one evaluation, by the text of the prompt."""
    return {row["prompt"][-1][1]: row for row in samples if row["step"] == step and row["set"] == "heldout"}


def plot(metrics: list[dict[str, Any]], path: Path) -> Path:
    """Draws reward, accuracy and step time over the steps."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    steps = [row for row in metrics if "reward/mean" in row]
    evaluations = [row for row in metrics if EVALUATION in row]
    figure, (reward, accuracy, clock) = plt.subplots(1, 3, figsize=(13, 3.6), constrained_layout=True)
    reward.plot([row["step"] for row in steps], [row["reward/mean"] for row in steps], marker=".")
    reward.set(title="reward (sampled)", xlabel="step", ylim=(0, 1.02))
    accuracy.plot(
        [row["step"] for row in steps], [row["reward/accuracy"] for row in steps], marker=".", label="sampled, training"
    )
    accuracy.plot(
        [row["step"] for row in evaluations],
        [row[EVALUATION] for row in evaluations],
        marker="o",
        label="greedy, held-out",
    )
    accuracy.set(title="accuracy", xlabel="step", ylim=(0, 1.02))
    accuracy.legend()
    timed = [row for row in steps if "time/step_s" in row]  # all but one whose controller ended in it
    clock.plot([row["step"] for row in timed], [row["time/step_s"] for row in timed], marker=".")
    clock.set(title="step time (s)", xlabel="step", ylim=(0, None))
    for axes in (reward, accuracy, clock):
        axes.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=120)
    return path


if __name__ == "__main__":
    sys.exit(main())
