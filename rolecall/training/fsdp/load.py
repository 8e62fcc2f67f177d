"""Filling a sharded model from a model directory: every rank reads only the rows it keeps.

Except of parameters that transformers fuses (conversion.py): those are read whole, one at a time.
"""

from pathlib import Path

import torch
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from rolecall.errors import ConfigError
from rolecall.training.conversion import Conversion
from rolecall.training.huggingface import ModelFiles
from rolecall.training.model import VALUE_HEAD, PackedModel, fill_buffers


def load_model(model: PackedModel, path: Path, *, device: torch.device, seed: int) -> None:
    """Gives storage on `device` to a sharded model on the meta device and reads its parameters.

    A value head that the directory lacks is made new from `seed`. ConfigError when any other tensor is missing or has another shape.
    """
    model.to_empty(device=device)
    model.hf.tie_weights()
    fill_buffers(model)
    files, conversion = ModelFiles(path), Conversion(model.hf)
    with torch.no_grad():
        for name, parameter in model.hf.named_parameters():
            assert isinstance(parameter, DTensor)
            start, end = rows_of(parameter)
            if name in files:
                rows = files.rows(name, start, end)
            elif name.startswith(VALUE_HEAD):
                rows = _new_head(name, parameter.shape, seed)[start:end]
            else:
                rows = conversion.from_checkpoint(name, parameter.shape, files.tensor)[start:end]
            local = parameter.to_local()
            if rows.shape != local.shape:
                raise ConfigError(f"{path}: tensor {name!r} does not have the shape {tuple(parameter.shape)} that its config.json says")
            local.copy_(rows)


def rows_of(tensor: DTensor) -> tuple[int, int]:
    """(start, end): the rows of the first dimension that this rank keeps."""
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return offset[0], offset[0] + shape[0]


def _new_head(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """Small and seeded, the same on every rank: first values are near 0, so that first advantages are near the returns."""
    if name.endswith("bias"):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator) / (shape[-1] + 1)
