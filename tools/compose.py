"""Trains the example of deploy/compose to its end, with the images that are there, and says how well: `make compose`.

Ends with 0 where the last evaluation is good enough, else with 1 and a sentence that says where to look.
"""

import json
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
METRICS = ROOT / "build" / "compose-metrics.jsonl"
ACCURACY = "eval/heldout/accuracy"
GOOD = 0.95
LOOK = "In deploy/compose, `docker compose ps --all` says what ended and `docker compose logs controller` why"


def docker_compose(*words: str) -> int:
    """Runs `docker compose WORDS` in the example's folder and returns its exit code."""
    # bounded: by nothing, on purpose: a run lasts as long as it lasts, and whoever looks on may end it
    return subprocess.run(["docker", "compose", *words], cwd=ROOT / "deploy" / "compose").returncode


def verdict(rows: list[dict[str, float]]) -> tuple[int, str]:
    """The exit code and the sentence for the rows of a run's metrics.jsonl; none where it wrote no file."""
    evaluations = [row for row in rows if ACCURACY in row]
    if not evaluations:
        return 1, f"The run evaluated nothing. {LOOK}."
    accuracy, step = evaluations[-1][ACCURACY], evaluations[-1]["step"]
    said = f"Held-out accuracy {accuracy:.3f} after {step} steps"
    return (0, f"{said}.") if accuracy >= GOOD else (1, f"{said}, which is below {GOOD}. {LOOK}.")


def main() -> int:
    """Command line."""
    METRICS.unlink(missing_ok=True)
    began = time.monotonic()
    if docker_compose("up", "--no-build") != 0:
        print(f"compose: the project did not come up. {LOOK}.", file=sys.stderr)
        return 1
    took_s = time.monotonic() - began
    docker_compose("cp", "controller:/var/lib/rolecall/run/metrics.jsonl", str(METRICS))
    lines = METRICS.read_text().splitlines() if METRICS.is_file() else []
    code, said = verdict([json.loads(line) for line in lines])
    print(f"compose: {said} {took_s:.0f} s from `up` to the end.")
    return code


if __name__ == "__main__":
    sys.exit(main())
