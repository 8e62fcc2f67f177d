"""Whole chaos runs: configured, driven, checked, and compared with the same run undisturbed."""

import asyncio
import subprocess
import sys
from pathlib import Path

from rolecall.settings.trainers import TrainingBackend
from tests.chaos import real_config
from tests.chaos.checker import Verdict, check_run
from tests.chaos.config import write_config
from tests.chaos.driver import Driver, Plan
from tests.chaos.faults import PHASES, REAL_PHASES, SHIFT_PHASES, draw
from tests.chaos.observer import OUTSIDE, Story
from tests.chaos.processes import Outside
from tests.chaos.report import table
from tests.twins.device import OVERFLOW

WORKERS = ["controller", "actor", "critic", "ref", "reward", "rollout-0", "rollout-1", "rollout-2"]
TARGETS = [*WORKERS, "reward/worker", OUTSIDE]
"""What faults are drawn over, beside the store."""


def light_chaos(
    folder: Path,
    seed: int,
    kills: int,
    staleness: int,
    lease_s: float,
    hang_s: float,
    max_down: int = 3,
    *,
    takes_shifts: bool = False,
) -> tuple[Story, Verdict]:
    """One light run with faults, checked; without staleness also against an undisturbed one, whose rollouts and
    trainers share no device.
    """
    place = folder / "killed"
    config = write_config(
        place,
        seed=seed,
        num_steps=1_000_000,
        max_staleness=staleness,
        lease_s=lease_s,
        hang_s=hang_s,
        takes_shifts=takes_shifts,
    )
    faults = draw(seed, TARGETS, SHIFT_PHASES if takes_shifts else PHASES)
    story, verdict = drive(Plan(place, config, WORKERS, faults, kills, lease_s, max_down=max_down))
    require_room(place, verdict)
    if staleness == 0:
        compare(folder / "calm", seed, verdict, lease_s, hang_s)
    return story, verdict


def real_chaos(folder: Path, seed: int, kills: int, backend: TrainingBackend) -> tuple[Story, Verdict]:
    """One run with torch and vLLM, killed at random instants and by what heartbeats say; slow to start, so faults have
    time.
    """
    config = real_config.write_config(folder, seed=seed, backend=backend)
    workers = [worker for worker in WORKERS if worker != "rollout-2"]
    targets = [*workers, "actor/1", "reward/worker", OUTSIDE]
    return drive(
        Plan(
            folder,
            config,
            workers,
            draw(seed, targets, REAL_PHASES),
            kills,
            lease_s=5.0,
            hang_s=240.0,
            start_s=400.0,
            package="services",
            max_down=2,
            armed_s=4.0,
            breath_s=60.0,
        )
    )


def require_room(place: Path, verdict: Verdict) -> None:
    """Nobody ever found a shared device full."""
    overflow = place / "device" / OVERFLOW
    verdict.require(not overflow.exists(), overflow.read_text() if overflow.exists() else "")


def drive(plan: Plan) -> tuple[Story, Verdict]:
    """The run and what was left of it. What was seen until then is printed when it fails."""
    driver = Driver(plan)
    try:
        story = asyncio.run(driver.run())
    except BaseException:
        sys.stdout.write(f"{table(driver.story.records)}\nleft in {plan.folder}\n")
        raise
    verdict = check_run(plan.folder / "run")
    verdict.require(story.exit_code == 0, f"the launcher ended with {story.exit_code}")
    return story, verdict


def compare(folder: Path, seed: int, verdict: Verdict, lease_s: float, hang_s: float) -> None:
    """Runs as many steps undisturbed; the weights after each must be the same, bit for bit."""
    steps = verdict.figures["steps"]
    config = write_config(folder, seed=seed, num_steps=steps, max_staleness=0, lease_s=lease_s, hang_s=hang_s)
    outside = Outside(f"unix:{folder / 'scorer.sock'}", folder / "scorer.log")
    outside.tend()
    try:
        with (folder / "launcher.log").open("wb") as file:
            command = [sys.executable, "-m", "tests.chaos.launch", str(config)]
            code = subprocess.run(command, stdout=file, stderr=file, timeout=120 + 2 * steps, check=False).returncode
    finally:
        outside.end()
    calm = check_run(folder / "run")
    verdict.require(
        code == 0 and not calm.problems, f"the undisturbed run failed: exit code {code}, {calm.problems[:3]}"
    )
    different = [step for step in range(steps + 1) if calm.weights.get(step) != verdict.weights.get(step)]
    verdict.require(
        not different,
        f"weights differ from those of the undisturbed run from step {different[:1]} on, in {len(different)} of "
        f"{steps} steps",
    )
    verdict.figures["weights bit-equal to undisturbed"] = steps + 1 - len(different)
