"""Bare vLLM on a run's own prompts: one LLM in this process, started with the rollout's arguments, asked for batches as the run asks for them.

What is not there: weights over the channel (it loads the model's files), the store, gRPC, the pull loop, rows. Prints one line of JSON: tokens and seconds of
each batch after the first `--warmup`, and the number of threads. The prompts, their order, G, the sampling parameters and the base seeds are the run's.
"""

import argparse
import dataclasses
import json
import os
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from rolecall.settings import RunSettings, load_settings
from rolecall.tokenizer import ChatTokenizer
from rolecall.trajectory import seed_of
from rolecall.v1 import trajectory_pb2
from services.controller.prompts import PromptRenderer, PromptSequence, load_prompts
from services.rollout.config import RolloutConfig, configure, machine_cores, start_environment


def measure(settings: RunSettings, config: RolloutConfig, num_batches: int, num_warmup: int) -> dict[str, Any]:
    """Samples `num_batches` batches, one after the other."""
    from vllm import LLM, EngineArgs  # after the environment is set

    from services.rollout.engine import engine_args

    ours = engine_args(config)
    arguments = {field.name: getattr(ours, field.name) for field in dataclasses.fields(EngineArgs)}
    llm = LLM(**{**arguments, "load_format": "auto", "weight_transfer_config": None, "worker_extension_cls": ""})
    prompts = training_prompts(settings)
    tokens, seconds = [], []
    for batch in range(num_batches):
        requests, params = [], []
        for offset, prompt in enumerate(islice(prompts, settings.algorithm.groups_per_batch)):
            gid = batch * settings.algorithm.groups_per_batch + offset
            requests.append({"prompt_token_ids": prompt})
            params.append(group_params(settings, config, gid, prompt))
        started = time.perf_counter()
        outputs = llm.generate(requests, params, use_tqdm=False)
        seconds.append(time.perf_counter() - started)
        tokens.append(sum(len(response.token_ids) for output in outputs for response in output.outputs))
    return {"tokens": tokens[num_warmup:], "seconds": seconds[num_warmup:]}


def training_prompts(settings: RunSettings) -> Iterator[list[int]]:
    """Token ids of the run's prompts in order of admission, without end."""
    renderer = PromptRenderer(ChatTokenizer(settings.model.path), settings.data.max_prompt_tokens)
    sequence = PromptSequence(load_prompts(settings.data.train, settings.data), renderer, seed=settings.run.seed, shuffle=settings.data.shuffle)
    while True:
        data = sequence.next().token_ids
        yield [int.from_bytes(data[start : start + 4], "little") for start in range(0, len(data), 4)]


def group_params(settings: RunSettings, config: RolloutConfig, gid: int, prompt: list[int]) -> Any:
    """The rollout's sampling parameters for one response, and n = G of them."""
    from services.rollout.engine import sampling_params
    from services.rollout.sampling import SampleRequest

    section = settings.sampling
    sampling = trajectory_pb2.SamplingParams(temperature=section.temperature, top_p=1.0, max_tokens=section.max_tokens, stop_token_ids=section.stop_token_ids)
    params = sampling_params(SampleRequest(str(gid), prompt, sampling, seed_of(settings.run.seed, gid, 0), ""), config.eos_token_ids)
    params.n = section.num_responses
    return params


def main() -> None:
    """Command line; what is left over are overrides of the configuration."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config", type=Path)
    parser.add_argument("--batches", type=int, default=12)
    parser.add_argument("--warmup", type=int, default=2)
    arguments, overrides = parser.parse_known_args()
    settings = load_settings(arguments.config, [override.removeprefix("--") for override in overrides])
    config = configure(settings, "rollout-0", machine_cores())
    os.environ.update(start_environment(config))
    result = measure(settings, config, arguments.batches, arguments.warmup)
    print(json.dumps({**result, "threads": len(config.cores[0]) if config.cores else None}), flush=True)


if __name__ == "__main__":
    main()
