"""Bare vLLM on a run's own prompts: an LLM or AsyncLLM in this process, started with the rollout's arguments, asked for
batches as the run asks for them.

What is not there: weights over the channel (it loads the model's files), the store, gRPC, the pull loop, rows. Prints
one line of JSON: tokens and seconds of each batch after the first `--warmup`, and the number of threads. The prompts,
their order, G, the sampling parameters and the base seeds are the run's.
"""

import argparse
import asyncio
import dataclasses
import json
import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from rolecall.data.dataset import load_training_prompts
from rolecall.data.images.prompts import PromptEncoder
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.settings import RunSettings, load_settings
from rolecall.trajectory import seed_of
from rolecall.v1 import trajectory_pb2
from services.controller.groups.prompts import PromptRenderer, PromptSequence
from services.rollout.config import RolloutConfig, configure, machine_cores, start_environment


def offline(settings: RunSettings, config: RolloutConfig, num_batches: int) -> Iterator[tuple[int, float]]:
    """(tokens, seconds) of each batch of an LLM, vLLM's own way to sample many prompts."""
    from vllm import LLM, EngineArgs  # after the environment is set

    arguments = bare_arguments(config)
    llm = LLM(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(EngineArgs)})
    prompts = training_prompts(settings)
    for batch in range(num_batches):
        requests = batch_requests(settings, config, prompts, batch)
        started = time.perf_counter()
        outputs = llm.generate(
            [{"prompt_token_ids": prompt} for prompt, _ in requests], [params for _, params in requests], use_tqdm=False
        )
        seconds = time.perf_counter() - started
        yield sum(len(response.token_ids) for output in outputs for response in output.outputs), seconds


async def serving(settings: RunSettings, config: RolloutConfig, num_batches: int) -> list[tuple[int, float]]:
    """Measures as `offline` does, with an AsyncLLM, what servers are built on and the rollout is."""
    from vllm.v1.engine.async_llm import AsyncLLM

    llm = AsyncLLM.from_engine_args(bare_arguments(config))

    async def sample(request_id: str, prompt: list[int], params: Any) -> int:
        (final,) = [output async for output in llm.generate({"prompt_token_ids": prompt}, params, request_id)]
        return sum(len(response.token_ids) for response in final.outputs)

    prompts = training_prompts(settings)
    measured = []
    try:
        for batch in range(num_batches):
            requests = batch_requests(settings, config, prompts, batch)
            started = time.perf_counter()
            tokens = await asyncio.gather(
                *(sample(f"{batch}/{index}", *request) for index, request in enumerate(requests))
            )
            measured.append((sum(tokens), time.perf_counter() - started))
    finally:
        llm.shutdown()
    return measured


def bare_arguments(config: RolloutConfig) -> Any:
    """The rollout's arguments, with weights from disk and no way to change them, and vLLM's own scheduler."""
    from services.rollout.vllm.arguments import engine_args

    return dataclasses.replace(
        engine_args(config),
        load_format="auto",
        weight_transfer_config=None,
        worker_extension_cls="",
        scheduler_cls=None,
        scheduling_policy="fcfs",
    )


def batch_requests(
    settings: RunSettings, config: RolloutConfig, prompts: Iterator[list[int]], batch: int
) -> list[tuple[list[int], Any]]:
    """(token ids, sampling parameters) of each prompt of batch number `batch`."""
    first = batch * settings.algorithm.groups_per_batch
    taken = islice(prompts, settings.algorithm.groups_per_batch)
    return [(prompt, group_params(settings, config, gid, prompt)) for gid, prompt in enumerate(taken, first)]


def training_prompts(settings: RunSettings) -> Iterator[list[int]]:
    """Token ids of the run's prompts in order of admission, without end."""
    renderer = PromptRenderer(PromptEncoder(ChatTokenizer(settings.model.path)), settings.data.max_prompt_tokens)
    rows = load_training_prompts(settings)
    sequence = PromptSequence(rows, renderer, seed=settings.run.seed, shuffle=settings.data.shuffle)
    while True:
        data = sequence.next().token_ids
        yield [int.from_bytes(data[start : start + 4], "little") for start in range(0, len(data), 4)]


def group_params(settings: RunSettings, config: RolloutConfig, gid: int, prompt: list[int]) -> Any:
    """The rollout's sampling parameters for one response, and n = G of them."""
    from services.rollout.engine import sampling_params
    from services.rollout.sampling import SampleRequest

    section = settings.sampling
    sampling = trajectory_pb2.SamplingParams(
        temperature=section.temperature, top_p=1.0, max_tokens=section.max_tokens, stop_token_ids=section.stop_token_ids
    )
    params = sampling_params(
        SampleRequest(str(gid), prompt, sampling, seed_of(settings.run.seed, gid, 0)), config.eos_token_ids
    )
    params.n = section.num_responses
    return params


def main() -> None:
    """Command line; what is left over are overrides of the configuration."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--engine", choices=["LLM", "AsyncLLM"], default="LLM")
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=2)
    arguments, overrides = parser.parse_known_args()
    settings = load_settings(arguments.config, [override.removeprefix("--") for override in overrides])
    config = configure(settings, "rollout-0", machine_cores())
    os.environ.update(start_environment(config))
    if arguments.engine == "LLM":
        measured = list(offline(settings, config, arguments.batches))
    else:
        measured = asyncio.run(serving(settings, config, arguments.batches))
    tokens, seconds = zip(*measured[arguments.warmup :], strict=True)
    print(
        json.dumps({"tokens": tokens, "seconds": seconds, "threads": len(config.cores[0]) if config.cores else None}),
        flush=True,
    )


if __name__ == "__main__":
    main()
