"""Rotary positions of images by vLLM, against those of trainers, which a unit test holds to transformers'."""

from pathlib import Path
from types import SimpleNamespace
from typing import get_args

import numpy as np
import pytest
from transformers import AutoConfig
from vllm.model_executor.models.registry import ModelRegistry
from vllm.multimodal.inputs import PlaceholderRange

from rolecall.columns import IMAGES
from rolecall.training.packing.images import place_images
from tests.tiny_models import VisionFamily, write_vision
from tests.vision_rig import SHOWS, make_rows, oracle_inputs, read_images

pytestmark = pytest.mark.vision


@pytest.mark.parametrize("family", get_args(VisionFamily))
def test_vllm_and_trainers_turn_the_tokens_of_images_alike(tmp_path: Path, family: VisionFamily) -> None:
    path = write_vision(tmp_path, family)
    config = AutoConfig.from_pretrained(path)
    kind = ModelRegistry.models[config.architectures[0]].load_model_cls()
    model = kind.__new__(kind)  # without its layers, of which this takes none
    model.config = config
    for row in (each for each in make_rows() if (each["token_ids"] == SHOWS).any()):
        ids, shows = row["token_ids"].tolist(), row["token_ids"] == SHOWS
        begins = np.flatnonzero(np.diff(shows.astype(int), prepend=0) > 0)
        features = [
            SimpleNamespace(
                modality="image",
                mm_position=PlaceholderRange(offset=int(offset), length=int(grid.prod()) // 4),
                data={"image_grid_thw": SimpleNamespace(data=grid)},
            )
            for offset, grid in zip(begins, oracle_inputs(path, row)["image_grid_thw"], strict=True)
        ]
        expected, _ = model.get_mrope_input_positions(ids, features)
        placed = place_images([row["token_ids"]], [row[IMAGES]], read_images(path, [row]))
        assert placed is not None
        assert np.array_equal(placed.position_3N, expected)
