"""The pixels that trainers compute on, against those of transformers with torchvision, which rollouts use."""

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.nn.functional import interpolate
from transformers import AutoImageProcessor

from rolecall.data.images.files import open_image
from rolecall.data.images.tokens import require_visual_tokens
from rolecall.errors import ConfigError
from rolecall.training.packing.image_processor import load_by_torch, load_processor
from tests.tiny_models import write_image_processor
from tests.vision_rig import image_file

SIZES = [(20, 36), (16, 40), (300, 200), (9, 31), (640, 480)]
"""Of images that grow, shrink and stay as they are."""


KINDS = [
    ("qwen2_5_vl", "Qwen2VLImageProcessor"),
    ("glm4v", "Glm4vImageProcessor"),
    ("glm4v", "Glm46VImageProcessor"),
]
"""Families, and the processors that they may have."""


@pytest.fixture(params=KINDS, ids=[name for _, name in KINDS])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    family, name = request.param
    (tmp_path / "tokenizer_config.json").write_text("{}")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, "image_token_id": 5}))
    write_image_processor(tmp_path, family, patch=4)
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"image_processor_type": name}))
    return tmp_path


@pytest.mark.vision
def test_a_trainer_without_torchvision_computes_torchvisions_pixels(path: Path) -> None:
    theirs, ours = load_processor(path), load_by_torch(path)
    assert type(theirs).__name__ in {name for _, name in KINDS}  # torchvision's
    tokens = require_visual_tokens(path)
    pillows = AutoImageProcessor.from_pretrained(path, backend="pil")
    furthest = 0.0
    for seed, (height, width) in enumerate(SIZES):
        image = open_image(image_file(height, width, seed))
        expected, found, other = (each(images=[image], return_tensors="pt") for each in (theirs, ours, pillows))
        assert torch.equal(found["image_grid_thw"], expected["image_grid_thw"])
        assert tokens.number(width, height) * 4 == len(expected["pixel_values"])
        torch.testing.assert_close(found["pixel_values"], expected["pixel_values"], rtol=0, atol=1e-6)
        furthest = max(furthest, float((other["pixel_values"] - expected["pixel_values"]).abs().max()))
    assert furthest > 1 / 127.5  # a level, of pixels from -1 to 1


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="of trainers without torchvision")
def test_images_are_resized_by_torch_and_their_pixels_lie_in_patches_as_in_pillows_processor(path: Path) -> None:
    image = open_image(image_file(20, 36, 0))
    found = load_processor(path)(images=[image], return_tensors="pt")
    pixels = torch.from_numpy(np.array(image)).permute(2, 0, 1)[None]
    resized = interpolate(pixels, size=(16, 32), mode="bicubic", antialias=True)[0].permute(1, 2, 0)
    pillow = AutoImageProcessor.from_pretrained(path, backend="pil")
    expected = pillow(images=[resized.numpy()], input_data_format="channels_last", return_tensors="pt")
    assert torch.equal(found["image_grid_thw"], torch.tensor([[1, 4, 8]]))
    torch.testing.assert_close(found["pixel_values"], expected["pixel_values"])


@pytest.mark.skipif(importlib.util.find_spec("torchvision") is not None, reason="of trainers without torchvision")
def test_another_way_to_resize_needs_torchvision(path: Path) -> None:
    file = path / "preprocessor_config.json"
    file.write_text(file.read_text().replace('"patch_size"', '"resample": 2, "patch_size"', 1))
    with pytest.raises(ConfigError, match="has resample 2, not 3, which trainers compute with torchvision alone"):
        load_processor(path)
