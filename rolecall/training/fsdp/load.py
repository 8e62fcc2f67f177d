"""Filling a sharded model from a model directory: every rank reads only the part it keeps."""

from collections.abc import Callable

import torch

from rolecall.training.model.box import Box, local_part
from rolecall.training.model.lora import checkpoint_name
from rolecall.training.model.packed_model import PackedModel, fill_buffers
from rolecall.training.model.parameters import ParameterFiles


def load_model(
    model: PackedModel, files: ParameterFiles, *, device: torch.device, progressed: Callable[[], None]
) -> None:
    """Gives storage on `device` to a sharded model on the meta device and reads its parameters. ConfigError as of
    ParameterFiles.part.
    """
    model.to_empty(device=device)
    model.hf.tie_weights()
    fill_buffers(model)
    with torch.no_grad():
        for own_name, parameter in model.hf.named_parameters():
            part = files.part(checkpoint_name(own_name), parameter.shape, Box.of(parameter))
            local_part(parameter).copy_(part)
            progressed()
