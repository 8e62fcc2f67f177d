"""Items per second and core of the built-in scorers through gRPC: our reward service in a process of its own, called as
the controller calls it.

    python -m benchmarks.scorer_throughput [--items 40000] [--workers 1] [--tokens 400]

Prints a row per scorer: items per second of wall time; items per second of the service's processor time, that of its
worker processes included; and the same of the caller's.
"""

import argparse
import asyncio
import multiprocessing
import random
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import psutil
from pydantic import TypeAdapter

from rolecall.rpc.channel import open_channel
from rolecall.scoring.client import RewardClient
from rolecall.scoring.scores import Score
from rolecall.settings import RewardComponent, RpcSection
from rolecall.v1 import reward_pb2
from services.reward.config import RewardSettings
from services.reward.dispatcher import Dispatcher
from services.reward.service import RewardServicer
from tests.contract.reward_peers import serving

COMPONENT: TypeAdapter[RewardComponent] = TypeAdapter(RewardComponent)
SCORERS: dict[str, dict[str, dict[str, object]]] = {
    "exact_match": {"right": {"scorer": {"kind": "exact_match"}}},
    "regex": {"right": {"scorer": {"kind": "regex", "pattern": r"<answer>(.*?)</answer>"}}},
    "gsm8k": {"right": {"scorer": {"kind": "gsm8k"}}},
    "qa_f1": {"right": {"scorer": {"kind": "qa_f1", "pattern": r"<answer>(.*?)</answer>"}}},
    "regex and length": {
        "right": {"scorer": {"kind": "regex", "pattern": r"<answer>(.*?)</answer>"}},
        "short": {"scorer": {"kind": "length", "max_tokens": 4096}, "weight": 0.1},
    },
}
GROUP = 16
"""Items of a call: a group, as the controller sends it."""
MAX_CALLS = 32
"""controller.max_score_calls."""


def items_of(number: int, num_tokens: int) -> list[reward_pb2.ScoreItem]:
    """Responses of about `num_tokens` tokens, half of them right."""
    draw = random.Random(0)
    words = " ".join(draw.choice(("so", "the", "sum", "is", "then", "42")) for _ in range(num_tokens))
    return [
        reward_pb2.ScoreItem(
            id=f"{i // GROUP}/{i % GROUP}",
            response_text=f"{words}\n<answer>{i % 2}</answer>\n#### {i % 2}",
            ground_truth="1",
            num_response_tokens=num_tokens,
        )
        for i in range(number)
    ]


def serve(components: dict[str, dict[str, object]], num_workers: int, pipe: Connection) -> None:
    """Serves until the pipe says otherwise; sends its address first."""

    async def main() -> None:
        parts = {name: COMPONENT.validate_python(part) for name, part in components.items()}
        settings = RewardSettings("127.0.0.1:0", parts, num_workers, Path.cwd(), 60.0)
        dispatcher = Dispatcher(settings, RpcSection())
        await dispatcher.start()
        async with serving(RewardServicer(dispatcher, on_score=lambda: None)) as address:
            pipe.send(address)
            await asyncio.to_thread(pipe.recv)
        await dispatcher.close()

    asyncio.run(main())


def cpu_s(process: psutil.Process) -> float:
    """Processor seconds of a process and its children."""
    family = [process, *process.children(recursive=True)]
    return sum(sum(each.cpu_times()[:2]) for each in family)


async def call(address: str, items: Sequence[reward_pb2.ScoreItem]) -> None:
    """Scores `items` in groups, MAX_CALLS at a time."""
    room = asyncio.Semaphore(MAX_CALLS)
    async with open_channel(address, RpcSection()) as channel:
        client = RewardClient(channel, name="it", address=address, timeout_s=60.0, max_attempts=1)

        async def one(group: Sequence[reward_pb2.ScoreItem]) -> None:
            async with room:
                scored = await client.score(group)
            assert all(isinstance(each, Score) for each in scored), scored

        await asyncio.gather(*(one(items[start : start + GROUP]) for start in range(0, len(items), GROUP)))


def main() -> int:
    """Measures every scorer; returns the exit code."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--items", type=int, default=40_000)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=400)
    arguments = parser.parse_args()
    items = items_of(arguments.items, arguments.tokens)
    own = psutil.Process()
    sys.stdout.write(f"{'scorer':<20}{'items/s':>10}{'per core of ours':>20}{'per core of caller':>20}\n")
    for name, components in SCORERS.items():
        here, there = multiprocessing.get_context("spawn").Pipe()
        process = multiprocessing.get_context("spawn").Process(
            target=serve, args=(components, arguments.workers, there), daemon=False
        )
        process.start()
        address = here.recv()
        server = psutil.Process(process.pid)
        asyncio.run(call(address, items[:2000]))
        before, before_own, started = cpu_s(server), sum(own.cpu_times()[:2]), time.monotonic()
        asyncio.run(call(address, items))
        wall_s = time.monotonic() - started
        used_s, own_s = cpu_s(server) - before, sum(own.cpu_times()[:2]) - before_own
        here.send("end")
        process.join()
        sys.stdout.write(
            f"{name:<20}{len(items) / wall_s:>10.0f}{len(items) / used_s:>20.0f}{len(items) / own_s:>20.0f}\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
