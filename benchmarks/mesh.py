"""What a service mesh costs a step: the same run twice, one behind Envoys and one not, taking turns on one machine. See
README.md.
"""

import argparse
import asyncio
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median, quantiles

from benchmarks.machine import describe
from examples.sort_digits.quickstart import HERE, read_jsonl, train_command
from rolecall.config_file import overrides_from
from rolecall.settings import RunSettings, load_settings
from rolecall.v1 import controller_pb2, controller_pb2_grpc
from tests.chaos.config import write_config
from tests.chaos.processes import Outside
from tests.mesh.envoy import Habits
from tests.mesh.runs import MeshRun

START_S = 400.0
TURN_S = 200.0
CALL_S = 10.0
NUM_CALLS = 300


def main() -> None:
    """Prints a table for twins, where a step is little but calls, and one for the sort-digits job."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=4, help="turns of each")
    parser.add_argument("--steps", type=int, default=6, help="steps of a turn, the first of which does not count")
    parser.add_argument("--twins-only", action="store_true")
    arguments = parser.parse_args()
    print("\n".join(describe()))
    with tempfile.TemporaryDirectory(prefix="mesh-") as folder:
        asyncio.run(compare("twins", Path(folder), twins, arguments.rounds, 3 * arguments.steps))
    if not arguments.twins_only:
        with tempfile.TemporaryDirectory(prefix="mesh-") as folder:
            prepare = [sys.executable, str(HERE / "prepare.py"), folder, "--seed", "0"]
            subprocess.run(prepare, check=True)
            asyncio.run(compare("sort-digits", Path(folder), sort_digits, arguments.rounds, arguments.steps))


async def compare(
    title: str, folder: Path, configure: Callable[[Path, Path], RunSettings], rounds: int, steps: int
) -> None:
    """Runs both, in turns, and prints medians and their ratio."""
    outside = Outside(f"unix:{folder / 'scorer.sock'}", folder / "scorer.log")
    outside.tend()
    package = "tests.chaos.roles" if configure is twins else "services"
    runs = {
        name: MeshRun(configure(folder, folder / name), folder / name, package=package, habits=habits)
        for name, habits in (("direct", None), ("mesh", Habits()))
    }
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    try:
        for run in runs.values():
            run.start()
        for run in runs.values():
            await run.until(lambda run=run: run.status.step >= 1, START_S, "the first step")  # type: ignore[misc]
            await steer(run, pause=True)
        calls = {name: await round_trips(run) for name, run in runs.items()}
        for _ in range(rounds):
            for name, run in runs.items():
                first = run.status.step
                await steer(run, pause=False)
                await run.until(lambda: run.status.step >= first + steps, TURN_S, f"{steps} steps")  # noqa: B023
                await steer(run, pause=True)
                rows = read_jsonl(run.settings.run.dir / "metrics.jsonl")
                seconds[name] += [
                    row["time/step_s"]
                    for row in rows
                    if "time/step_s" in row and first + 1 < row["step"] <= first + steps
                ]
    finally:
        for run in runs.values():
            run.end()
        outside.end()
    show(title, seconds, calls)


async def steer(run: MeshRun, *, pause: bool) -> None:
    """Stops admission, or lets it go on."""
    async with run.channel("operator") as channel:
        stub = controller_pb2_grpc.ControllerServiceStub(channel)
        if pause:
            await stub.PauseRun(controller_pb2.PauseRunRequest(), timeout=CALL_S)
        else:
            await stub.ResumeRun(controller_pb2.ResumeRunRequest(), timeout=CALL_S)


async def round_trips(run: MeshRun) -> list[float]:
    """Seconds of calls, one after another, to a role with nothing else to do."""
    clock = asyncio.get_running_loop().time
    took = []
    async with run.channel("operator") as channel:
        stub = controller_pb2_grpc.ControllerServiceStub(channel)
        for _ in range(NUM_CALLS):
            started = clock()
            await stub.GetRun(controller_pb2.GetRunRequest(), timeout=CALL_S)
            took.append(clock() - started)
    return took


def show(title: str, seconds: dict[str, list[float]], calls: dict[str, list[float]]) -> None:
    """One table."""
    print(f"\n{title}\n{'':<8}{'steps':>7}{'median s':>10}{'quartiles':>16}{'a call, ms':>12}")
    for name, values in seconds.items():
        low, _, high = quantiles(values, n=4)
        print(
            f"{name:<8}{len(values):>7}{median(values):>10.3f}{f'{low:.3f} .. {high:.3f}':>16}"
            f"{1000 * median(calls[name]):>12.2f}"
        )
    print(f"mesh / direct: {median(seconds['mesh']) / median(seconds['direct']):.3f}")


def twins(folder: Path, place: Path) -> RunSettings:
    """The run of tests/chaos: every role, and no model."""
    config = write_config(place, seed=0, num_steps=1_000_000, max_staleness=0, lease_s=5.0, hang_s=15.0, num_rollouts=2)
    address = f"reward.components.outside.scorer.address=unix:{folder / 'scorer.sock'}"
    return load_settings(config, [address])


def sort_digits(folder: Path, place: Path) -> RunSettings:
    """The quickstart's run, with torch and vLLM."""
    words = train_command(folder, seed=0)
    config = words.index("train") + 1
    more = [f"--run.dir={place / 'run'}", "--run.num_steps=1000000", "--evaluation.sets={}"]
    more.append("--actor.optimizer.learning_rate=1.0e-30")
    place.mkdir()
    return load_settings(Path(words[config]), overrides_from([*words[config + 1 :], *more]))


if __name__ == "__main__":
    main()
