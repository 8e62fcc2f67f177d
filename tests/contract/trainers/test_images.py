"""What trainers and references promise of prompts that show images, over a real connection, a real store and a tiny
real model of text and images.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rolecall.columns import IMAGES
from rolecall.errors import ConfigError, InvalidInputError
from rolecall.settings import RunSettings
from rolecall.v1.training_pb2 import ComputeColumnRequest, TrainRequest
from rolecall.v1.trajectory_pb2 import Images, SegmentImages
from rolecall.wire import Array
from tests.fixtures_store import StoreUnderTest
from tests.tiny_models import write_qwen3, write_vision
from tests.twins.served import (
    Batches,
    MakeRun,
    served_actor,
    served_critic,
    served_reference,
    settings_tree,
    train,
    values_of,
)
from tests.vision_rig import OTHER_WIDE, SQUARE, TALL, WIDE, make_row, oracle_logprobs, oracle_model

PROMPTS: tuple[list[bytes], ...] = ([WIDE], [], [SQUARE, TALL])
"""The images that the groups show, in turn."""


@dataclass
class ShownBatches(Batches):
    """Batches whose groups show images, with the true logprobs."""

    def _row(self, rng: np.random.Generator) -> dict[str, Array]:
        gid = rng.bit_generator.seed_seq.entropy  # type: ignore[attr-defined]  # what it was made of
        row = make_row(PROMPTS[gid % len(PROMPTS)], rng.integers(10, 250, int(rng.integers(2, 9))).tolist())
        with torch.no_grad():
            logprobs = oracle_logprobs(oracle_model(self.model), self.model, row, self.temperature).numpy()
        versions = np.where(row["response_mask"], self.policy_version, -1).astype(np.int32)
        kept = {name: row[name] for name in ("token_ids", "response_mask", IMAGES)}
        return {**kept, "rollout_logprobs": logprobs, "policy_versions": versions}


def data_tree(folder: Path) -> dict[str, Any]:
    """Prompts that may show images."""
    return {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 48, "images_field": "images"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision(tmp_path_factory.mktemp("model") / "policy", "qwen2_5_vl")


@pytest.fixture
def make_run(store: StoreUnderTest, model: Path, tmp_path: Path) -> MakeRun:
    def make(**sections: Any) -> RunSettings:
        return RunSettings.model_validate(settings_tree(store, model, tmp_path, data=data_tree(tmp_path), **sections))

    return make


@pytest.fixture
def batches(store: StoreUnderTest, model: Path) -> ShownBatches:
    return ShownBatches(store, model)


async def test_an_actor_agrees_with_the_sampler_trains_and_publishes(
    store: StoreUnderTest, make_run: MakeRun, batches: ShownBatches
) -> None:
    settings = make_run(algorithm={"groups_per_batch": 4, "num_minibatches": 2})
    async with served_actor(settings, store) as (_, actor):
        rows = [row for group in batches.sampled(3) for row in group.rows]
        await actor.ComputeLogprobs(ComputeColumnRequest(ctl=store.ledger.ctl, rows=rows), timeout=60)
        batch = batches.sealed(0)
        result = await train(actor, TrainRequest(ctl=store.ledger.ctl, step=0, digest=batch.digest))
    for read in store.rows.read(rows, ["old_logprobs", "rollout_logprobs"]):
        np.testing.assert_allclose(read["old_logprobs"], read["rollout_logprobs"], atol=1e-4)
    values = values_of(result)
    assert values["actor/grad_norm"] > 0
    assert values["actor/mismatch_all_max"] < 1e-4


async def test_segments_of_a_row_show_its_images_each(
    store: StoreUnderTest, make_run: MakeRun, batches: ShownBatches
) -> None:
    batches.num_segments = 2
    async with served_actor(make_run(), store) as (_, actor):
        rows = [row for group in batches.sampled(3) for row in group.rows]
        await actor.ComputeLogprobs(ComputeColumnRequest(ctl=store.ledger.ctl, rows=rows), timeout=60)
    for read in store.rows.read(rows, ["old_logprobs", "rollout_logprobs"]):
        np.testing.assert_allclose(read["old_logprobs"], read["rollout_logprobs"], atol=1e-4)


@pytest.mark.parametrize("token_budget", [64, 512])
async def test_segments_that_show_unlike_images_are_computed_each_with_its_own(
    store: StoreUnderTest, make_run: MakeRun, batches: ShownBatches, token_budget: int
) -> None:
    """As an agent's are. Two have the same tokens and images of as many of them; one shows none of the row's."""
    segments = [make_row(shown, [80, 81]) for shown in ([OTHER_WIDE], [WIDE], [], [SQUARE, WIDE])]
    starts = np.cumsum([len(segment["token_ids"]) for segment in segments]).tolist()
    images = Images(files=[WIDE, OTHER_WIDE, SQUARE], segments=[SegmentImages(files=each) for each in SHOWS])
    row = {name: np.concatenate([each[name] for each in segments]) for name in ("token_ids", "response_mask")}
    row[IMAGES] = np.frombuffer(images.SerializeToString(), np.uint8)
    async with served_actor(make_run(actor={"token_budget": token_budget}), store) as (_, actor):
        (good,) = (group.rows[0] for group in batches.sampled(1))
        ref, (meta,) = store.rows.ref("77/0", "t", starts[-1], starts[:-1]), store.rows.read_meta([good])
        store.rows.stage(ref, row, meta, 60)
        await actor.ComputeLogprobs(ComputeColumnRequest(ctl=store.ledger.ctl, rows=[ref]), timeout=60)
    (read,) = store.rows.read([ref], ["old_logprobs"])
    model = oracle_model(batches.model)
    with torch.no_grad():
        alone = [oracle_logprobs(model, batches.model, each, meta.sampling.temperature).numpy() for each in segments]
    sampled = row["response_mask"] == 1
    np.testing.assert_allclose(read["old_logprobs"][sampled], np.concatenate(alone)[sampled], atol=1e-4)
    assert np.abs(alone[0] - alone[1]).max() > 0.01, "another image would be seen"


SHOWS = [[1], [0], [], [2, 0]]
"""What each of those segments shows."""


async def test_a_reference_and_a_critic_see_them_too(
    store: StoreUnderTest, make_run: MakeRun, batches: ShownBatches
) -> None:
    algorithm = {"groups_per_batch": 4, "kl": {"reference": "ref", "kl_coef": 0.1}, "advantage": {"kind": "gae"}}
    settings = make_run(algorithm=algorithm, references={"ref": {"token_budget": 64}}, critic={"token_budget": 64})
    rows = [row for group in batches.sampled(3) for row in group.rows]
    request = ComputeColumnRequest(ctl=store.ledger.ctl, rows=rows)
    async with served_reference(settings, "ref", store) as reference:
        await reference.ComputeLogprobs(request, timeout=60)
    async with served_critic(settings, store) as (_, critic):
        await critic.ComputeValues(request, timeout=60)
        batch = batches.sealed(0)
        result = await train(critic, TrainRequest(ctl=store.ledger.ctl, step=0, digest=batch.digest))
    for read in store.rows.read(rows, ["ref/logprobs", "rollout_logprobs", "values"]):
        np.testing.assert_allclose(read["ref/logprobs"], read["rollout_logprobs"], atol=1e-4)
        assert read["values"].any()
    assert values_of(result)["critic/grad_norm"] > 0


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([b"no image"], "an image cannot be read"),
        ([SQUARE], "image 1 of 1 has 9 features and 10 tokens that show it"),
        ([WIDE, WIDE], "a row has 2 images, and its tokens show 1"),
    ],
)
async def test_an_image_that_is_not_what_the_tokens_say_is_refused_and_the_actor_goes_on(
    store: StoreUnderTest, make_run: MakeRun, batches: ShownBatches, files: list[bytes], message: str
) -> None:
    async with served_actor(make_run(), store) as (_, actor):
        (good,) = (group.rows[0] for group in batches.sampled(1))
        row = {**make_row([WIDE], [80]), IMAGES: np.frombuffer(Images(files=files).SerializeToString(), np.uint8)}
        bad, (meta,) = store.rows.ref("77/0", "t", row["token_ids"].size), store.rows.read_meta([good])
        store.rows.stage(bad, {name: row[name] for name in ("token_ids", "response_mask", IMAGES)}, meta, 60)
        with pytest.raises(InvalidInputError, match=message):
            await actor.ComputeLogprobs(ComputeColumnRequest(ctl=store.ledger.ctl, rows=[bad]), timeout=60)
        await actor.ComputeLogprobs(ComputeColumnRequest(ctl=store.ledger.ctl, rows=[good]), timeout=60)
    assert store.rows.hold([good], "old_logprobs")


async def test_a_model_of_text_is_refused_where_prompts_show_images(store: StoreUnderTest, tmp_path: Path) -> None:
    text = write_qwen3(tmp_path / "text")
    settings = RunSettings.model_validate(settings_tree(store, text, tmp_path, data=data_tree(tmp_path)))
    with pytest.raises(ConfigError, match="is no model that sees images"):
        async with served_actor(settings, store):
            pass
