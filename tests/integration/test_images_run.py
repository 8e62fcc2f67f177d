"""A whole run of prompts with images around twins: from the file to the engine, an evaluation beside it, and back out
of a checkpoint once the store is lost.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolecall.errors import ConfigError
from rolecall.scoring.scores import Item
from rolecall.v1 import trajectory_pb2
from services.controller.durable.in_flight import decode_prompts
from services.controller.groups.prompts import digests
from services.rollout.sampling import Sample, SampleRequest
from services.rollout.scripted import ScriptedEngine
from tests.pictures import PAD, picture, write_seeing
from tests.tiny_tokenizer import VISION_TEMPLATE, VISION_TOKENS
from tests.twins.run import LightRun, TwinRun, balance
from tests.waiting import until

pytestmark = pytest.mark.timeout(300)


class Eyes(ScriptedEngine):
    """An engine that remembers the prompts that it was shown."""

    def __init__(self) -> None:
        super().__init__(vocab_size=200, token_s=0.01)
        self.shown: list[tuple[list[int], tuple[bytes, ...]]] = []

    async def sample(self, request: SampleRequest) -> Sample:
        self.shown.append((list(request.prompt_token_ids), tuple(request.images)))
        return await super().sample(request)


def see(tmp_path: Path, light_run: LightRun, **sections: Any) -> Any:
    """A light run whose prompts show one image each, and their held-out twins two."""
    write_seeing(tmp_path / "model")
    (tmp_path / "pictures").mkdir()
    for number in range(4):
        (tmp_path / "pictures" / f"{number}.png").write_bytes(picture(24, 16, number))
    for name, marks, images in (("seen", "<image>", 1), ("held", "<image> or <image>", 2)):
        shown = [[f"pictures/{(i + j) % 4}.png" for j in range(images)] for i in range(8)]
        rows = [{"prompt": f"{marks}?", "images": files, "ground_truth": ""} for files in shown]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = {"train": str(tmp_path / "seen.jsonl"), "images_field": "images", "max_prompt_tokens": 48}
    sets = {"held": {"path": str(tmp_path / "held.jsonl"), "max_tokens": 8}}
    return light_run(
        template=VISION_TEMPLATE, more_tokens=VISION_TOKENS, data=data, evaluation={"sets": sets}, **sections
    )


async def test_images_reach_the_engine_the_rows_and_nobody_s_text(tmp_path: Path, light_run: LightRun) -> None:
    scored: list[Item] = []

    def note(item: Item) -> float:
        scored.append(item)
        return float(item.num_response_tokens % 2)

    engine = Eyes()
    async with see(tmp_path, light_run, score=note, trackers={"tensorboard": False, "num_samples_kept": None}) as run:
        await run.to_the_end("rollout-0", engine=engine)
    assert balance(run) == (12, 12, 0, 0)
    files = [picture(24, 16, number) for number in range(4)]
    assert {len(images) for _, images in engine.shown} == {1, 2}
    for ids, images in engine.shown:
        assert ids.count(PAD) == 6 * len(images)  # of 24 x 16 pixels, 8 x 8 a token
        assert set(images) <= set(files)
    assert {item.messages[-1].content for item in scored} == {"<image>?", "<image> or <image>?"}
    lines = [json.loads(line) for line in (run.settings.run.dir / "samples.jsonl").read_text().splitlines()]
    assert {line["prompt"][-1][1] for line in lines} == {"<image>?", "<image> or <image>?"}
    assert all(len(json.dumps(line)) < 2000 for line in lines)


async def test_a_rollout_with_another_image_processor_is_refused_by_file_and_remedy(
    tmp_path: Path, light_run: LightRun
) -> None:
    async with see(tmp_path, light_run) as run, run.controller():
        processor = tmp_path / "model" / "preprocessor_config.json"  # as in another copy of the directory
        processor.write_text(json.dumps(json.loads(processor.read_text()) | {"image_mean": [0.5, 0.5, 0.5]}))
        async with run.rollout("rollout-0", engine=Eyes()):
            with pytest.raises(ConfigError, match=r"rollout-0 makes other pixels .* another preprocessor_config\.json"):
                await asyncio.wait_for(run.memberships["rollout-0"].joined(), 30)


async def test_a_role_whose_settings_show_no_images_is_refused_by_its_settings(
    tmp_path: Path, light_run: LightRun
) -> None:
    async with see(tmp_path, light_run) as run, run.controller():
        run.settings = run.settings.model_copy(
            update={"data": run.settings.data.model_copy(update={"images_field": None})}
        )
        async with run.rollout("rollout-0", engine=Eyes()):
            with pytest.raises(ConfigError, match="by the CONFIG of the controller alone, not by that of rollout-0"):
                await asyncio.wait_for(run.memberships["rollout-0"].joined(), 30)


def noted(run: TwinRun) -> list[trajectory_pb2.Prompt]:
    """The prompts that the newest checkpoint says were in flight, some at least."""
    prompts = list(decode_prompts(run.newest().untrained))
    assert prompts
    return prompts


async def test_prompts_in_flight_come_back_with_their_images_when_the_store_is_lost(
    tmp_path: Path, light_run: LightRun
) -> None:
    stale = {"groups_per_batch": 4, "max_staleness": 1}
    async with see(tmp_path, light_run, algorithm=stale, run={"num_steps": 4}) as run:
        async with run.rollout("rollout-0", engine=Eyes()), run.controller():
            await until(lambda: run.checkpoints.latest() is not None)
        in_flight = [(np.frombuffer(one.token_ids, "<i4").tolist(), list(one.images)) for one in noted(run)]
        assert {len(file) for _, images in in_flight for file in images} == {32}, "a manifest holds no files"
        run.lose_the_store()
        run.actor.restart()
        engine = Eyes()
        await run.to_the_end("rollout-0", engine=engine)
    assert balance(run)[1] == 16
    shown = [(ids, digests(images)) for ids, images in engine.shown]
    assert all(prompt in shown for prompt in in_flight)
    assert all(ids.count(PAD) == 6 * len(images) for ids, images in shown)


async def test_an_image_in_flight_that_has_changed_since_the_checkpoint_ends_the_run_by_name(
    tmp_path: Path, light_run: LightRun
) -> None:
    stale = {"groups_per_batch": 4, "max_staleness": 1}
    async with see(tmp_path, light_run, algorithm=stale, run={"num_steps": 4}) as run:
        async with run.rollout("rollout-0", engine=Eyes()), run.controller():
            await until(lambda: run.checkpoints.latest() is not None)
        assert noted(run)
        for number in range(4):
            (tmp_path / "pictures" / f"{number}.png").write_bytes(picture(24, 16, 10 + number))
        run.lose_the_store()
        run.actor.restart()
        with pytest.raises(ConfigError, match=r"seen\.jsonl, line \d: its images \(.*\d\.png\) are not those"):
            await run.to_the_end("rollout-0", engine=Eyes())
