"""The cost of the real controller per trajectory, and whether its memory stays flat, with roles that have no models.
See README.md.

The controller is `python -m services.controller` in a process of its own, beside the embedded store and fake_roles.py.
CPU seconds are those that the operating system counted for each process, so they hold on a shared machine; the
trajectories a second of the wall clock are those of all of them together on this machine's cores.
"""

import argparse
import json
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil
import yaml
from pydantic import SecretStr

from benchmarks.machine import describe
from benchmarks.store_raw import raw_client
from rolecall.settings import StoreSection
from rolecall.store.connection import connect
from rolecall.store.embedded import EmbeddedStore
from rolecall.store.ledger import Ledger
from tests.tiny_tokenizer import write_tokenizer

HERE = Path(__file__).resolve().parent
RUN = "scale"
NUM_RESPONSES = 8
PROMPT_WORDS = 8
NUM_PROCESSES = 2
"""Processes over which the replicas are spread."""
SAMPLE_S = 0.5
SCORERS: dict[str, dict[str, Any]] = {
    "number": {"scorer": {"kind": "regex", "pattern": r"(\d+)"}},
    "exact": {"scorer": {"kind": "exact_match"}},
    "short": {"scorer": {"kind": "length", "max_tokens": 64}, "weight": 0.1},
}
"""The cheapest scorers that there are: any other leaves the controller more time."""
EVENT_LOOP = "(its event loop alone)"
"""The controller's main thread: the part that no second core could take over, were there no lock around all of Python.
"""
START_TIMEOUT_S = 150.0
"""Time from the first process to the first trained step."""
STALL_S = 60.0
"""Longest time without a trained step."""
BYTES_PER_TOKEN = 13 + 4 + 5
"""Written per token: the columns that a rollout samples, its text, and the controller's loss_mask and advantages."""


@dataclass(frozen=True)
class Load:
    """The load that is sent through a run."""

    num_tokens: int
    """Tokens of a response."""
    num_shards: int
    groups_per_batch: int
    num_trajectories: int
    """Measured after the first batch."""
    latency_s: float
    num_rollouts: int
    max_groups: int
    """Groups in a rollout's hands."""
    has_service: bool = False
    """Whether the real reward service scores, by SCORERS in one worker process."""


@dataclass(frozen=True)
class Sample:
    """One look at all processes and the run."""

    time_s: float
    num_trained: int
    cpu_s: Mapping[str, float]
    """CPU seconds by process."""
    num_bytes: Mapping[str, int]
    """Resident sets of controller and store, and the store's own count."""


class Cluster:
    """Store, controller and fake roles, as processes; ends them all."""

    def __init__(self, load: Load, folder: Path) -> None:
        self._load, self._folder = load, folder
        self._store = EmbeddedStore(folder / "store", RUN, 6 * 2**30)
        self._processes: dict[str, list[subprocess.Popen[bytes]]] = {}
        self.metrics = folder / "run" / "metrics.jsonl"

    def start(self) -> None:
        """Starts everything; nothing is waited for but the store."""
        config = self._configure(self._store.start())
        fakes = [sys.executable, str(HERE / "fake_roles.py")]
        self._start("controller", [sys.executable, "-m", "services.controller", str(config)])
        self._start("trainer and scorer", [*fakes, "trainer", str(config)])
        if self._load.has_service:
            self._start("reward service", [sys.executable, "-m", "services.reward", str(config)])
        most = -(-self._load.num_rollouts // NUM_PROCESSES)
        for first in range(0, self._load.num_rollouts, most):
            number = min(most, self._load.num_rollouts - first)
            plan = ["--first", str(first), "--number", str(number), "--latency", str(self._load.latency_s)]
            self._start("rollouts", [*fakes, "rollouts", str(config), *plan])
        self._ledger = Ledger(connect(StoreSection(url=SecretStr(self._store.url))), RUN)
        self._client = raw_client(self._store.url)

    def sample(self) -> Sample:
        """Everything as it is now. SystemExit when a process has ended."""
        for name, processes in self._processes.items():
            if any(process.poll() is not None for process in processes):
                raise SystemExit(f"{name} ended\n{self.log_tail(name)}")
        assert self._store.pid is not None
        watched = {name: [process.pid for process in processes] for name, processes in self._processes.items()} | {
            "store": [self._store.pid]
        }
        return Sample(
            time_s=time.monotonic(),
            num_trained=self._ledger.position().trained * NUM_RESPONSES,
            cpu_s={name: sum(cpu_seconds(pid) for pid in pids) for name, pids in watched.items()}
            | {EVENT_LOOP: loop_seconds(watched["controller"][0])},
            num_bytes={
                "controller's RSS": psutil.Process(watched["controller"][0]).memory_info().rss,
                "store's used_memory": int(self._client.info("memory")["used_memory"]),
                "store's RSS": psutil.Process(self._store.pid).memory_info().rss,
            },
        )

    def status(self) -> str:
        """Returns the controller's own account."""
        command = [sys.executable, "-m", "rolecall", "status", str(self._folder / "run.yaml")]
        return subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=STALL_S, check=False
        ).stdout

    def log_tail(self, name: str) -> str:
        """The end of what a process said."""
        return "\n".join((self._folder / f"{name}.log").read_text(errors="replace").splitlines()[-30:])

    def stop(self) -> None:
        """Kills the roles and ends the store."""
        for processes in self._processes.values():
            for process in processes:
                process.kill()
                process.wait()
        self._store.stop()

    def _start(self, name: str, command: Sequence[str]) -> None:
        with (self._folder / f"{name}.log").open("ab") as log:
            self._processes.setdefault(name, []).append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT))

    def _configure(self, url: str) -> Path:
        load, folder = self._load, self._folder
        write_tokenizer(folder / "model")
        prompts = [
            json.dumps({"prompt": f"number {i} " + "word " * PROMPT_WORDS, "ground_truth": str(i)}) for i in range(1000)
        ]
        (folder / "train.jsonl").write_text("\n".join(prompts))
        config: dict[str, dict[str, Any]] = {
            "run": {"name": RUN, "dir": str(folder / "run"), "num_steps": 10**6, "checkpoint_every_steps": 5},
            "model": {"path": str(folder / "model")},
            "data": {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 256},
            "sampling": {"num_responses": NUM_RESPONSES, "max_tokens": load.num_tokens},
            "algorithm": {"groups_per_batch": load.groups_per_batch, "max_staleness": 1},
            "controller": {"address": free_port(), "start_timeout_s": START_TIMEOUT_S},
            "actor": {"address": free_port()},
            "reward": {"address": free_port(), "components": SCORERS if load.has_service else {}, "num_workers": 1},
            "rollout": {"num_replicas": load.num_rollouts, "max_groups": load.max_groups},
            "store": {"url": url, "num_shards": load.num_shards, "max_bytes": 6 * 2**30},
        }
        path = folder / "run.yaml"
        path.write_text(yaml.safe_dump(config))
        path.chmod(0o600)
        return path


def cpu_seconds(pid: int) -> float:
    """User and system time of a process and of its children, a reward service's workers."""
    process = psutil.Process(pid)
    times = [each.cpu_times() for each in (process, *process.children(recursive=True))]
    return float(sum(each.user + each.system for each in times))


def loop_seconds(pid: int) -> float:
    """User and system time of a process's main thread."""
    return next(
        float(thread.user_time + thread.system_time) for thread in psutil.Process(pid).threads() if thread.id == pid
    )


def free_port() -> str:
    """An address that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def measure(load: Load, scratch: Path) -> tuple[list[Sample], list[dict[str, float]]]:
    """Samples from the first trained step until enough trajectories were trained, and the steps' metrics."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        cluster = Cluster(load, Path(folder))
        try:
            cluster.start()
            samples: list[Sample] = []
            deadline = time.monotonic() + START_TIMEOUT_S
            while not samples or samples[-1].num_trained - samples[0].num_trained < load.num_trajectories:
                time.sleep(SAMPLE_S)
                sample = cluster.sample()
                moved = sample.num_trained > (samples[-1].num_trained if samples else 0)
                deadline = time.monotonic() + STALL_S if moved else deadline
                if time.monotonic() > deadline:
                    raise SystemExit(
                        f"no step was trained for {STALL_S:.0f} s\n{cluster.status()}\n{cluster.log_tail('controller')}"
                    )
                if sample.num_trained:
                    samples.append(sample)
            return samples, [json.loads(line) for line in cluster.metrics.read_text().splitlines()]
        finally:
            cluster.stop()


def table(load: Load, samples: Sequence[Sample], steps: Sequence[Mapping[str, float]]) -> list[str]:
    """Lines of one load."""
    first, last = samples[0], samples[-1]
    number, wall = last.num_trained - first.num_trained, last.time_s - first.time_s
    rate = number / wall
    cpu = {name: (last.cpu_s[name] - first.cpu_s[name]) / number for name in last.cpu_s}
    laps = ("wait", "prepare", "train", "commit", "publish", "report")
    spent = {lap: median(step.get(f"time/{lap}_s", 0.0) for step in steps) for lap in laps}
    return [
        f"{load.num_tokens} tokens a response, {load.num_shards} shards, batches of {load.groups_per_batch} groups "
        f"of {NUM_RESPONSES}; "
        f"{load.num_rollouts} rollouts, {load.latency_s} s a response",
        f"  {number} trajectories in {wall:.0f} s: {rate:.0f} a second, "
        f"{rate * load.num_tokens * BYTES_PER_TOKEN / 1e6:.0f} MB/s written to rows",
        "  CPU ms a trajectory: " + ", ".join(f"{name} {1e3 * seconds:.3f}" for name, seconds in cpu.items()),
        f"  a core each would carry: controller {1 / cpu['controller']:.0f}, store {1 / cpu['store']:.0f} "
        "trajectories a second",
        "  a step, seconds (medians): " + ", ".join(f"{lap} {seconds:.3f}" for lap, seconds in spent.items()),
        *memory_lines(samples),
    ]


def memory_lines(samples: Sequence[Sample]) -> list[str]:
    """Lines: the highest that each size was in each fifth of the run, because rows come and go with the checkpoints;
    and the slope of the last four.
    """
    fifths = [samples[len(samples) * i // 5 : len(samples) * (i + 1) // 5] for i in range(5)]
    lines = []
    for name in samples[0].num_bytes:
        highest = [max(sample.num_bytes[name] for sample in fifth) for fifth in fifths if fifth]
        trained = [fifth[-1].num_trained for fifth in fifths if fifth]
        slope = float(np.polyfit(trained[1:], highest[1:], 1)[0]) if len(set(trained[1:])) > 1 else 0.0
        shown = "  ".join(f"{value / 1e6:.1f}" for value in highest)
        lines.append(f"  MB at most in each fifth, {name:<20} {shown}; slope {slope:+.0f} bytes a trajectory")
    return lines


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="*", default=[1024, 8192])
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--seconds", type=float, default=20.0, help="about how long each load is measured")
    parser.add_argument(
        "--trajectories", type=int, default=100_000, help="of 64 tokens, for memory over time; 0 leaves it out"
    )
    parser.add_argument(
        "--dir", type=Path, help="where everything is written: a folder on a disk, for fsync to cost what it costs"
    )
    parser.add_argument(
        "--scorers", type=int, default=0, metavar="N", help="N trajectories of 64 tokens through the reward service"
    )
    parser.add_argument(
        "--fleet", type=int, default=0, metavar="N", help="N rollouts of a group in 4 s, through the reward service"
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run of seconds; its figures mean nothing")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rolecall-scale-", dir=arguments.dir) as folder:
        scratch = Path(folder)
        if arguments.quick:
            print("\n".join([*describe(), *one(Load(64, 4, 4, 96, 0.02, 1, 4), scratch)]))
            return
        print("\n".join(describe()), flush=True)
        for num_tokens in arguments.tokens:
            for num_shards in arguments.shards:
                rate = 700 if num_tokens <= 2048 else 150
                groups = 64 if num_tokens <= 2048 else 16
                print(
                    "\n".join(
                        one(Load(num_tokens, num_shards, groups, int(arguments.seconds * rate), 0.5, 8, 32), scratch)
                    ),
                    flush=True,
                )
        if arguments.scorers:
            print("\n".join(one(Load(64, 1, 128, arguments.scorers, 0.2, 8, 64, has_service=True), scratch)))
        if arguments.fleet:
            print("\n".join(one(Load(64, 1, 128, 40 * arguments.fleet, 4.0, arguments.fleet, 1, True), scratch)))
        if arguments.trajectories:
            print("\n".join(one(Load(64, 1, 128, arguments.trajectories, 0.2, 8, 64), scratch)))


def one(load: Load, scratch: Path) -> list[str]:
    """Lines of one load, measured."""
    return ["", *table(load, *measure(load, scratch))]


if __name__ == "__main__":
    main()
