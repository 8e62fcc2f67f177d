"""Checks 25 and 26: models of text and images on the GPU. Trainers' logprobs in bfloat16 beside those in float32; what
the vision tower takes of a training step; vLLM's logprobs beside the trainer's, under two versions of weights.

The last needs torchvision, which a dry run may lack: it is left out there, and said.
"""

import asyncio
import importlib.util
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import (
    PreTrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
)

from rolecall.columns import IMAGES
from rolecall.data.images.tokens import require_visual_tokens
from rolecall.training.engine import Microbatch, TokenOutputs
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.objective.objectives import SftObjective
from rolecall.training.packing.images import ImageReader, ReadImages
from rolecall.training.packing.pack import Row, local_counts, pack, unpack
from rolecall.training.ranks.device import free_cached_memory, take_peak_bytes
from rolecall.v1.trajectory_pb2 import Images, SamplingParams
from rolecall.wire import Array
from services.rollout.config import start_environment
from services.rollout.sampling import PauseMode, Sample, SampleRequest
from tests.pictures import END, PAD, START, VIDEO, picture
from tests.tiny_models import VisionFamily, write_image_processor, write_vision
from tests.tiny_tokenizer import VISION_TEMPLATE, VISION_TOKENS, write_tokenizer
from tools.gpu_acceptance.findings import Findings
from tools.gpu_acceptance.rollout import MOST_MISMATCH, Pair, config_of
from tools.gpu_acceptance.stage import Stage, local_parameters, make_engine

_VOCAB = 151_936
_NUM_PROMPTS = 4
_RESPONSES = 4
"""Responses to each prompt."""
_KV_CACHE_BYTES = 8 * 2**30
_SHARE = 0.3
"""Share of the GPU that vLLM must find free as it starts, beside the trainer's float32 weights and moments."""
_MERGERS = ("visual.merger.mlp.2.weight", "visual.merger.linear_fc2.weight")
"""The last matrix of a tower, by family. The second version of the weights has it negated: what a tower of the first
version says is then as wrong as another image.
"""


def check_qwen2_5_vl(found: Findings, folder: Path) -> None:
    """The tower that attends within windows, in heads of 80."""
    _check(Stage.of(found, folder), "qwen2_5_vl", patch=14)


def check_qwen3_vl(found: Findings, folder: Path) -> None:
    """The tower whose features enter several layers."""
    _check(Stage.of(found, folder), "qwen3_vl", patch=16)


def _check(stage: Stage, family: VisionFamily, patch: int) -> None:
    found, path = stage.found, stage.folder / "model"
    if found.dry:
        write_vision(path, family)
    else:
        _write(stage, path, family, patch)
    trainer = make_engine(stage, path, dtype=stage.pick("bfloat16", "float32"))
    prompts = _Prompts(stage, path, trainer)
    rows = prompts.rows([prompts.rng.integers(0, trainer.config.get_text_config().vocab_size, prompts.length)])
    with found.attempt("trainer"):
        exact = _exact(stage, path, prompts, rows)
        gap = np.abs(prompts.logprobs(trainer, rows) - exact)
        found.at_most("trainer against float32, mean", float(gap.mean()), MOST_MISMATCH)
        found.figure("trainer against float32, max", float(gap.max()))
        found.require("logprobs are not finite", bool(np.isfinite(gap).all()))
        _tower_share(stage, trainer, prompts, rows)
    lacks = [name for name in ("vllm", "torchvision") if importlib.util.find_spec(name) is None]
    found.require(f"{' and '.join(lacks)} not installed", not lacks, on_device=True)
    if lacks:
        found.figure("beside vLLM", f"left out: {' and '.join(lacks)} not installed")
        return
    cache = stage.pick(_KV_CACHE_BYTES, 2**26)
    sizes = f"rollout.kv_cache_bytes={cache}", f"rollout.gpu_memory_utilization={_SHARE}"
    config = config_of(stage, path, "data.images_field=images", *sizes)
    os.environ.update(start_environment(config))
    asyncio.run(_beside_vllm(Pair(stage, trainer, config), prompts))


class _Prompts:
    """Prompts that show an image each, and responses to them."""

    def __init__(self, stage: Stage, path: Path, trainer: FsdpEngine) -> None:
        self.rng, self.length = np.random.default_rng(0), stage.pick(128, 6)
        self._stage, self._path = stage, path
        tokens, (width, height) = require_visual_tokens(path), stage.pick((448, 336), (40, 24))
        self.files = [picture(width, height, seed) for seed in range(_NUM_PROMPTS)]
        shown = tokens.number(width, height)
        self.ids = [[1, 50, START, *[PAD] * shown, END, 70 + place] for place in range(_NUM_PROMPTS)]
        stage.found.figure("tokens of an image", shown)

    def rows(self, responses: Sequence[Sequence[int]]) -> list[Row]:
        """A row for each response, to the prompts in turn; of one response: as many to each as are sampled."""
        if len(responses) == 1:
            responses = list(responses) * (_NUM_PROMPTS * _RESPONSES)
        rows = list[Row]()
        for number, response in enumerate(responses):
            place = number % _NUM_PROMPTS
            ids = np.array([*self.ids[place], *response], np.int32)
            mask = (np.arange(len(ids)) >= len(self.ids[place])).astype(np.uint8)
            column = np.frombuffer(Images(files=[self.files[place]]).SerializeToString(), np.uint8)
            rows.append({"token_ids": ids, "response_mask": mask, "loss_mask": mask, IMAGES: column})
        return rows

    def packed(self, engine: FsdpEngine, rows: Sequence[Row]) -> Microbatch:
        """One microbatch of `rows`."""
        read = ReadImages(ImageReader(self._path, engine.dtype))
        for _ in read.read(rows):
            pass
        return pack(rows, ["loss_mask"], temperature=1.0, device=self._stage.device, images=read)

    def logprobs(self, engine: FsdpEngine, rows: Sequence[Row]) -> Array:
        """float32: of all responses' tokens."""
        microbatch = self.packed(engine, rows)
        (outputs,) = engine.forward([microbatch])
        assert isinstance(outputs, TokenOutputs)
        parts = unpack(outputs.logprobs_N, microbatch.lengths)
        return np.concatenate([part[row["response_mask"] != 0] for part, row in zip(parts, rows, strict=True)])


def _exact(stage: Stage, path: Path, prompts: _Prompts, rows: Sequence[Row], version: int = 1) -> Array:
    """Logprobs in float32, of a version of the weights."""
    engine = make_engine(stage, path, dtype="float32", optimizer=None)
    if version == 2:
        _negate_merger(engine)
    logprobs = prompts.logprobs(engine, rows)
    del engine
    free_cached_memory(stage.device)
    return logprobs


@torch.no_grad()
def _negate_merger(engine: FsdpEngine) -> None:
    """Makes the first version of the weights the second, and the second the first."""
    (merger,) = (each for name, each in local_parameters(engine).items() if name.endswith(_MERGERS))
    merger.neg_()


def _tower_share(stage: Stage, trainer: FsdpEngine, prompts: _Prompts, rows: Sequence[Row]) -> None:
    """What of forward and backward passes is the tower's, and their peak of memory."""
    microbatch, loss = prompts.packed(trainer, rows), SftObjective(local_counts(rows))
    vision = trainer._model.vision
    assert vision is not None

    def step() -> None:
        trainer.forward_backward([microbatch], loss)

    step()  # so that what is measured allocates nothing new
    take_peak_bytes(stage.device)
    whole = min(stage.seconds(step) for _ in range(2))
    stage.found.figure("peak of a training step, GB", take_peak_bytes(stage.device) / 1e9)
    vision.is_called = False
    try:
        text = min(stage.seconds(step) for _ in range(2))
    finally:
        vision.is_called = True
    trainer.step()
    stage.found.figure("s of a training step", whole)
    stage.found.figure("the tower's share of it", 1 - text / whole)


async def _beside_vllm(pair: Pair, prompts: _Prompts) -> None:
    from services.rollout.engine import VllmEngine  # after its environment is set

    started = time.perf_counter()
    pair.engine = engine = VllmEngine(pair.config)
    await engine.warm_up()
    pair.found.figure("s until vLLM is warm", time.perf_counter() - started)
    try:
        await engine.pause(PauseMode.KEEP)
        await pair.join()
        for version in (1, 2):
            if version == 2:
                _negate_merger(pair.trainer)
            await pair.publish(f"weights {version}")
            await engine.resume()
            await _compare(pair, prompts, version)
            await engine.pause(PauseMode.KEEP)
    finally:
        await engine.close()
        pair.root.close()


async def _compare(pair: Pair, prompts: _Prompts, version: int) -> None:
    """Responses to all prompts, the sampler's logprobs with the trainer's and with those of float32."""
    sampling = SamplingParams(temperature=1.0, top_p=1.0, max_tokens=prompts.length)
    requests = [
        SampleRequest(f"{version}-{number}", prompts.ids[place], sampling, number, [prompts.files[place]])
        for number in range(_NUM_PROMPTS * _RESPONSES)
        for place in (number % _NUM_PROMPTS,)
    ]
    # bounded: by the check's own time
    samples: list[Sample] = await asyncio.gather(*(pair.engine.sample(request) for request in requests))
    rows = prompts.rows([sample.token_ids for sample in samples])
    sampled = np.concatenate([sample.logprobs for sample in samples])
    ours = prompts.logprobs(pair.trainer, rows)
    exact = _exact(pair.stage, prompts._path, prompts, rows, version)
    for name, logprobs in (("trainer", ours), ("float32", exact)):
        gap = np.abs(sampled - logprobs)
        pair.found.at_most(f"weights {version}, vLLM against {name}, mean", float(gap.mean()), MOST_MISMATCH)
        pair.found.figure(f"weights {version}, vLLM against {name}, max", float(gap.max()))
    if version == 2:
        _negate_merger(pair.trainer)
        gap = np.abs(prompts.logprobs(pair.trainer, rows) - ours)
        _negate_merger(pair.trainer)
        pair.found.at_least("one tower against the other, mean", float(gap.mean()), 2 * MOST_MISMATCH)


def _write(stage: Stage, path: Path, family: VisionFamily, patch: int) -> None:
    """A model of the shape of a 2B, 3B respectively, of fewer layers of text; its weights are drawn again later."""
    with torch.device(stage.device):
        model: Any = _built(family)
    model.save_pretrained(path)
    del model
    free_cached_memory(stage.device)
    write_tokenizer(path, VISION_TEMPLATE, VISION_TOKENS)
    write_image_processor(path, family, patch=patch, max_tokens=1024)


def _built(family: VisionFamily) -> Any:
    ids = {f"{name}_token_id": id for name, id in zip(_SHOWING, (START, END, PAD, VIDEO), strict=True)}
    shared = {"tie_word_embeddings": True, "eos_token_id": 0, **ids}
    rope = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]}
    text = {
        "vocab_size": _VOCAB,
        "hidden_size": 2048,
        "num_hidden_layers": 16,
        "num_attention_heads": 16,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": True,
        "eos_token_id": 0,
        "bos_token_id": None,
        "rope_parameters": rope,
    }
    config: PreTrainedConfig
    if family == "qwen2_5_vl":
        text |= {"intermediate_size": 11008, "num_key_value_heads": 2}
        config = Qwen2_5_VLConfig(text_config=text, vision_config={"out_hidden_size": 2048, **_WINDOWED}, **shared)
        return Qwen2_5_VLForConditionalGeneration._from_config(config, dtype=torch.bfloat16)
    text |= {"intermediate_size": 6144, "num_key_value_heads": 8, "head_dim": 128}
    text["rope_parameters"] = {**rope, "mrope_section": [24, 20, 20], "mrope_interleaved": True}
    config = Qwen3VLConfig(text_config=text, vision_config={"out_hidden_size": 2048, **_DEEP}, **shared)
    return Qwen3VLForConditionalGeneration._from_config(config, dtype=torch.bfloat16)


_SHOWING = ("vision_start", "vision_end", "image", "video")
_WINDOWED: dict[str, Any] = {
    "depth": 32,
    "hidden_size": 1280,
    "intermediate_size": 3420,
    "num_heads": 16,
    "patch_size": 14,
    "window_size": 112,
    "fullatt_block_indexes": [7, 15, 23, 31],
}
"""The tower of Qwen2.5-VL."""
_DEEP: dict[str, Any] = {
    "depth": 24,
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_heads": 16,
    "patch_size": 16,
    "num_position_embeddings": 2304,
    "deepstack_visual_indexes": [5, 11, 17],
}
"""The tower of Qwen3-VL's 2B."""
