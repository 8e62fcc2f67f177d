"""What a publish costs the responses in flight, by what it does with their keys and values. See README.md.

A real engine samples long responses and is paused, probed and resumed every few seconds as in a publish; no weights are
sent. The same responses once more without that say what each pause cost.
"""

import argparse
import asyncio
import dataclasses
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from benchmarks.machine import describe
from benchmarks.step import HERE, MEASURED, SORT_DIGITS, call, sort_digits
from rolecall.settings import load_settings
from rolecall.v1 import trajectory_pb2
from services.controller.publish.probe import MAX_PROBE_TOKENS, NUM_DECODED
from services.rollout.config import RolloutConfig, configure, machine_cores, start_environment
from services.rollout.sampling import PauseMode, SampleRequest

if TYPE_CHECKING:
    from services.rollout.engine import VllmEngine


@dataclasses.dataclass(frozen=True)
class Load:
    """What is in flight, and how often a publish comes."""

    num_responses: int
    num_prompt_tokens: int
    num_response_tokens: int
    every_s: float


async def publish(engine: "VllmEngine", mode: PauseMode, probe: list[int]) -> None:
    """What a replica does in a publish, less the transfer."""
    await engine.pause(mode)
    await engine.probe(probe, NUM_DECODED)
    await engine.resume()


async def turn(engine: "VllmEngine", load: Load, mode: PauseMode | None, name: str) -> tuple[float, float, int]:
    """Seconds and CPU seconds until all responses have ended, and the publishes meanwhile; `mode` None: none."""
    rng = random.Random(0)
    sampling = trajectory_pb2.SamplingParams(temperature=1.0, top_p=1.0, max_tokens=load.num_response_tokens)
    requests = [
        SampleRequest(f"{name}/{i}", [rng.randrange(3, 12) for _ in range(load.num_prompt_tokens)], sampling, i)
        for i in range(load.num_responses)
    ]
    started, cpu_before, num_publishes = time.perf_counter(), cpu_seconds(), 0
    sampled = asyncio.gather(*(engine.sample(request) for request in requests))
    while mode is not None:
        await asyncio.wait([sampled], timeout=load.every_s)
        if sampled.done():
            break
        await publish(engine, mode, list(requests[0].prompt_token_ids[:MAX_PROBE_TOKENS]))
        num_publishes += 1
    assert all(len(sample.token_ids) == load.num_response_tokens for sample in await sampled)
    return time.perf_counter() - started, cpu_seconds() - cpu_before, num_publishes


def cpu_seconds() -> float:
    """Of this process and the engine's."""
    this = psutil.Process()
    times = [process.cpu_times() for process in (this, *this.children(recursive=True))]
    return float(sum(used.user + used.system for used in times))


async def measure(config: RolloutConfig, load: Load, num_rounds: int) -> None:
    """Prints each turn, and what a publish cost."""
    from services.rollout.engine import VllmEngine

    engine = VllmEngine(config)
    await engine._llm.update_weight_version("0")  # else the weights that arrive say it
    await engine.warm_up()
    for number in range(num_rounds):
        alone = await turn(engine, load, None, f"{number}/none")
        print(f"no publish   {alone[0]:7.2f} s {alone[1]:7.1f} CPU s")
        for mode in (PauseMode.KEEP, PauseMode.KEEP_CACHE):
            seconds, cpu_s, count = await turn(engine, load, mode, f"{number}/{mode.value}")
            print(
                f"{mode.value:12} {seconds:7.2f} s {cpu_s:7.1f} CPU s, {count} publishes: "
                f"{(seconds - alone[0]) / count:6.2f} s and {(cpu_s - alone[1]) / count:6.1f} CPU s each",
                flush=True,
            )
    await engine.close()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--folder", type=Path, help="a folder that examples/sort_digits/prepare.py made (default: made anew)"
    )
    parser.add_argument("--responses", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--response-tokens", type=int, default=512)
    parser.add_argument("--every-s", type=float, default=10.0, help="seconds between two publishes")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    load = Load(arguments.responses, arguments.prompt_tokens, arguments.response_tokens, arguments.every_s)
    with tempfile.TemporaryDirectory(prefix="rolecall-kept-cache-") as directory:
        scratch = Path(directory)
        paths = sort_digits(arguments.folder, scratch)
        model = scratch / "large"
        small = paths[0].removeprefix("model.path=")
        call([sys.executable, str(HERE / "large_model.py"), str(model), "--tokenizer-of", small])
        settings = load_settings(
            SORT_DIGITS / "task.yaml",
            [
                *paths,
                *MEASURED,
                f"model.path={model}",
                f"data.max_prompt_tokens={load.num_prompt_tokens}",
                f"sampling.max_tokens={load.num_response_tokens}",
                f"rollout.max_num_seqs={load.num_responses}",
                f"rollout.kv_cache_bytes={2**30}",
                "rollout.pause_mode=keep_cache",
            ],
        )
        # No end token: every turn has the same tokens.
        config = dataclasses.replace(configure(settings, "rollout-0", machine_cores()), eos_token_ids=())
        os.environ.update(start_environment(config))
        print("\n".join(describe()), flush=True)
        asyncio.run(measure(config, load, arguments.rounds))


if __name__ == "__main__":
    main()
