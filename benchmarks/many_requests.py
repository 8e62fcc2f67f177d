"""The rollout's engine beside bare vLLM, many requests at a time: what a token costs the host.

    .venv/bin/python -m benchmarks.many_requests CONFIG.yaml --requests 256 --tokens 384 [--section.key=value ...]

Both engines are in this process and take turns, round by round: ours as the replica uses it, and an AsyncLLM with
vLLM's own scheduler, asked for tokens alone and for their logprobs. Prompts are random, responses have all their
tokens. Tokens a second, and microseconds of CPU a token in the engine's process and in this one; medians.
"""

import argparse
import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import psutil

from benchmarks.bare_vllm import bare_arguments
from rolecall.data.model.files import vocab_size
from rolecall.settings import load_settings
from rolecall.v1 import trajectory_pb2
from services.rollout.config import RolloutConfig, configure, machine_cores, start_environment
from services.rollout.sampling import SampleRequest

Sampler = Callable[[str, Sequence[int], int], Awaitable[int]]
"""Samples a response to a prompt: request id, token ids, seed -> number of tokens."""


def cpu_seconds(process: psutil.Process) -> float:
    """Those of user and system together."""
    times = process.cpu_times()
    return float(times.user + times.system)


async def timed(sampler: Sampler, core: psutil.Process, name: str, prompts: np.ndarray) -> tuple[float, float, float]:
    """Tokens a second, and microseconds of CPU a token: of the engine's process, of this one."""
    here = psutil.Process()
    before, started = (cpu_seconds(core), cpu_seconds(here)), time.perf_counter()
    counts = await asyncio.gather(*(sampler(f"{name}/{i}", prompt, i) for i, prompt in enumerate(prompts.tolist())))
    seconds, num_tokens = time.perf_counter() - started, sum(counts)
    spent = (cpu_seconds(core) - before[0], cpu_seconds(here) - before[1])
    return num_tokens / seconds, 1e6 * spent[0] / num_tokens, 1e6 * spent[1] / num_tokens


def started(make: Callable[[], Any]) -> tuple[Any, psutil.Process]:
    """An engine, and its core's process."""
    before = {child.pid for child in psutil.Process().children()}
    made = make()
    (core,) = (
        child
        for child in psutil.Process().children()
        if child.pid not in before and "resource_tracker" not in "".join(child.cmdline())
    )
    return made, core


async def compare(config: RolloutConfig, arguments: argparse.Namespace) -> None:
    """Prints the table."""
    from vllm import SamplingParams  # after the environment is set
    from vllm.inputs.engine import tokens_input
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    from services.rollout.engine import VllmEngine

    ours, our_core = started(lambda: VllmEngine(config))
    await ours.warm_up()
    await ours._llm.update_weight_version("1")  # samples of weights that nobody named are refused
    plain = replace(bare_arguments(config), load_format="dummy")
    bare, bare_core = started(lambda: AsyncLLM.from_engine_args(plain))
    sampling = trajectory_pb2.SamplingParams(temperature=1.0, top_p=1.0, max_tokens=arguments.tokens)

    async def by_ours(request_id: str, prompt: Sequence[int], seed: int) -> int:
        return len((await ours.sample(SampleRequest(request_id, prompt, sampling, seed))).token_ids)

    def by_bare(logprobs: int | None) -> Sampler:
        async def sample(request_id: str, prompt: Sequence[int], seed: int) -> int:
            params = SamplingParams(
                max_tokens=arguments.tokens,
                temperature=1.0,
                seed=seed,
                logprobs=logprobs,
                flat_logprobs=True,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            (final,) = [output async for output in bare.generate(tokens_input(list(prompt)), params, request_id)]
            return len(final.outputs[0].token_ids)

        return sample

    ways: dict[str, tuple[Sampler, psutil.Process]] = {
        "ours": (by_ours, our_core),
        "bare, with logprobs": (by_bare(0), bare_core),
        "bare, tokens alone": (by_bare(None), bare_core),
    }
    rng = np.random.default_rng(0)
    vocabulary = vocab_size(config.model_path)
    measured: dict[str, list[tuple[float, float, float]]] = {name: [] for name in ways}
    for number in range(arguments.rounds + 1):
        for name, (sampler, core) in ways.items():
            prompts = rng.integers(0, vocabulary, (arguments.requests, arguments.prompt))
            measured[name].append(await timed(sampler, core, f"{name}/{number}", prompts))
    print("| way | tokens/s | us of CPU a token: core | front end |\n|---|---|---|---|")
    for name, rounds in measured.items():
        rate, core_us, front_us = (median(column) for column in zip(*rounds[1:], strict=True))  # the first warms up
        print(f"| {name} | {rate:,.0f} | {core_us:.1f} | {front_us:.1f} |", flush=True)
    bare.shutdown()
    await ours.close()


def main() -> None:
    """Command line; what is left over are overrides of the configuration."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--prompt", type=int, default=32, help="tokens")
    parser.add_argument("--tokens", type=int, default=128, help="of a response")
    parser.add_argument("--rounds", type=int, default=3, help="after one that warms up")
    arguments, overrides = parser.parse_known_args()
    sized = [f"data.max_prompt_tokens={arguments.prompt}", f"sampling.max_tokens={arguments.tokens}"]
    sized.append(f"rollout.max_num_seqs={arguments.requests}")
    settings = load_settings(arguments.config, [*sized, *(each.removeprefix("--") for each in overrides)])
    config = replace(configure(settings, "rollout-0", machine_cores()), eos_token_ids=())
    os.environ.update(start_environment(config))
    asyncio.run(compare(config, arguments))


if __name__ == "__main__":
    main()
