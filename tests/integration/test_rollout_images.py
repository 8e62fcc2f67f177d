"""A real rollout process with vLLM and a model of text and images: weights over the channel, tokens and logprobs
against transformers, and no feature of older weights under newer ones.
"""

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoImageProcessor, AutoModelForImageTextToText

from rolecall.columns import IMAGES
from rolecall.data.images.files import open_image
from rolecall.data.images.tokens import read_visual_tokens
from rolecall.data.model.adapters import with_modules
from rolecall.settings import ALL_LINEAR, LoraSection
from rolecall.trajectory import SAMPLED_COLUMNS, rows_of
from rolecall.v1 import rollout_pb2, trajectory_pb2, weights_pb2
from rolecall.wire import Array, decode_tensor
from tests.integration.rollout_process import PROBE, RolloutProcess, group, rollout_process
from tests.pictures import picture
from tests.tiny_models import VisionFamily, write_vision
from tests.vision_rig import gap_size, most_gap, sampled_dtype, sampled_weights

pytestmark = [pytest.mark.vision, pytest.mark.timeout(300)]

FAMILIES: tuple[VisionFamily, ...] = get_args(VisionFamily)


class Seen:
    """A replica with a model that sees, and two versions of its weights by transformers."""

    def __init__(self, rollout: RolloutProcess, paths: list[Path], family: str) -> None:
        self.dtype = getattr(torch, sampled_dtype(family))
        self.rollout, self.paths, self.family = rollout, paths, family
        tokens = read_visual_tokens(paths[0])
        assert tokens is not None
        self.tokens = tokens
        self.processor = AutoImageProcessor.from_pretrained(paths[0])
        read = AutoModelForImageTextToText.from_pretrained
        self.models = [read(path, dtype=self.dtype).float().eval() for path in paths]
        self.weights = [sampled_weights(path, family) for path in paths]

    def prompt(self, images: list[bytes], tail: int = 70) -> trajectory_pb2.Prompt:
        """A prompt that shows the images, with text between them."""
        start, end, pad = self.tokens.token_id - 2, self.tokens.token_id - 1, self.tokens.token_id
        ids = [1, 50]
        for place in range(len(images)):
            ids += [start, pad, end, 60 + place]
        numbers = [self.tokens.number(*open_image(image).size) for image in images]
        ids = self.tokens.expanded([*ids, tail], numbers)
        return trajectory_pb2.Prompt(uid="1", token_ids=np.array(ids, "<i4").tobytes(), images=images)

    @torch.no_grad()
    def logprobs(self, version: int, ids: list[int], images: list[bytes], temperature: float = 1.0) -> Array:
        """float32 [T] of transformers under version 0 or 1."""
        row = torch.tensor([ids])
        seen: dict[str, Any] = {}
        if images:
            pixels = self.processor(images=[open_image(image) for image in images], return_tensors="pt")
            kinds = (row == self.tokens.token_id).int()
            seen = {**pixels, "mm_token_type_ids": kinds}
        logits = self.models[version](input_ids=row, **seen).logits[0].float() / temperature
        chosen = logits.log_softmax(-1)[:-1].gather(1, row[0, 1:, None])[:, 0]
        whole: Array = np.concatenate([[0.0], chosen.numpy()]).astype(np.float32)
        return whole

    def generate(self, prompt: trajectory_pb2.Prompt, **more: Any) -> list[rollout_pb2.GenerateResponse]:
        sampling = trajectory_pb2.SamplingParams(temperature=1.0, top_p=1.0, max_tokens=12)
        request = rollout_pb2.GenerateRequest(
            id="eval/0/heldout/1", prompt=prompt, num_responses=4, sampling=sampling, seed=3, **more
        )
        return list(self.rollout.stub.Generate(request, timeout=120))

    def gap(self, version: int, prompt: trajectory_pb2.Prompt, responses: list[rollout_pb2.GenerateResponse]) -> float:
        """How far the sampler's logprobs are from those of transformers."""
        ids, images, gaps = np.frombuffer(prompt.token_ids, "<i4").tolist(), list(prompt.images), list[Array]()
        for response in responses:
            said = np.frombuffer(response.response_token_ids, "<i4").tolist()
            if self.tokens.token_id in said:  # transformers would look for its image
                continue
            expected = self.logprobs(version, ids + said, images)[len(ids) :]
            gaps.append(np.frombuffer(response.response_logprobs, "<f4") - expected)
        return self.size(np.concatenate(gaps)) if gaps else 0.0

    def size(self, gaps: Array) -> float:
        return gap_size(gaps, self.family)

    @property
    def most(self) -> float:
        return most_gap(self.family)


@pytest.fixture(scope="module", params=FAMILIES)
def seen(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """One process for the whole file; its tests run in order."""
    family: VisionFamily = request.param
    directory = tmp_path_factory.mktemp(family)
    paths = [write_vision(directory / f"model-{seed}", family, seed=seed) for seed in (0, 1)]
    sections: dict[str, Any] = {
        "data": {"images_field": "images"},
        "rollout": {"pause_mode": "keep_cache", "max_num_seqs": 32, "kv_cache_bytes": 64 * 2**20},
        "algorithm": {"correction": {"weight": {"kind": "token", "cap": 2}}},
        "model": {"dtype": sampled_dtype(family)},
    }
    with rollout_process(directory, paths[0], auto_class=AutoModelForImageTextToText, **sections) as running:
        yield Seen(running, paths, family)


def test_every_weight_of_both_towers_arrives_and_the_probe_agrees(seen: Seen) -> None:
    seen.rollout.weights = seen.weights[0]
    seen.rollout.open_epoch()
    sent, received = seen.rollout.publish()
    assert received.digest == sent.digest
    assert {item.name: item.value for item in received.fingerprints} == sent.fingerprints
    assert any("visual" in name for name in sent.fingerprints)
    probe = decode_tensor(received.probe.logprobs, "probe")
    assert seen.size(probe - seen.logprobs(0, PROBE, [])) < seen.most


@pytest.mark.parametrize("sizes", [[(36, 20)], [(36, 20), (32, 32)], []], ids=["one", "two", "none"])
def test_responses_to_images_have_the_logprobs_of_transformers(seen: Seen, sizes: list[tuple[int, int]]) -> None:
    prompt = seen.prompt([picture(*size, seed) for seed, size in enumerate(sizes)])
    responses = seen.generate(prompt)
    assert seen.gap(0, prompt, responses) < seen.most
    assert all(not response.meta.prompt.images for response in responses)


def test_another_image_of_the_same_size_gives_another_response(seen: Seen) -> None:
    first, second = (seen.prompt([picture(36, 20, seed)]) for seed in (0, 1))
    responses = seen.generate(first)
    assert seen.gap(0, second, seen.generate(second)) < seen.most
    assert seen.gap(0, second, responses) > 0.1


def test_a_placeholder_that_was_sampled_is_a_token_like_any_other(seen: Seen) -> None:
    pad = seen.tokens.token_id
    prompt = seen.prompt([picture(36, 20, 0)])
    prompt.token_ids += np.array([pad, pad, 71, pad], "<i4").tobytes()
    assert len(seen.generate(prompt)) == 4, "vLLM has as many tokens as the prompt, or the request would have failed"


def test_committed_rows_hold_the_images(seen: Seen) -> None:
    files = [picture(36, 20, 5), picture(8, 24, 6)]
    for gid, images in enumerate([files, []]):
        asked = group(gid, [1], 4, temperature=1.0)
        asked.prompt.CopyFrom(seen.prompt(images))
        assert seen.rollout.ledger.admit(asked, b"")
    committed: list[trajectory_pb2.CommittedGroup] = []
    deadline = time.monotonic() + 60
    while len(committed) < 2 and time.monotonic() < deadline:
        committed = [one for _, one in seen.rollout.ledger.read_committed("0", 10, 0.5)]
    for one in sorted(committed, key=lambda one: one.gid):
        shown = [files, []][one.gid]
        for row, meta in zip(
            seen.rollout.rows.read(rows_of(one), [*SAMPLED_COLUMNS, IMAGES]),
            seen.rollout.rows.read_meta(rows_of(one)),
            strict=True,
        ):
            assert list(trajectory_pb2.Images.FromString(row[IMAGES].tobytes()).files) == shown
            assert not meta.prompt.images
            ids, mask = row["token_ids"].tolist(), row["response_mask"] == 1
            if seen.tokens.token_id not in ids[meta.num_prompt_tokens :]:
                assert seen.size((row["rollout_logprobs"] - seen.logprobs(0, ids, shown))[mask]) < seen.most


@pytest.mark.parametrize(
    "pause_mode", [rollout_pb2.PAUSE_MODE_KEEP, rollout_pb2.PAUSE_MODE_KEEP_CACHE, rollout_pb2.PAUSE_MODE_ABORT]
)
def test_nothing_that_older_weights_saw_is_used_under_newer_ones(seen: Seen, pause_mode: int) -> None:
    prompt = seen.prompt([picture(36, 20, 0), picture(32, 32, 1)])
    seen.generate(prompt)
    version = seen.rollout.version % 2
    seen.rollout.weights = seen.weights[version]
    seen.rollout.publish(pause_mode=pause_mode)
    responses = seen.generate(prompt)
    assert seen.gap(version, prompt, responses) < seen.most
    assert seen.gap(1 - version, prompt, responses) > 0.1


def test_groups_kept_over_a_publish_see_their_images_by_the_weights_that_they_go_on_with(seen: Seen) -> None:
    files = [picture(36, 20, 7), picture(32, 32, 8)]
    first = seen.rollout.ledger.position().next_gid
    for gid in range(first, first + 4):
        asked = group(gid, [1], 4, max_tokens=400, temperature=1.5)
        asked.prompt.CopyFrom(seen.prompt(files, tail=70 + gid))
        assert seen.rollout.ledger.admit(asked, b"")
    seen.rollout.wait_for_groups()
    version = seen.rollout.version % 2
    seen.rollout.weights = seen.weights[version]
    seen.rollout.publish(pause_mode=rollout_pb2.PAUSE_MODE_KEEP)
    found: list[trajectory_pb2.CommittedGroup] = []
    deadline = time.monotonic() + 120
    while len(found) < 4 and time.monotonic() < deadline:
        found = [one for _, one in seen.rollout.ledger.read_committed("0", 100, 0.5) if one.gid >= first]
    num_mixed = 0
    for one in found:
        for row in seen.rollout.rows.read(rows_of(one), SAMPLED_COLUMNS):
            ids, versions = row["token_ids"].tolist(), row["policy_versions"]
            said = ids[int((row["response_mask"] == 0).sum()) :]
            new = versions == seen.rollout.version
            if new.any() and seen.tokens.token_id not in said:
                num_mixed += bool((versions[row["response_mask"] == 1] < seen.rollout.version).any())
                expected = seen.logprobs(version, ids, files, temperature=1.5)
                assert seen.size((row["rollout_logprobs"] - expected)[new]) < seen.most
    assert num_mixed > 0, "no response was under way over the publish"


def test_what_changed_in_towers_and_language_models_is_all_that_a_delta_brings(seen: Seen, tmp_path: Path) -> None:
    whole = dict(seen.weights[0])
    changed = {name: tensor.clone() for name, tensor in whole.items()}
    for tensor in changed.values():
        tensor.view(-1)[::50] *= 1.5
    almost = tmp_path / "almost"
    shutil.copytree(seen.paths[0], almost)
    save_file(changed, almost / "model.safetensors", metadata={"format": "pt"})
    seen.models[1] = AutoModelForImageTextToText.from_pretrained(almost, dtype=seen.dtype).float().eval()
    seen.rollout.deltas = True
    seen.rollout.open_epoch()
    shares = []
    for weights in (whole, changed):
        seen.rollout.weights = sorted(weights.items())
        sent, received = seen.rollout.publish()
        assert received.digest == sent.digest
        shares.append(sent.wire_bytes / sent.num_bytes)
    assert shares[0] >= 1
    assert shares[1] < 0.05
    prompt = seen.prompt([picture(36, 20, 0), picture(32, 32, 1)])
    assert seen.gap(1, prompt, seen.generate(prompt)) < seen.most


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v"])
def test_adapters_of_the_language_model_answer_what_the_base_s_tower_sees(family: VisionFamily, tmp_path: Path) -> None:
    path = write_vision(tmp_path / "model", family)
    lora, generator = LoraSection(rank=4, alpha=12.0, target_modules=ALL_LINEAR), torch.Generator().manual_seed(0)
    lora = with_modules(lora, path)
    sections: dict[str, Any] = {
        "data": {"images_field": "images"},
        "actor": {"lora": lora.model_dump()},
        "model": {"dtype": sampled_dtype(family)},
    }
    with rollout_process(tmp_path, path, auto_class=AutoModelForImageTextToText, **sections) as running:
        seen, adapters = Seen(running, [path, path], family), []
        for name, module in seen.models[1].named_modules():
            if "language_model.layers" in name and name.rpartition(".")[2] in lora.target_modules:
                down = torch.randn(lora.rank, module.in_features, generator=generator) * 0.2
                up = torch.randn(module.out_features, lora.rank, generator=generator) * 0.2
                module.weight.data += lora.alpha / lora.rank * (up @ down)
                half = f"base_model.model.{name}.lora_"
                adapters += [(f"{half}A.weight", down), (f"{half}B.weight", up)]
        running.adapter = weights_pb2.LoraAdapter(rank=lora.rank, alpha=lora.alpha)
        running.weights = sorted(adapters)
        running.open_epoch()
        running.publish()
        prompt = seen.prompt([picture(36, 20, 0), picture(32, 32, 1)])
        responses = seen.generate(prompt)
        assert seen.gap(1, prompt, responses) < seen.most
        assert seen.gap(0, prompt, responses) > 0.1
