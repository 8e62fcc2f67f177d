"""Hugging Face model directories in and out: slices of safetensors read without loading the file, and a directory written tensor by tensor.

Owns names and files of weights. Nothing here knows FSDP: the engine says which rows of a tensor it wants.
"""

import errno
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from rolecall.errors import ConfigError, DiskFullError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
FILE_BYTES = 4 * 2**30
"""Most bytes of one exported safetensors file."""


class ModelFiles:
    """The weights of a model directory, by name."""

    def __init__(self, path: Path) -> None:
        """ConfigError when `path` holds no safetensors."""
        self.path = path
        if (path / INDEX).is_file():
            weight_map: dict[str, str] = json.loads((path / INDEX).read_text())["weight_map"]
            self._files = {name: path / file for name, file in weight_map.items()}
        elif (path / SINGLE).is_file():
            with safe_open(path / SINGLE, framework="pt") as file:
                self._files = dict.fromkeys(file.keys(), path / SINGLE)
        else:
            raise ConfigError(f"{path} has neither {SINGLE} nor {INDEX}; convert the model to safetensors")

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def tensor(self, name: str) -> torch.Tensor:
        """The whole tensor `name`, on the CPU, in the file's dtype. ConfigError when the directory has none."""
        if name not in self._files:
            raise ConfigError(f"{self.path} has no tensor {name!r}; it is not a checkpoint of the model that its config.json names")
        with safe_open(self._files[name], framework="pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
            return tensor

    def rows(self, name: str, start: int, end: int) -> torch.Tensor:
        """Rows start..end of the tensor `name` along its first dimension (the whole tensor when it has none), on the CPU, in the file's dtype."""
        with safe_open(self._files[name], framework="pt") as file:
            view = file.get_slice(name)
            tensor: torch.Tensor = view[start:end] if view.get_shape() else file.get_tensor(name)
            return tensor


def write_model(path: Path, source: Path, weights: Iterator[tuple[str, torch.Tensor]], *, writer: bool) -> int:
    """Writes `weights` and the configuration and tokenizer files of `source` as a model directory; returns the bytes of weights written by this rank.

    Every rank iterates (the tensors are gathered on the way), the `writer` alone keeps and writes. At most FILE_BYTES plus one tensor are held.
    DiskFullError on the writer, after the last tensor: ranks that gather must not be left waiting.
    """
    try:
        total = _write_files(path, source, weights) if writer else 0
    except (OSError, SafetensorError) as error:
        if not is_disk_full(error):
            raise
        raise DiskFullError(f"no space to export the model to {path}: {error}; free some, or keep fewer checkpoints") from error
    finally:
        for _ in weights:
            pass
    return total


def is_disk_full(error: Exception) -> bool:
    """Whether an error of writing a file, by Python or by safetensors (which keeps the number in its text only), means no space, quota or allowed size."""
    codes = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
    return (isinstance(error, OSError) and error.errno in codes) or any(f"os error {code})" in str(error) for code in codes)


def _write_files(path: Path, source: Path, weights: Iterator[tuple[str, torch.Tensor]]) -> int:
    held: dict[str, torch.Tensor] = {}
    files: list[dict[str, torch.Size]] = []
    total = held_bytes = 0
    path.mkdir(parents=True, exist_ok=True)
    _copy_companions(source, path)
    for name, tensor in weights:
        if held and held_bytes + tensor.nbytes > FILE_BYTES:
            files.append(_flush(path, len(files), held))
            held, held_bytes = {}, 0
        held[name] = tensor.detach().to("cpu", copy=True).contiguous()
        held_bytes += tensor.nbytes
        total += tensor.nbytes
    files.append(_flush(path, len(files), held))
    _name_files(path, files, total)
    return total


def _flush(path: Path, index: int, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Size]:
    save_file(tensors, path / f"part-{index:05d}.safetensors", metadata={"format": "pt"})
    return {name: tensor.shape for name, tensor in tensors.items()}


def _name_files(path: Path, files: list[dict[str, torch.Size]], total_bytes: int) -> None:
    if len(files) == 1:
        os.replace(path / "part-00000.safetensors", path / SINGLE)
        return
    weight_map = {}
    for index, names in enumerate(files):
        final = f"model-{index + 1:05d}-of-{len(files):05d}.safetensors"
        os.replace(path / f"part-{index:05d}.safetensors", path / final)
        weight_map.update(dict.fromkeys(names, final))
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": total_bytes}, "weight_map": weight_map}, indent=2, sort_keys=True))


def _copy_companions(source: Path, path: Path) -> None:
    """Configuration, tokenizer and chat template: every small file but weights."""
    for file in sorted(source.iterdir()):
        if file.is_file() and file.suffix in {".json", ".jinja", ".txt", ".model"} and file.name != INDEX:
            shutil.copyfile(file, path / file.name)
