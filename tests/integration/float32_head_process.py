"""A replica's own vLLM on a model directory: samples and writes one JSON object with the ids and logprobs of each
response.

python -m tests.integration.float32_head_process CONFIGURATION
"""

import asyncio
import dataclasses
import json
import os
import sys
from pathlib import Path

from rolecall.settings import load_settings
from services.rollout.config import configure, machine_cores, start_environment

NUM_TOKENS = 32
PROMPTS = [[1, 60 + i, 61, 70] for i in range(8)]


async def main(config_path: Path) -> None:
    """The weights come from the directory, everything else is a replica's."""
    config = configure(load_settings(config_path), "rollout-0", machine_cores())
    os.environ.update(start_environment(config))  # before vLLM is imported

    from vllm import SamplingParams
    from vllm.inputs.engine import tokens_input
    from vllm.v1.engine.async_llm import AsyncLLM

    from services.rollout.scheduler import logprobs_of
    from services.rollout.vllm.arguments import engine_args

    llm = AsyncLLM.from_engine_args(dataclasses.replace(engine_args(config), load_format="auto"))
    params = SamplingParams(
        max_tokens=NUM_TOKENS, temperature=1.0, seed=1, logprobs=0, ignore_eos=True, detokenize=False
    )

    async def sample(index: int) -> tuple[list[int], list[float]]:
        async for output in llm.generate(tokens_input(prompt_token_ids=PROMPTS[index]), params, request_id=str(index)):
            last = output
        return list(last.outputs[0].token_ids), logprobs_of(last).tolist()

    await sample(0)  # alone first, as in a replica's warm-up: so few tokens need AMX of processors that have it
    responses = await asyncio.gather(*(sample(index) for index in range(len(PROMPTS))))
    block_size = llm.vllm_config.cache_config.block_size
    answer = {"head_dtype": str(llm.model_config.head_dtype), "block_size": block_size, "responses": responses}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    llm.shutdown()


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
