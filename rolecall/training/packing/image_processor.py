"""The image processor of a model directory: the pixels that a vision tower is given, the same as rollouts give theirs.

It is the one that transformers loads by default, as vLLM does: torchvision's, wherever vLLM serves such a model. A
trainer without torchvision has that of Pillow, with torch in the place of Pillow where images are resized: it gives
torchvision's pixels to the bit, while Pillow's are up to 21 levels of 255 away (test_image_processor.py).

Importing this module imports transformers' image code: packing/images.py does where a reader of images is made.
"""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import interpolate
from transformers import AutoImageProcessor
from transformers.image_processing_backends import PilBackend
from transformers.image_utils import SizeDict
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from rolecall.data.images.tokens import require_visual_tokens
from rolecall.errors import ConfigError
from rolecall.wire import Array

_BICUBIC = 3
"""Pillow's number of the way to resize in which torch computes on bytes, as torchvision has it do."""


def load_processor(path: Path) -> Any:
    """The image processor of the model directory `path`. ConfigError where it resizes in a way that needs
    torchvision.
    """
    if importlib.util.find_spec("torchvision") is not None:
        return AutoImageProcessor.from_pretrained(path)
    processor = load_by_torch(path)
    if processor.resample != _BICUBIC:
        raise ConfigError(
            f"{path}: preprocessor_config.json has resample {processor.resample}, not {_BICUBIC}, which "
            "trainers compute with torchvision alone; install it"
        )
    return processor


def load_by_torch(path: Path) -> Any:
    """The image processor of the model directory `path` without torchvision. The families of
    rolecall/data/images/tokens.py have no others.
    """
    kind = _GlmsByTorch if require_visual_tokens(path).num_frames else _QwensByTorch
    return kind.from_pretrained(path)


class _ResizedByTorch(PilBackend):  # type: ignore[misc]  # transformers says no types of it
    """Pillow's way to patches, but for resizing."""

    def resize(self, image: Array, size: SizeDict, **_: Any) -> Array:
        """`image` [channels, rows, columns], uint8, in another size."""
        wanted = (size.height, size.width)
        if image.shape[1:] == wanted:
            return image
        pixels = torch.from_numpy(np.ascontiguousarray(image))[None]
        resized: Array = interpolate(pixels, size=wanted, mode="bicubic", antialias=True)[0].numpy()
        return resized


class _QwensByTorch(Qwen2VLImageProcessorPil, _ResizedByTorch):  # type: ignore[misc]
    """The image processor Qwen2VLImageProcessor, computed without torchvision."""


class _GlmsByTorch(Glm4vImageProcessorPil, _ResizedByTorch):  # type: ignore[misc]
    """The image processor Glm4vImageProcessor, computed without torchvision; Glm46VImageProcessor is the same."""
