"""Images and the files of a model that sees them, for tests that load no model."""

import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from tests.tiny_tokenizer import SPECIAL_TOKENS, VISION_TEMPLATE, VISION_TOKENS, write_tokenizer

START, END, PAD, VIDEO = (len(SPECIAL_TOKENS) + index for index in range(len(VISION_TOKENS)))
"""Ids of VISION_TOKENS."""


def picture(width: int, height: int, seed: int = 0, kind: str = "PNG") -> bytes:
    """The file of an image of noise."""
    pixels = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def write_seeing(path: Path, more: Mapping[str, Any] = {}, **processor: Any) -> Path:
    """The JSON files of a model of text and images, its tokenizer and image processor: a token of an image is 8 x 8
    pixels, and an image is scaled to between 1 and 64 of them. `more` is merged over config.json, `processor` over the
    processor's. Returns `path`.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = {
        "model_type": "qwen2_5_vl",
        "image_token_id": PAD,
        "vision_config": {"patch_size": 4, "spatial_merge_size": 2},
        "text_config": {"max_position_embeddings": 512, "vocab_size": 288},
        **more,
    }
    whole = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 4,
        "merge_size": 2,
        "size": {"shortest_edge": 64, "longest_edge": 4096},
        **processor,
    }
    (path / "config.json").write_text(json.dumps(config))
    (path / "preprocessor_config.json").write_text(json.dumps(whole))
    write_tokenizer(path, VISION_TEMPLATE, VISION_TOKENS)
    return path
