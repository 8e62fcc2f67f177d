"""GRPO steps of our whole system beside TRL's GRPOTrainer: the same model, prompts, batch, lengths and dtype, taking
turns on the same cores. See README.md.

Ours is a real `rolecall train` with every role a process; TRL is trl_trainer.py in an environment of its own. Both live
as long as the comparison, so both are warm; while one has its turn the other waits, ours paused as by `rolecall pause`,
TRL by not being told to go on. The first batch of a turn is not counted.
"""

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import IO, Any, Protocol

import psutil

from benchmarks.laps import read_steps, split_table
from benchmarks.machine import describe
from benchmarks.step import HERE, MEASURED, SORT_DIGITS, call, sort_digits
from rolecall.commands.steer import find
from rolecall.rpc.callers import Caller
from rolecall.rpc.channel import open_channel
from rolecall.v1 import controller_pb2, controller_pb2_grpc

POLL_S = 0.1
"""Seconds between two looks at whether our run has come far enough."""
TIMEOUT_S = 1800.0
"""Longest start and longest turn that are waited for."""
ENVIRONMENT = {
    **os.environ,
    "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0))),
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Job:
    """The job that both train: a model, and how many tokens of it in a batch."""

    name: str
    model: Path
    data: Path
    num_prompts: int
    num_responses: int
    max_tokens: int
    num_minibatches: int


class Side(Protocol):
    """One of the two, waiting for its turn."""

    process: "subprocess.Popen[bytes]"

    def turn(self, num_batches: int) -> list[tuple[float, float]]:
        """(seconds, sampled tokens) of each batch of a turn."""


class Ours:
    """`rolecall train`, paused between its turns."""

    def __init__(self, job: Job, folder: Path, overrides: Sequence[str]) -> None:
        """Blocks until the first batch is trained."""
        self.run = folder / "run"
        given = {
            "run.dir": self.run,
            "run.num_steps": 10**6,
            "run.checkpoint_every_steps": 10**6,
            "controller.stall_timeout_s": TIMEOUT_S,
            "model.path": job.model,
            "data.train": job.data,
            "algorithm.groups_per_batch": job.num_prompts,
            "algorithm.num_minibatches": job.num_minibatches,
            "sampling.num_responses": job.num_responses,
            "sampling.max_tokens": job.max_tokens,
        }
        words = [*MEASURED, *(f"{key}={value}" for key, value in given.items()), *overrides]
        command = [
            sys.executable,
            "-m",
            "rolecall",
            "train",
            str(SORT_DIGITS / "task.yaml"),
            *(f"--{word}" for word in words),
        ]
        with (folder / "ours.log").open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=ENVIRONMENT)
        self._num_prompts = job.num_prompts
        self._wait(lambda: bool(self._steps()))
        self._rest(2)

    def turn(self, num_batches: int) -> list[tuple[float, float]]:
        """Pauses while the last batch is in the works: it is finished, and no other is begun."""
        before = len(self._steps())
        asyncio.run(self._steer("ResumeRun"))
        self._wait(lambda: len(self._steps()) >= before + num_batches - 1)
        self._rest(before + num_batches)
        return [(step["time/step_s"], step["batch/response_tokens"]) for step in self._steps()[before:]]

    def _rest(self, num_steps: int) -> None:
        """Pauses once the batch of step `num_steps` is admitted as a whole, and waits for its end."""
        self._wait(
            lambda: (
                len(self._steps()) >= num_steps or asyncio.run(self._steer("GetRun")).ledger.live == self._num_prompts
            )
        )
        asyncio.run(self._steer("PauseRun"))
        self._wait(lambda: len(self._steps()) >= num_steps and self._has_ended(asyncio.run(self._steer("GetRun"))))

    @staticmethod
    def _has_ended(status: controller_pb2.RunStatus) -> bool:
        return status.HasField("ledger") and status.ledger.live == 0

    def _steps(self) -> list[dict[str, Any]]:
        metrics = self.run / "metrics.jsonl"
        rows = [json.loads(line) for line in metrics.read_text().splitlines()] if metrics.exists() else []
        return [row for row in rows if "time/step_s" in row]

    async def _steer(self, command: str) -> controller_pb2.RunStatus:
        found = find(str(self.run), Caller.OPERATOR)
        async with open_channel(found.address, found.rpc) as channel:
            stub = controller_pb2_grpc.ControllerServiceStub(channel)
            if command == "PauseRun":
                await stub.PauseRun(controller_pb2.PauseRunRequest())
            elif command == "ResumeRun":
                await stub.ResumeRun(controller_pb2.ResumeRunRequest())
            return (await stub.GetRun(controller_pb2.GetRunRequest())).status

    def _wait(self, reached: Callable[[], bool]) -> None:
        deadline = time.monotonic() + TIMEOUT_S
        while not reached():
            if self.process.poll() is not None or time.monotonic() > deadline:
                self.process.terminate()
                raise SystemExit(f"our run did not go on; see {self.run.parent / 'ours.log'} and {self.run / 'logs'}")
            time.sleep(POLL_S)


class Trl:
    """trl_trainer.py, which waits for a number on its standard input."""

    def __init__(self, job: Job, folder: Path, python: Path, shared: bool) -> None:
        """Blocks until the first batch is trained. On a `shared` machine threads sleep while they wait, as those of our
        roles do: spinning, their default and the faster way on idle cores, made a batch take 30 s instead of 1.3 at a
        load of 12.
        """
        folder.mkdir()
        given = {
            "model": job.model,
            "data": job.data,
            "out": folder,
            "prompts": job.num_prompts,
            "responses": job.num_responses,
        }
        words = [word for key, value in given.items() for word in (f"--{key}", str(value))]
        command = [
            str(python),
            str(HERE / "trl_trainer.py"),
            *words,
            "--max-tokens",
            str(job.max_tokens),
            "--minibatches",
            str(job.num_minibatches),
        ]
        environment = {**ENVIRONMENT, "OMP_WAIT_POLICY": "PASSIVE"} if shared else ENVIRONMENT
        self._log = folder / "trl.log"
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment
            )
        self._answer()
        self.turn(1)

    def turn(self, num_batches: int) -> list[tuple[float, float]]:
        """Blocks until they are trained."""
        _of(self.process.stdin).write(f"{num_batches}\n".encode())
        _of(self.process.stdin).flush()
        answer = self._answer()
        return list(zip(answer["seconds"], answer["tokens"], strict=True))

    def _answer(self) -> dict[str, Any]:
        line = _of(self.process.stdout).readline()
        if not line:
            raise SystemExit(f"TRL ended:\n{self._log.read_text()[-2000:]}")
        answer: dict[str, Any] = json.loads(line)
        return answer


@dataclass
class Taken:
    """The time that one side took."""

    seconds: list[float] = field(default_factory=list)
    """Seconds of each batch that counts."""
    tokens: list[float] = field(default_factory=list)
    """Sampled, of the same batches."""
    cpu_s: list[float] = field(default_factory=list)
    """CPU seconds a batch, one figure a turn: of all of the side's processes."""
    idle_cpu: list[float] = field(default_factory=list)
    """CPU seconds a second while the other side had its turn."""


def alternate(sides: Mapping[str, Side], num_turns: int, num_batches: int) -> dict[str, Taken]:
    """Returns what each side took in `num_turns` turns of 1 + `num_batches` batches."""
    taken = {name: Taken() for name in sides}
    for _ in range(num_turns):
        for name, side in sides.items():
            started, before = time.monotonic(), {each: cpu_seconds(other.process.pid) for each, other in sides.items()}
            batches = side.turn(1 + num_batches)
            used = {each: cpu_seconds(other.process.pid) - before[each] for each, other in sides.items()}
            for each, cpu_s in used.items():
                if each == name:
                    taken[each].cpu_s.append(cpu_s / len(batches))
                else:
                    taken[each].idle_cpu.append(cpu_s / (time.monotonic() - started))
            for seconds, tokens in batches[1:]:
                taken[name].seconds.append(seconds)
                taken[name].tokens.append(tokens)
    return taken


def cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds of a process and all its descendants that live."""
    root = psutil.Process(pid)
    times = [process.cpu_times() for process in (root, *root.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def table(job: Job, taken: Mapping[str, Taken]) -> list[str]:
    """Lines: both sides and their ratio."""
    ours, trl = taken["ours"], taken["TRL"]
    rows: list[tuple[str, Callable[[Taken], float]]] = [
        ("seconds a batch, median", lambda side: median(side.seconds)),
        ("seconds a batch, fastest", lambda side: min(side.seconds)),
        ("CPU seconds a batch, median of turns", lambda side: median(side.cpu_s)),
        ("sampled tokens a batch", lambda side: median(side.tokens)),
        ("CPU seconds a second while the other works", lambda side: median(side.idle_cpu)),
    ]
    lines = [
        f"{job.name}: {job.num_prompts} prompts x {job.num_responses} responses of at most {job.max_tokens} tokens, "
        f"{job.num_minibatches} optimizer steps"
    ]
    lines.append(f"{'':<44}{'ours':>10}{'TRL':>10}{'TRL/ours':>10}")
    lines += [f"{name:<44}{of(ours):>10.3f}{of(trl):>10.3f}{of(trl) / max(of(ours), 1e-9):>10.2f}" for name, of in rows]
    return [
        *lines,
        f"({len(ours.seconds)} batches of ours and {len(trl.seconds)} of TRL's, in {len(trl.cpu_s)} turns each)",
    ]


@contextmanager
def ended(*processes: "subprocess.Popen[bytes]") -> Iterator[None]:
    """Ends them on the way out; `rolecall train` ends its roles."""
    try:
        yield
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(60)


def compare(job: Job, folder: Path, arguments: argparse.Namespace, overrides: Sequence[str]) -> list[str]:
    """Lines of one job: the table, and where our step goes."""
    folder.mkdir()
    ours = Ours(job, folder, overrides)
    with ended(ours.process):
        trl = Trl(job, folder / "trl", arguments.trl_python, arguments.shared)
        with ended(trl.process):
            taken = alternate({"ours": ours, "TRL": trl}, arguments.turns, arguments.batches)
    return [*table(job, taken), "", *split_table(read_steps(ours.run / "metrics.jsonl", 2)), ""]


def jobs(scratch: Path, model: Path, data: Path, large: bool) -> Iterator[Job]:
    """The example's fine-tuned model of 1M parameters with short answers, and a random one of 74M with long ones."""
    yield Job("1M parameters", model, data, num_prompts=32, num_responses=8, max_tokens=8, num_minibatches=2)
    if large:
        call([sys.executable, str(HERE / "large_model.py"), str(scratch / "large"), "--tokenizer-of", str(model)])
        yield Job(
            "74M parameters", scratch / "large", data, num_prompts=4, num_responses=8, max_tokens=64, num_minibatches=2
        )


def main() -> None:
    """Command line; what is left over are overrides of our configuration."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--trl-python", type=Path, required=True, help="the Python of an environment with requirements/vs_trl.txt"
    )
    parser.add_argument(
        "--folder", type=Path, help="a folder that examples/sort_digits/prepare.py made (default: made anew)"
    )
    parser.add_argument("--turns", type=int, default=5, help="turns of each side")
    parser.add_argument("--batches", type=int, default=4, help="batches of a turn that count")
    parser.add_argument(
        "--shared",
        action="store_true",
        help="others use this machine: TRL's threads sleep while they wait instead of spinning",
    )
    parser.add_argument("--only", choices=["small", "large"], help="one of the two models")
    arguments, overrides = parser.parse_known_args()
    with tempfile.TemporaryDirectory(prefix="rolecall-vs-trl-") as directory:
        scratch = Path(directory)
        paths = dict(word.split("=", 1) for word in sort_digits(arguments.folder, scratch))
        print("\n".join([*describe(), f"{ENVIRONMENT['OMP_NUM_THREADS']} threads each, float32", ""]), flush=True)
        for job in jobs(scratch, Path(paths["model.path"]), Path(paths["data.train"]), arguments.only != "small"):
            if arguments.only is None or (arguments.only == "large") == ("74M" in job.name):
                given = [word.removeprefix("--") for word in overrides]
                print("\n".join(compare(job, scratch / job.name.split()[0], arguments, given)), flush=True)


def _of(stream: IO[bytes] | None) -> IO[bytes]:
    assert stream is not None
    return stream


if __name__ == "__main__":
    main()
