"""A program that samples with a real vLLM twice, the second time over a sleep, and prints both as JSON.

On CPUs vLLM's workers have nothing to give back, so their memory stays; its scheduler does all that it does on a GPU.
"""

import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

from rolecall.settings import RunSettings
from rolecall.v1 import trajectory_pb2
from services.rollout.config import configure, start_environment
from services.rollout.sampling import PauseMode, SampleRequest
from services.rollout.vllm.sleeper import Sleeper
from tests.smallest import smallest_tree
from tests.tiny_models import write_qwen3

NUM_RESPONSES, NUM_PLACES, NUM_TOKENS = 6, 4, 200
"""More responses than places: some have yet to begin when the engine falls asleep."""


class OnCpus:
    """The calls of vLLM that make up a sleep, of a machine with memory enough."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self.sleep, self.wake_up = llm.sleep, llm.wake_up

    async def collective_rpc(self, method: str) -> list[Any]:
        """Calls every worker, but for the memory of a device that is not there."""
        return [2**40] if method == "free_bytes" else await self._llm.collective_rpc(method)


async def main(folder: Path) -> dict[str, Any]:
    """Returns tokens and logprobs of both turns, and how many tokens had been sampled at each point of the sleep."""
    tree = smallest_tree(
        folder,
        model={"path": str(write_qwen3(folder / "model", heads=2, kv_heads=1)), "dtype": "float32"},
        sampling={"num_responses": 2, "max_tokens": NUM_TOKENS},
        rollout={"max_num_seqs": NUM_PLACES, "kv_cache_bytes": 64 * 2**20},
    )
    config = configure(RunSettings.model_validate(tree), "rollout-0", range(2))
    os.environ.update(start_environment(config))
    from services.rollout.engine import VllmEngine

    engine = VllmEngine(config)
    engine._sleeper = Sleeper(OnCpus(engine._llm), engine._alive)
    await engine.warm_up()
    await engine._llm.update_weight_version("1")  # else the weights that arrive say it
    sampling = trajectory_pb2.SamplingParams(temperature=1.0, top_p=1.0, max_tokens=NUM_TOKENS)

    def begin(turn: int) -> "list[asyncio.Task[Any]]":
        requests = [SampleRequest(f"{turn}/{i}", [1, 60 + i, 61, 62], sampling, i) for i in range(NUM_RESPONSES)]
        return [asyncio.create_task(engine.sample(request)) for request in requests]

    async def ended(tasks: "list[asyncio.Task[Any]]") -> list[list[list[float]]]:
        samples = await asyncio.gather(*tasks)
        return [[list(sample.token_ids), sample.logprobs.tolist()] for sample in samples]

    whole = await ended(begin(1))
    tasks = begin(2)
    while engine.use.num_running < NUM_PLACES:
        await asyncio.sleep(0.005)
    for _ in range(2):
        await engine.pause(PauseMode.KEEP)
        await engine.sleep(2)
    asleep = [task.done() for task in tasks]
    await asyncio.sleep(0.5)
    still = [task.done() for task in tasks]
    await engine.wake_up()
    await engine.probe([1, 60, 61], 2)
    await engine.resume()
    kept = await ended(tasks)
    await engine.close()
    return {"whole": whole, "kept": kept, "asleep": asleep, "still": still, "preempted": engine.use.num_preemptions}


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asyncio.run(main(Path(sys.argv[1])))) + "\n")
