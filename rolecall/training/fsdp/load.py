"""Filling a sharded model from a model directory: every rank reads only the part it keeps."""

from collections.abc import Callable

import torch

from rolecall.training.model.box import Box, local_part
from rolecall.training.model.lora import checkpoint_name
from rolecall.training.model.packed_model import PackedModel, fill_buffers, state_buffers
from rolecall.training.model.parameters import ParameterFiles


def load_model(
    model: PackedModel, files: ParameterFiles, *, device: torch.device, progressed: Callable[[], None]
) -> None:
    """Gives storage on `device` to a sharded model on the meta device and reads its parameters and state buffers.
    ConfigError as of ParameterFiles.part.
    """
    model.to_empty(device=device)
    model.hf.tie_weights()
    fill_buffers(model)
    with torch.no_grad():
        for own_name, tensor in (*model.hf.named_parameters(), *state_buffers(model.hf).items()):
            part = files.part(checkpoint_name(own_name), tensor.shape, Box.of(tensor))
            local_part(tensor).copy_(part)
            progressed()
