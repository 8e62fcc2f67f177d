"""The parameters of a model in its directory, and of an adapter in its own, part by part: a rank reads what it keeps
and nothing else.

Of fused experts (conversion.py) that is the experts it keeps; what transformers fuses in other ways is read whole, one
parameter at a time.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from rolecall.data.model.adapters import ADAPTER
from rolecall.errors import ConfigError
from rolecall.training.model.box import Box
from rolecall.training.model.conversion import Conversion
from rolecall.training.model.huggingface import ModelFiles
from rolecall.training.model.lora import checkpoint_name, is_adapter, new_adapter, peft_name
from rolecall.training.model.packed_model import VALUE_HEAD, PackedModel, state_buffers

_FLOATING = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_DERIVED = (r"rotary_emb\.inv_freq$", r"\.masked_bias$", r"\.attn\.bias$")
"""Buffers that old checkpoints hold and models compute themselves."""


class ParameterFiles:
    """The parameters of one model, by transformers' names."""

    def __init__(
        self,
        model: PackedModel,
        path: Path,
        seed: int,
        adapter: Path | None,
        lora_setting: str,
    ) -> None:
        """ConfigError when a directory holds a tensor that has no place in `model`. A value head that `path` lacks,
        and adapters where no directory of peft's format is given, are made new from `seed`. `lora_setting` names the
        section that `adapter` is of.
        """
        self._path, self._seed = path, seed
        self._files, self._conversion = ModelFiles(path), Conversion(model.hf)
        _check_all_known(model, self._files, self._conversion)
        self._adapter = None if adapter is None else ModelFiles(adapter, ADAPTER)
        if self._adapter is not None:
            _check_adapter(model, self._adapter, lora_setting)

    def part(self, name: str, shape: torch.Size, box: Box) -> torch.Tensor:
        """Reads `box` of the parameter `name`, whose full shape is `shape`: on the CPU, in the file's dtype.

        ConfigError when it is missing, has another shape or is not of a floating type.
        """
        files, path = self._files, self._path
        if name in files and self._conversion.is_turned(name) and files.shape(name) != tuple(shape):
            experts, rows, columns = box.slices
            _check_shape(path, name, files.shape(name), (shape[0], shape[2], shape[1]))
            part = files.part(name, (experts, columns, rows)).transpose(1, 2)
        elif name in files:
            _check_shape(path, name, files.shape(name), shape)
            part = files.part(name, box.slices)
        elif name.startswith(VALUE_HEAD):
            part = _new_head(name, shape, self._seed)[box.slices]
        elif is_adapter(name) and self._adapter is not None:
            path, stored = self._adapter.path, peft_name(name)
            rows, *others = box.slices
            _check_shape(path, stored, self._adapter.shape(stored), (shape[0], shape[1:].numel()))
            part = self._adapter.part(stored, (rows,)).view(-1, *shape[1:])[:, *others]
        elif is_adapter(name):
            part = new_adapter(name, shape, self._seed)[box.slices]
        else:
            rows, *others = box.slices
            part = self._conversion.from_checkpoint(name, shape, files.tensor, rows)
            _check_shape(path, name, part.shape, (box.shape[0], *shape[1:]))
            part = part[:, *others]
        _check_dtype(path, name, part.dtype)
        return part


def _check_all_known(model: PackedModel, files: ModelFiles, conversion: Conversion) -> None:
    """A tensor without a place says that config.json describes another model, one of fewer layers say, which would
    train and be wrong.
    """
    known = {
        piece
        for name, parameter in (
            (checkpoint_name(name), parameter)
            for name, parameter in (
                *model.hf.named_parameters(remove_duplicate=False),
                *state_buffers(model.hf).items(),
            )
        )
        if not is_adapter(name)
        for piece in (name, *conversion.to_checkpoint(name, torch.empty(parameter.shape, device="meta")))
    }
    ignored = re.compile("|".join([*(model.hf._keys_to_ignore_on_load_unexpected or ()), *_DERIVED]))
    replaced = f"{model.replaced_head}." if model.replaced_head else None
    unknown = sorted(
        name
        for name in files
        if name not in known and not ignored.search(name) and not (replaced and name.startswith(replaced))
    )
    if unknown:
        raise ConfigError(
            f"{files.path}: {len(unknown)} tensors have no place in the {type(model.hf).__name__} that its "
            f"config.json describes, {unknown[0]!r} the first; "
            "use matching files"
        )


def _check_adapter(model: PackedModel, files: ModelFiles, setting: str) -> None:
    expected = {peft_name(name) for name, _ in model.hf.named_parameters() if is_adapter(name)}
    wrong = sorted(expected ^ set(files))
    if wrong:
        raise ConfigError(
            f"{setting}.start {files.path} is no adapter of {type(model.hf).__name__} as {setting} describes it: "
            f"{wrong[0]!r} is {'missing' if wrong[0] in expected else 'too many'} ({len(wrong)} in all); name the "
            "modules that it has, or another adapter"
        )


def _check_dtype(path: Path, name: str, dtype: torch.dtype) -> None:
    if dtype not in _FLOATING:
        raise ConfigError(
            f"{path}: tensor {name!r} is stored as {dtype}, which is quantized or no weight; use the model in "
            "bfloat16 or float32"
        )


def _check_shape(path: Path, name: str, found: Sequence[int], expected: Sequence[int]) -> None:
    if tuple(found) != tuple(expected):
        raise ConfigError(
            f"{path}: tensor {name!r} has the shape {tuple(found)}, not {tuple(expected)} as its config.json says; "
            "use matching files"
        )


def _new_head(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """Small and seeded, the same on every rank: first values are near 0, so that first advantages are near the
    returns.
    """
    if name.endswith("bias"):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) / (shape[-1] + 1)
