"""The images of rows: from files to patches for a model's vision tower, and where they stand among the tokens of a
microbatch.

A row's tokens hold an image's placeholder once for each feature that the tower makes of it. In each of its sequences
that one's own images (pieces.py) stand one after another, from the first placeholder on. A placeholder that a policy
sampled behind all of them is a token like any other.

All of it happens on the host, where an image's patches are once, whatever shows it, until the microbatches that do are
computed. Which pixels a tower is given is image_processor.py's to say; it is imported where a reader is made, which
runs on text have none of.

Shapes: T tokens of one sequence; N of a pack; I images; P patches; C numbers of a patch.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from rolecall.columns import IMAGES
from rolecall.data.images.files import open_image
from rolecall.data.images.tokens import require_visual_tokens
from rolecall.errors import InvalidInputError
from rolecall.training.model.prefixes import SharedPrefixes
from rolecall.training.model.vision import ShownImages
from rolecall.training.serving.hooks import nothing
from rolecall.v1.trajectory_pb2 import Images
from rolecall.wire import Array

NUM_THREADS = 4
"""Images that a rank reads at a time; one takes 0.1 ms of a core for each of its tokens, and the memory that MAX_PIXELS
(rolecall/data/images/files.py) says.
"""


@dataclass(frozen=True)
class Image:
    """An image as a vision tower takes it."""

    patches_PC: torch.Tensor
    """The numbers of its patches, in the type that the model computes in."""
    grid: tuple[int, int, int]
    """Frames (1), rows and columns of patches."""


class ImageReader:
    """The image processor of a model of text and images, and how its tokens show images."""

    def __init__(self, path: Path, dtype: torch.dtype, progressed: Callable[[], None] = nothing) -> None:
        """`path` is the model directory, `dtype` what the model computes in. `progressed` is called after every image.
        ConfigError for a model that sees none.
        """
        self.tokens = require_visual_tokens(path)
        """The tokens that stand for an image."""
        from rolecall.training.packing.image_processor import load_processor

        self._processor = load_processor(path)
        self._dtype, self._progressed = dtype, progressed
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="images")

    def read(self, files: Iterable[bytes]) -> Iterator[Image | InvalidInputError]:
        """The images in `files`, in order; in the place of one that cannot be read the error that says why."""
        for image in self._threads.map(self._read, files):
            self._progressed()
            yield image

    def _read(self, file: bytes) -> Image | InvalidInputError:
        try:
            opened = open_image(file)
        except InvalidInputError as error:
            return error
        made = self._processor(images=[opened], return_tensors="pt")
        rows, columns = made["image_grid_thw"][0, 1:].tolist()
        return Image(made["pixel_values"].to(self._dtype), (1, rows, columns))


class ReadImages:
    """The images that sequences show, each distinct one once. They are read before the sequences are packed."""

    def __init__(self, reader: ImageReader) -> None:
        self._reader = reader
        self._image_of: dict[bytes, Image] = {}
        self.token_id = reader.tokens.token_id
        """The token that stands for an image."""

    def read(
        self, rows: Iterable[Mapping[str, Array]], unread: dict[bytes, InvalidInputError] | None = None
    ) -> Iterator[None]:
        """Reads the images that `rows` (token_ids and IMAGES) show and that it has not; yields after each. The error of
        one that cannot be read is put into `unread`, by its file, and raised where that is None.
        """
        shown = dict.fromkeys(file for row in rows for file in self.shown_by(row["token_ids"], row[IMAGES]))
        files = [file for file in shown if file not in self._image_of]
        for file, image in zip(files, self._reader.read(files), strict=True):
            if isinstance(image, Image):
                self._image_of[file] = image
            elif unread is None:
                raise image
            else:
                unread[file] = image
            yield

    def check(self, row: Mapping[str, Array]) -> None:
        """InvalidInputError when a whole row (token_ids and IMAGES) has more images than its tokens show."""
        images, num_runs = Images.FromString(row[IMAGES].tobytes()), self._num_runs(row["token_ids"])
        num_shown = sum(len(each.files) for each in images.segments) if images.segments else len(images.files)
        if num_runs < num_shown:
            raise InvalidInputError(f"a row has {num_shown} images, and its tokens show {num_runs}")

    def shown_by(self, token_ids_T: Array, column: Array) -> list[bytes]:
        """The files that a sequence shows, in order: the first of those in `column`, its own IMAGES."""
        num_runs = self._num_runs(token_ids_T)
        return list(Images.FromString(column.tobytes()).files[:num_runs]) if num_runs else []

    def _num_runs(self, token_ids_T: Array) -> int:
        shows_T = token_ids_T == self.token_id
        return int(shows_T[:1].sum() + (shows_T[1:] & ~shows_T[:-1]).sum())

    def size(self, image: Image) -> tuple[int, int]:
        """Rows and columns of the features of `image`."""
        _, rows, columns = image.grid
        return rows // self._reader.tokens.merge_size, columns // self._reader.tokens.merge_size

    def __getitem__(self, file: bytes) -> Image:
        return self._image_of[file]


@dataclass(frozen=True)
class PlacedImages:
    """The distinct images of a microbatch, and where its sequences show them."""

    images: Sequence[Image]
    features: Sequence[Array]
    """The feature, of all that there are, which each token of a sequence shows, int64 [T], -1 for none; by sequence."""
    position_3N: Array
    """int64: rotary positions by time, row and column, from 0 in every sequence."""

    def shown(self, prefixes: SharedPrefixes | None, device: torch.device) -> ShownImages:
        """The images as the model takes them, which computes the distinct tokens of `prefixes`."""
        feature_N = torch.from_numpy(np.concatenate(self.features))
        computed = feature_N if prefixes is None else feature_N[prefixes.first_C.cpu()]
        token_M = (computed >= 0).nonzero()[:, 0]
        return ShownImages(
            patches_PC=[image.patches_PC for image in self.images],
            grids_I3=torch.tensor([image.grid for image in self.images]),
            token_M=token_M.to(device),
            feature_M=computed[token_M].to(device),
        )


def place_images(token_ids: Sequence[Array], columns: Sequence[Array], read: ReadImages) -> PlacedImages | None:
    """Places the images of sequences, each of which has its tokens and its row's column IMAGES, all of them `read`;
    None where none shows any. InvalidInputError when one is not where the tokens say.
    """
    shown = [read.shown_by(ids_T, column) for ids_T, column in zip(token_ids, columns, strict=True)]
    distinct = dict.fromkeys(file for files in shown for file in files)
    if not distinct:
        return None
    images = [read[file] for file in distinct]
    firsts = np.cumsum([0, *(math.prod(read.size(image)) for image in images)]).tolist()
    found = dict(zip(distinct, zip(images, firsts, strict=False), strict=True))  # the last is where they end
    placed = [
        _place(ids_T, [found[file] for file in files], read) for ids_T, files in zip(token_ids, shown, strict=True)
    ]
    features, positions = zip(*placed, strict=True)
    return PlacedImages(images, features, np.concatenate(positions, 1))


def _place(token_ids_T: Array, images: Sequence[tuple[Image, int]], read: ReadImages) -> tuple[Array, Array]:
    """(feature_T, position_3T), as PlacedImages has them, of a sequence that shows `images`, each with the first of its
    features.
    """
    feature_T = np.full(len(token_ids_T), -1, np.int64)
    position_3T = np.tile(np.arange(len(token_ids_T)), (3, 1))
    places = np.flatnonzero(token_ids_T == read.token_id)
    runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    for number, (image, first) in enumerate(images, 1):
        rows, columns = read.size(image)
        num, run = rows * columns, runs[number - 1] if number <= len(runs) else places[:0]
        if len(run) != num:
            raise InvalidInputError(
                f"image {number} of {len(images)} has {num} features and {len(run)} tokens that show it; the sampler "
                "and the trainers must have the same files of the image processor beside the model"
            )
        start, end = int(run[0]), int(run[-1]) + 1
        feature_T[start:end] = np.arange(first, first + num)
        inside_3T = [np.zeros(num, np.int64), np.repeat(np.arange(rows), columns), np.tile(np.arange(columns), rows)]
        position_3T[:, start:end] = position_3T[0, start] + np.stack(inside_3T)
        position_3T[:, end:] += max(rows, columns) - num
    return feature_T, position_3T
