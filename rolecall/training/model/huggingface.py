"""Hugging Face model directories in and out: slices of safetensors read without loading the file, and a directory
written tensor by tensor.

Owns names and files of weights. Nothing here knows FSDP: the engine says which part of a tensor it wants.
"""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from rolecall.data.tokenizer import NAMED_TEMPLATES
from rolecall.disk import writing
from rolecall.errors import ConfigError
from rolecall.training.model.files import GrowingFile, write_text

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FILE_BYTES = 4 * 2**30
"""Most bytes of one exported safetensors file."""
_PART = "part-{:05d}.safetensors"
"""A file's name until it is known how many there are."""


class ModelFiles:
    """The weights of a model directory, by name."""

    def __init__(self, path: Path, single: str = SINGLE) -> None:
        """`single` names the file of weights where there is no index. ConfigError when `path` holds neither."""
        self.path = path
        if (path / INDEX).is_file():
            weight_map: dict[str, str] = json.loads((path / INDEX).read_text())["weight_map"]
            self._files = {name: path / file for name, file in weight_map.items()}
        elif (path / single).is_file():
            with safe_open(path / single, framework="pt") as file:
                self._files = dict.fromkeys(file.keys(), path / single)
        else:
            raise ConfigError(f"{path} has neither {single} nor {INDEX}; convert the model to safetensors")

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def tensor(self, name: str) -> torch.Tensor:
        """The whole tensor `name`, on the CPU, in the file's dtype. ConfigError when the directory has none."""
        if name not in self._files:
            raise ConfigError(
                f"{self.path} has no tensor {name!r}; it is not a checkpoint of the model that its config.json names"
            )
        with safe_open(self._files[name], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of the tensor `name`, which must be there."""
        with safe_open(self._files[name], framework="pt") as file:
            return tuple(file.get_slice(name).get_shape())

    def part(self, name: str, slices: tuple[slice, ...]) -> torch.Tensor:
        """Reads the part that `slices`, one per dimension, cut from the tensor `name`: on the CPU, in its own dtype."""
        with safe_open(self._files[name], framework="pt") as file:
            tensor: torch.Tensor = file.get_slice(name)[slices] if slices else file.get_tensor(name)
            return tensor


def write_model(
    path: Path,
    source: Path,
    weights: Iterable[tuple[str, torch.Tensor]],
    *,
    progressed: Callable[[], None],
    file_bytes: int = FILE_BYTES,
) -> int:
    """Writes `weights` and the configuration and tokenizer files of `source` as a model directory; returns the bytes of
    weights. DiskFullError.

    Each tensor is written before the next is asked for: one is held at most. A file holds tensors of `file_bytes` at
    most, or one that is larger.
    """
    with writing("export the model to", path):
        path.mkdir(parents=True, exist_ok=True)
        for name, file in companions(source).items():
            (path / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(file, path / name)
        return _write_parts(path, weights, file_bytes, progressed)


def _write_parts(
    path: Path, weights: Iterable[tuple[str, torch.Tensor]], file_bytes: int, progressed: Callable[[], None]
) -> int:
    names: list[list[str]] = []
    total_bytes = 0
    part: GrowingFile | None = None
    try:
        for name, tensor in weights:
            if part is None or not part.has_room(name, tensor):
                if part is not None:
                    part.complete()
                part = GrowingFile(path / _PART.format(len(names)), file_bytes, progressed)
                names.append([])
            part.add(name, tensor)
            names[-1].append(name)
            total_bytes += tensor.nbytes
        if part is not None:
            part.complete()
    finally:
        if part is not None:
            part.close()
    _name_files(path, names, total_bytes)
    return total_bytes


def _name_files(path: Path, names: list[list[str]], total_bytes: int) -> None:
    if len(names) == 1:
        os.replace(path / _PART.format(0), path / SINGLE)
        return
    weight_map = {}
    for index, held in enumerate(names):
        final = f"model-{index + 1:05d}-of-{len(names):05d}.safetensors"
        os.replace(path / _PART.format(index), path / final)
        weight_map.update(dict.fromkeys(held, final))
    write_text(
        path / INDEX,
        json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=2, sort_keys=True),
    )


def companions(source: Path) -> dict[str, Path]:
    """Configuration, tokenizer and chat templates of a model directory, by name within it: every small file but
    weights.
    """
    files = [
        file
        for file in sorted(source.iterdir())
        if file.is_file() and file.suffix in {".json", ".jinja", ".txt", ".model"} and file.name != INDEX
    ]
    return {file.relative_to(source).as_posix(): file for file in [*files, *sorted(source.glob(NAMED_TEMPLATES))]}
