"""The images of rows, from the files in their column to patches for a model's vision tower, and where they stand among
the tokens of a microbatch.

A row's tokens hold an image's placeholder once for each feature that the tower makes of it. In each of its sequences
the row's images stand one after another, from the first placeholder on; one that a policy sampled behind them is a
token like any other. A later segment may show none.

Pixels are computed by the image processor of the model directory as transformers loads it by default, which is what
vLLM does: that of torchvision where it is installed, which it is wherever vLLM serves such a model. Without it that of
Pillow takes its place, whose resized pixels differ by a level of 255 here and there, and the log says so.

All of it happens on the host, in memory until the microbatch is computed. transformers' image code is imported where a
reader is made, which models of text have none of.

Shapes: T tokens of one sequence; N of a pack; I images; P patches; C numbers of a patch.
"""

import importlib.util
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rolecall.data.images.files import open_image
from rolecall.data.images.tokens import require_visual_tokens
from rolecall.errors import InvalidInputError
from rolecall.training.model.prefixes import SharedPrefixes
from rolecall.training.model.vision import ShownImages
from rolecall.training.serving.hooks import nothing
from rolecall.v1.trajectory_pb2 import Images
from rolecall.wire import Array

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Image:
    """An image as a vision tower takes it."""

    patches_PC: torch.Tensor
    """float32."""
    grid: tuple[int, int, int]
    """Frames (1), rows and columns of patches."""


class ImageReader:
    """The image processor of a model of text and images, and how its tokens show images."""

    def __init__(self, path: Path, progressed: Callable[[], None] = nothing) -> None:
        """`path` is the model directory. `progressed` is called after every image. ConfigError for a model that sees
        none.
        """
        self.tokens = require_visual_tokens(path)
        """The tokens that stand for an image."""
        from transformers import AutoImageProcessor

        if importlib.util.find_spec("torchvision") is None:
            logger.warning(
                "torchvision is not installed: images are resized by Pillow here, and by torchvision in rollouts; "
                "install the version that rollouts have"
            )
        self._processor: Any = AutoImageProcessor.from_pretrained(path)
        self._progressed = progressed

    def read(self, file: bytes) -> Image:
        """The image in `file`. InvalidInputError when it is none."""
        made = self._processor(images=[open_image(file)], return_tensors="pt")
        self._progressed()
        rows, columns = made["image_grid_thw"][0, 1:].tolist()
        return Image(made["pixel_values"], (1, rows, columns))


@dataclass(frozen=True)
class PlacedImages:
    """The distinct images of a microbatch, and where its sequences show them."""

    images: Sequence[Image]
    features: Sequence[Array]
    """Of each sequence, the feature of all of theirs that each token shows, int64 [T], -1 for none."""
    position_3N: Array
    """int64: rotary positions by time, row and column, from 0 in every sequence."""

    def shown(self, prefixes: SharedPrefixes | None, device: torch.device) -> ShownImages:
        """The images as the model takes them, which computes the distinct tokens of `prefixes`."""
        feature_N = torch.from_numpy(np.concatenate(self.features))
        computed = feature_N if prefixes is None else feature_N[prefixes.first_C.cpu()]
        token_M = (computed >= 0).nonzero()[:, 0]
        return ShownImages(
            patches_PC=torch.cat([image.patches_PC for image in self.images]),
            grids_I3=torch.tensor([image.grid for image in self.images]),
            token_M=token_M.to(device),
            feature_M=computed[token_M].to(device),
        )


def place_images(token_ids: Sequence[Array], columns: Sequence[Array], reader: ImageReader) -> PlacedImages | None:
    """Reads the images of sequences, each of which has its tokens and its row's column IMAGES; None where none shows
    any. InvalidInputError when one cannot be read, or is not where the tokens say.
    """
    distinct = _Distinct(reader)
    placed = [distinct.place(ids_T, column) for ids_T, column in zip(token_ids, columns, strict=True)]
    if not distinct.images:
        return None
    features, positions = zip(*placed, strict=True)
    return PlacedImages(distinct.images, features, np.concatenate(positions, 1))


class _Distinct:
    """The images of a microbatch, each once."""

    def __init__(self, reader: ImageReader) -> None:
        self.images: list[Image] = []
        self._reader = reader
        self._num_features = 0
        self._found: dict[bytes, tuple[Image, int]] = {}

    def place(self, token_ids_T: Array, column: Array) -> tuple[Array, Array]:
        """(feature_T, position_3T) of one sequence, as PlacedImages has them."""
        feature_T = np.full(len(token_ids_T), -1, np.int64)
        position_3T = np.tile(np.arange(len(token_ids_T)), (3, 1))
        places = np.flatnonzero(token_ids_T == self._reader.tokens.token_id)
        files = Images.FromString(column.tobytes()).files if places.size else ()
        runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
        for number, file in enumerate(files, 1):
            image, first = self._find(file)
            rows, columns = self._size(image)
            num, run = rows * columns, runs[number - 1] if number <= len(runs) else places[:0]
            if len(run) != num:
                raise InvalidInputError(
                    f"image {number} of {len(files)} has {num} features and {len(run)} tokens that show it; the "
                    "sampler and the trainers must have the same files of the image processor beside the model"
                )
            start, end = int(run[0]), int(run[-1]) + 1
            feature_T[start:end] = np.arange(first, first + num)
            inside_3T = [
                np.zeros(num, np.int64),
                np.repeat(np.arange(rows), columns),
                np.tile(np.arange(columns), rows),
            ]
            position_3T[:, start:end] = position_3T[0, start] + np.stack(inside_3T)
            position_3T[:, end:] += max(rows, columns) - num
        return feature_T, position_3T

    def _find(self, file: bytes) -> tuple[Image, int]:
        """The image in `file` and the first of its features."""
        if file not in self._found:
            image = self._reader.read(file)
            self._found[file] = image, self._num_features
            self.images.append(image)
            self._num_features += math.prod(self._size(image))
        return self._found[file]

    def _size(self, image: Image) -> tuple[int, int]:
        """Rows and columns of the features of `image`."""
        _, rows, columns = image.grid
        merge = self._reader.tokens.merge_size
        return rows // merge, columns // merge
