"""Under which load of weights an engine asks vLLM for a prompt with images: all of the engine but vLLM's own part."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.engine.exceptions import EngineDeadError

from rolecall.errors import GenerationError, WorkerLostError
from rolecall.settings import RunSettings
from rolecall.v1 import trajectory_pb2
from services.rollout import engine
from services.rollout.config import configure
from services.rollout.sampling import PauseMode, SampleRequest
from tests.pictures import picture
from tests.smallest import smallest_tree
from tests.tiny_models import write_qwen3

PAD = 5


class FakeLlm:
    """An AsyncLLM whose renderer takes until it is told, whose workers die at a load, and that notes what is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, list[str]]] = []
        self.rendering, self.rendered = asyncio.Event(), asyncio.Event()
        self.model_config = SimpleNamespace(head_dtype=torch.float32)
        self.logger_manager = SimpleNamespace(stat_loggers=[SimpleNamespace(begin_load=lambda: None)])
        self.renderer = self.engine_core = self

    async def process_for_engine_async(self, prompt: Any, arrival_time: float) -> dict[str, Any]:
        self.rendering.set()
        await self.rendered.wait()
        names = prompt["multi_modal_uuids"]
        return {"prompt_token_ids": [1, PAD, PAD, 2], "mm_hashes": names, "arrival_time": arrival_time}

    async def generate(self, prompt: Any, *args: Any, **options: Any) -> AsyncIterator[None]:
        self.asked.append((prompt["cache_salt"], [name.partition("/")[2] for name in prompt["mm_hashes"]["image"]]))
        for nothing in tuple[None, ...]():
            yield nothing

    async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
        self.mode = mode

    async def collective_rpc(self, *args: Any, **options: Any) -> None:
        raise EngineDeadError


async def test_a_prompt_whose_images_are_processed_over_a_load_is_of_the_newer_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm = FakeLlm()
    monkeypatch.setattr(engine, "AsyncLLM", SimpleNamespace(from_vllm_config=lambda *args, **options: llm))
    tree = smallest_tree(
        tmp_path,
        model={"path": str(write_qwen3(tmp_path / "model", heads=2, kv_heads=1))},
        rollout={"pause_mode": "keep_cache"},
        algorithm={"groups_per_batch": 2, "correction": {"weight": {"kind": "token", "cap": 2}}},
    )
    config = configure(RunSettings.model_validate(tree), "rollout-0", range(2))
    rollout = engine.VllmEngine(replace(config, image_token_id=PAD))

    async def load() -> None:
        await rollout.pause(PauseMode.KEEP_CACHE)
        with pytest.raises(WorkerLostError):
            await rollout.receive(1, 1, 10.0)

    sampling = trajectory_pb2.SamplingParams(temperature=1, top_p=1, max_tokens=4)
    request = SampleRequest("7/0", (1, PAD, PAD, 2), sampling, 1, (picture(8, 16),))
    await load()
    sampled = asyncio.create_task(rollout.sample(request))
    await llm.rendering.wait()
    await load()
    llm.rendered.set()
    with pytest.raises(GenerationError, match="without an output"):
        await sampled
    assert llm.asked == [("2", ["2"])]
