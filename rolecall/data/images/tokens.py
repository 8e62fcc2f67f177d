"""The tokens of images in a prompt: how many stand for an image of a size, and where.

A chat template puts one placeholder for each image. A prompt has it once for every vector that the vision tower makes
of the image, which is what trainers compute on; vLLM is given it once, with the image, and repeats it by itself.

The arithmetic is that of transformers' Qwen2VLImageProcessor, and of Glm4vImageProcessor. It stands here because the
library's imports torch, and takes seconds, where a controller counts tokens; a test holds it to the library's.
"""

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any

from rolecall.data.json_text import parse_json
from rolecall.errors import ConfigError, InvalidInputError
from rolecall.settings import RunSettings

FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v")
"""Values of model_type of models whose prompts may show images."""
_EDGES = {"min_pixels": "shortest_edge", "max_pixels": "longest_edge"}


@dataclass(frozen=True)
class _Processor:
    """An image processor of transformers."""

    names: tuple[str, ...]
    """Classes that compute the same; the first stands where a configuration names none."""
    size: Mapping[str, int]
    """The `size` that stands where a configuration has none."""
    is_glm: bool = False
    """Whether it counts an image as several frames (VisualTokens.num_frames)."""


_QWEN = _Processor(("Qwen2VLImageProcessor",), {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280})
_GLM = _Processor(
    ("Glm4vImageProcessor", "Glm46VImageProcessor"),
    {"shortest_edge": 112 * 112, "longest_edge": 28 * 28 * 15000},
    is_glm=True,
)
_PIXELS = {
    "resample": 3,
    "do_rescale": True,
    "rescale_factor": 1 / 255,
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "temporal_patch_size": 2,
}
"""What else of a processor's configuration says what becomes of an image, and what stands where it does not."""
_MAX_RATIO = 200
"""Greatest ratio of an image's sides that a processor takes."""


@dataclass(frozen=True)
class VisualTokens:
    """The tokens of a model that stand for an image."""

    token_id: int
    """The placeholder's id."""
    patch_size: int
    merge_size: int
    """Patches that become one token, along either side."""
    min_pixels: int
    max_pixels: int
    """Images are resized to have so many pixels."""
    num_frames: int = 0
    """Frames as which GLM's processor counts the pixels of an image; 0: the processor is Qwen's."""

    def number(self, width: int, height: int) -> int:
        """Tokens of an image of so many pixels. InvalidInputError for one that the model's processor refuses."""
        factor, given = self.patch_size * self.merge_size, (width, height)
        if self.num_frames and min(given) < factor:
            grown = max(factor / height, factor / width)
            width, height = int(width * grown), int(height * grown)
        if max(width, height) > _MAX_RATIO * min(width, height):
            raise InvalidInputError(
                f"an image of {given[0]} x {given[1]} pixels is more than {_MAX_RATIO} times as long as it is wide; "
                "cut it"
            )
        frames = max(self.num_frames, 1)
        rows, columns = round(height / factor), round(width / factor)
        if frames * rows * columns * factor**2 > self.max_pixels:
            shrunk = math.sqrt(frames * height * width / self.max_pixels)
            rows = max(1, math.floor(height / shrunk / factor))
            columns = max(1, math.floor(width / shrunk / factor))
        elif frames * rows * columns * factor**2 < self.min_pixels:
            grown = math.sqrt(self.min_pixels / (frames * height * width))
            rows, columns = math.ceil(height * grown / factor), math.ceil(width * grown / factor)
        return rows * columns

    def expanded(self, ids: Sequence[int], numbers: Sequence[int]) -> list[int]:
        """`ids` with the placeholder of image i `numbers[i]` times. InvalidInputError where there are not as many
        placeholders as images, or two side by side.
        """
        found = [place for place, token in enumerate(ids) if token == self.token_id]
        if len(found) != len(numbers):
            raise InvalidInputError(
                f"the rendered prompt has {len(found)} tokens that stand for an image (id {self.token_id}), and "
                f"{len(numbers)} images; a text may not spell that token, and the chat template must show each image "
                "once"
            )
        if any(after == before + 1 for before, after in pairwise(found)):
            raise InvalidInputError(
                f"the chat template puts two images side by side with nothing between their tokens (id "
                f"{self.token_id}); have it put each between marks of its own"
            )
        whole, end = list[int](), 0
        for place, number in zip(found, numbers, strict=True):
            whole += [*ids[end:place], *[self.token_id] * number]
            end = place + 1
        return [*whole, *ids[end:]]


def collapsed(ids: Sequence[int], token_id: int, num_images: int) -> list[int]:
    """`ids` with one `token_id` in place of each of their first `num_images` runs of them: what stands behind is no
    image, but a token that was sampled.
    """
    shown, num_seen, before = list[int](), 0, -1
    for place, token in enumerate(ids):
        if num_seen == num_images and not token == before == token_id:
            return [*shown, *ids[place:]]
        num_seen += token == token_id != before
        if not token == before == token_id:
            shown.append(token)
        before = token
    return shown


def run_lengths(ids: Sequence[int], token_id: int) -> list[int]:
    """The lengths of the runs of `token_id` in `ids`."""
    return [len(list(run)) for is_shown, run in groupby(ids, lambda token: token == token_id) if is_shown]


def read_visual_tokens(path: Path, setting: str = "model.path") -> VisualTokens | None:
    """The tokens for images of the model in directory `path`, by its JSON files; None of a model that sees none.
    ConfigError, in the words of `setting`, says what its files lack.
    """
    config = _json(path / "config.json", setting)
    if config.get("model_type") not in FAMILIES:
        return None
    known, processor = _GLM if config["model_type"] == "glm4v" else _QWEN, _processor(path, setting)
    kind = str(processor.get("image_processor_type", known.names[0]))
    keeps_size = not processor.get("do_resize", True)
    if not kind.startswith(known.names) or keeps_size:
        raise ConfigError(
            f"{setting} {path}: its image processor is {kind}"
            + (" without do_resize" if keeps_size else "")
            + f"; images are counted as {known.names[0]} resizes them; give the model its own preprocessor_config.json"
        )
    edges = _edges(known, processor)
    found = {
        "image_token_id in config.json": config.get("image_token_id"),
        "patch_size": processor.get("patch_size", 14),
        "merge_size": processor.get("merge_size", 2),
        **{f"{name} (or size.{edge})": edges.get(edge) for name, edge in _EDGES.items()},
        **({"temporal_patch_size": processor.get("temporal_patch_size", 2)} if known.is_glm else {}),
    }
    wrong = [name for name, value in found.items() if not isinstance(value, int) or value < 1]
    vision = config.get("vision_config") or {}
    if wrong:
        raise ConfigError(
            f"{setting} {path}: {wrong[0]} is {found[wrong[0]]!r}, not a whole number above 0; take the file from the "
            "model as it was published; a size of your own has both edges, in pixels"
        )
    for name, own in (("patch_size", "patch_size"), ("merge_size", "spatial_merge_size")):
        if vision.get(own, found[name]) != found[name]:
            raise ConfigError(
                f"{setting} {path}: the image processor's {name} is {found[name]}, and vision_config.{own} of "
                f"config.json is {vision[own]}; take both files from one model"
            )
    return VisualTokens(*found.values())


def require_visual_tokens(path: Path, asked_by: str = "data.images_field") -> VisualTokens:
    """The tokens for images of the model in directory `path`. ConfigError for a model that sees none names the setting
    `asked_by`.
    """
    tokens = read_visual_tokens(path)
    if tokens is None:
        raise ConfigError(
            f"{asked_by}: model.path {path} is no model that sees images ({', '.join(FAMILIES)}); use one of them, or "
            f"remove {asked_by}"
        )
    return tokens


def read_processor_digest(path: Path, setting: str = "model.path") -> str:
    """Hex digest of what the image processor of the model in directory `path` makes of an image: its tokens and their
    pixels, however its files are written; empty for a model that sees none. ConfigError as `read_visual_tokens`.
    """
    if (tokens := read_visual_tokens(path, setting)) is None:
        return ""
    given = _processor(path, setting)
    pixels = {name: default if given.get(name) is None else given[name] for name, default in _PIXELS.items()}
    return hashlib.sha256(json.dumps([asdict(tokens), _as_floats(pixels)]).encode()).hexdigest()


def _as_floats(tree: Any) -> Any:
    """The same tree, in which 1 is 1.0."""
    if isinstance(tree, dict):
        return {name: _as_floats(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [_as_floats(value) for value in tree]
    return float(tree) if isinstance(tree, int) else tree


def image_processor_of(settings: RunSettings, path: Path) -> str:
    """The digest that a role of the run says of its model directory `path` when it joins; empty where the policy is
    shown no images, or the model sees none.
    """
    return read_processor_digest(path) if settings.shows_images else ""


def _edges(known: _Processor, processor: dict[str, Any]) -> dict[str, Any]:
    """The bounds of an image's pixels as the library finds them: a `size` that is there stands for the default as a
    whole, whatever it lacks, and min_pixels and max_pixels go before it, which GLM's processor does not read.
    """
    size = processor.get("size")
    own = {edge: processor[name] for name, edge in _EDGES.items() if processor.get(name) is not None}
    return {**(known.size if size is None else size if isinstance(size, dict) else {}), **({} if known.is_glm else own)}


def _processor(path: Path, setting: str) -> dict[str, Any]:
    """The configuration of the image processor: transformers looks at these files in this order."""
    whole = path / "processor_config.json"
    if whole.is_file() and isinstance(own := _json(whole, setting).get("image_processor"), dict):
        return own
    return _json(path / "preprocessor_config.json", setting)


def _json(path: Path, setting: str) -> dict[str, Any]:
    try:
        tree = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot read {path}: {error}; {setting} must be a Hugging Face model directory, with the files of its "
            "image processor where it sees images"
        ) from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} is not a JSON object; {setting} must be a Hugging Face model directory")
    return tree
