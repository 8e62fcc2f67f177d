"""The load that the store carries through claim, commit, read, columns and ack, beside raw redis-py doing the same
bytes, round trips and fsyncs. See README.md.

Worker processes of several threads make each phase at the same time; ours and raw take turns on one server, and every
ratio is of one round's pair. What raw does and leaves out stands in store_raw.py.
"""

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from statistics import median

import psutil
from pydantic import SecretStr

from benchmarks.machine import describe
from benchmarks.store_ours import (
    DESK_PHASES,
    PHASES,
    Desk,
    OurDesk,
    OurShare,
    Payload,
    Shape,
    Share,
)
from benchmarks.store_raw import RawDesk, RawShare, raw_client
from rolecall.settings import StoreSection
from rolecall.store.connection import connect
from rolecall.store.embedded import EmbeddedStore

MAX_BYTES = 4 * 2**30
PHASE_TIMEOUT_S = 120.0
"""Deadline of one phase of one round."""
WAYS = ("ours", "raw")


@dataclass
class Worker:
    """A process with several threads' shares of a round, and the pipe it is told phases by."""

    process: multiprocessing.process.BaseProcess
    pipe: Pipe

    def end(self) -> None:
        """Ends the process."""
        self.pipe.close()
        self.process.join(5.0)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


@dataclass
class Figures:
    """The figures of one shape."""

    shape: Shape
    seconds: dict[str, dict[str, list[float]]] = field(
        default_factory=lambda: {way: {phase: [] for phase in PHASES} for way in WAYS}
    )
    bytes_in: dict[str, float] = field(default_factory=dict)
    """Bytes that the server received for a trajectory, by way."""
    bytes_out: dict[str, float] = field(default_factory=dict)
    cpu_s: dict[str, list[tuple[float, float]]] = field(default_factory=lambda: {way: [] for way in WAYS})
    """CPU seconds of (server, everyone else) in each round, by way."""
    used_bytes: list[int] = field(default_factory=list)
    """The server's used_memory after each round of ours, when all is acknowledged."""
    server_rss: list[int] = field(default_factory=list)
    client_rss: list[int] = field(default_factory=list)
    """Resident set of the worker processes together."""


def work(pipe: Pipe, url: str, shape: Shape, consumers: Sequence[str]) -> None:
    """A worker process: makes each phase it is told in all its shares at once, until the pipe closes."""
    payload = Payload(shape.num_tokens)
    connection, client = connect(StoreSection(url=SecretStr(url))), raw_client(url)
    shares: dict[str, list[Share]] = {
        "ours": [OurShare(connection, run_of("ours", shape), shape, name, payload) for name in consumers],
        "raw": [RawShare(client, run_of("raw", shape), shape, name, payload) for name in consumers],
    }
    with ThreadPoolExecutor(len(consumers)) as threads:
        while True:
            try:
                way, phase, num_groups = pipe.recv()
            except EOFError:
                return
            calls = [threads.submit(act, share, phase, num_groups) for share in shares[way]]
            for call in calls:
                call.result()
            pipe.send("done")


def act(share: Share, phase: str, num_groups: int) -> None:
    """Does one phase of one share."""
    actions: dict[str, Callable[[], None]] = {
        "claim": lambda: share.claim(num_groups),
        "stage": share.stage,
        "commit": share.commit,
        "read": share.read,
        "write": share.write,
        "train": share.train,
    }
    actions[phase]()


def run_of(way: str, shape: Shape) -> str:
    """Name of the run: keys of a length."""
    return f"{way:-<4}-{shape.num_tokens}-{shape.num_shards}"


def measure(url: str, server: psutil.Process, shape: Shape, arguments: argparse.Namespace, scratch: Path) -> Figures:
    """All rounds of one shape."""
    context = multiprocessing.get_context("spawn")
    workers = []
    names = [
        [f"worker-{p}-{t}.{os.urandom(4).hex()}" for t in range(arguments.threads)] for p in range(arguments.processes)
    ]
    try:
        for consumers in names:
            here, there = context.Pipe()
            process = context.Process(target=work, args=(there, url, shape, consumers), daemon=True)
            process.start()
            there.close()
            workers.append(Worker(process, here))
        everyone = [name for consumers in names for name in consumers]
        desks: dict[str, Desk] = {
            "ours": OurDesk(url, run_of("ours", shape), shape, everyone, scratch / "history.jsonl"),
            "raw": RawDesk(url, run_of("raw", shape), shape),
        }
        figures = Figures(shape)
        client = raw_client(url)
        clients = [psutil.Process(worker.process.pid) for worker in workers] + [psutil.Process()]
        for number in range(arguments.rounds + 1):
            for way in WAYS if number % 2 else reversed(WAYS):
                before, used = client.info("stats"), (cpu_seconds([server]), cpu_seconds(clients))
                seconds = one_round(desks[way], workers, way, shape.num_groups // len(everyone))
                after = client.info("stats")
                if number == 0:  # warm-up
                    continue
                for phase in PHASES:
                    figures.seconds[way][phase].append(seconds[phase])
                figures.cpu_s[way].append((cpu_seconds([server]) - used[0], cpu_seconds(clients) - used[1]))
                figures.bytes_in[way] = (
                    after["total_net_input_bytes"] - before["total_net_input_bytes"]
                ) / shape.num_trajectories
                figures.bytes_out[way] = (
                    after["total_net_output_bytes"] - before["total_net_output_bytes"]
                ) / shape.num_trajectories
                if way == "ours":
                    figures.used_bytes.append(client.info("memory")["used_memory"])
                    figures.server_rss.append(server.memory_info().rss)
                    figures.client_rss.append(
                        sum(psutil.Process(worker.process.pid).memory_info().rss for worker in workers)
                    )
        return figures
    finally:
        for worker in workers:
            worker.end()


def one_round(desk: Desk, workers: Sequence[Worker], way: str, groups_per_share: int) -> dict[str, float]:
    """Seconds of each phase of one batch, admission to ack."""
    seconds = {}
    for phase in PHASES:
        started = time.perf_counter()
        if phase in DESK_PHASES:
            desk.admit() if phase == "admit" else desk.ack()
        else:
            if phase == "read":
                desk.landed()
            for worker in workers:
                worker.pipe.send((way, phase, groups_per_share))
            for worker in workers:
                if not worker.pipe.poll(PHASE_TIMEOUT_S):
                    raise SystemExit(f"a worker did not finish phase {phase} within {PHASE_TIMEOUT_S:.0f} s")
                worker.pipe.recv()
        seconds[phase] = time.perf_counter() - started
    return seconds


def cpu_seconds(processes: Sequence[psutil.Process]) -> float:
    """User and system time of all of them so far."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def table(figures: Figures, arguments: argparse.Namespace) -> list[str]:
    """Lines: every phase and all of them together; then bytes and memory."""
    shape, ours, raw = figures.shape, figures.seconds["ours"], figures.seconds["raw"]
    whole = {way: [sum(row) for row in zip(*figures.seconds[way].values(), strict=True)] for way in WAYS}
    lines = [
        f"{shape.num_tokens} tokens a trajectory, {shape.num_shards} shards; rounds of {shape.num_groups} groups of "
        f"{shape.num_trajectories // shape.num_groups}, {arguments.processes} processes x {arguments.threads} "
        f"threads, medians of {arguments.rounds} rounds",
        f"{'phase':<10}{'ours/s':>10}{'MB/s':>9}{'raw/s':>12}{'MB/s':>9}{'ours/raw':>10}{'min':>7}{'max':>7}   "
        "(/s: trajectories a second)",
    ]
    total_mb = sum(map(shape.megabytes, PHASES))
    rows = [(phase, ours[phase], raw[phase], shape.megabytes(phase)) for phase in PHASES] + [
        ("all", whole["ours"], whole["raw"], total_mb)
    ]
    for name, mine, theirs, megabytes in rows:
        ratios = [their / my for my, their in zip(mine, theirs, strict=True)]
        a, b = median(mine), median(theirs)
        speeds = [f"{megabytes / seconds:>9.0f}" if megabytes else f"{'':>9}" for seconds in (a, b)]
        lines.append(
            f"{name:<10}{shape.num_trajectories / a:>10.0f}{speeds[0]}{shape.num_trajectories / b:>12.0f}{speeds[1]}"
            f"{median(ratios):>10.2f}{min(ratios):>7.2f}{max(ratios):>7.2f}"
        )
    cpu = {
        way: [1e6 * sum(part) / len(part) / shape.num_trajectories for part in zip(*figures.cpu_s[way], strict=True)]
        for way in WAYS
    }
    spent = ", ".join(f"{way} {cpu[way][0]:.0f} + {cpu[way][1]:.0f}" for way in WAYS)
    lines.append(
        f"CPU microseconds a trajectory, server + clients: {spent}; ours/raw by CPU "
        f"{sum(cpu['raw']) / sum(cpu['ours']):.2f}"
    )
    sent = ", ".join(
        f"{way} {figures.bytes_in[way] / 1e3:.1f} in, {figures.bytes_out[way] / 1e3:.1f} out" for way in WAYS
    )
    lines.append(f"kB a trajectory on the wire: {sent}")
    lines.append(
        f"MB after each round of ours, first -> last: the server's used_memory {mb(figures.used_bytes)}, its RSS "
        f"{mb(figures.server_rss)}, "
        f"the workers' RSS {mb(figures.client_rss)}"
    )
    return lines


def mb(values: Sequence[int]) -> str:
    """First, last and highest."""
    return f"{values[0] / 1e6:.1f} -> {values[-1] / 1e6:.1f} (max {max(values) / 1e6:.1f})"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 8192])
    parser.add_argument("--shards", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--megabytes", type=int, default=64, help="rows of one round; trajectories follow from it")
    parser.add_argument(
        "--dir",
        type=Path,
        help="where the server keeps its append-only file: a folder on a disk, for fsync to cost what it costs",
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run of seconds; its figures mean nothing")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.megabytes, arguments.threads = 2, 8, 2
    with tempfile.TemporaryDirectory(prefix="rolecall-store-", dir=arguments.dir) as folder:
        store = EmbeddedStore(Path(folder) / "store", "*", MAX_BYTES)
        try:
            for line in report(store, store.start(), Path(folder), arguments):
                print(line, flush=True)
        finally:
            store.stop()


def report(store: EmbeddedStore, url: str, scratch: Path, arguments: argparse.Namespace) -> Iterator[str]:
    """All lines, each shape's as soon as it is measured."""
    assert store.pid is not None
    server, info = psutil.Process(store.pid), raw_client(url).info("server")
    yield from [
        *describe(),
        f"Valkey {info.get('valkey_version', info['redis_version'])}, unix socket, appendfsync always",
        "",
    ]
    shares = arguments.processes * arguments.threads
    for num_tokens in arguments.tokens:
        for num_shards in arguments.shards:
            per_share = max(1, arguments.megabytes * 10**6 // (num_tokens * 17 * 8 * shares))
            figures = measure(url, server, Shape(num_tokens, num_shards, per_share * shares), arguments, scratch)
            yield from [*table(figures, arguments), ""]


if __name__ == "__main__":
    main()
