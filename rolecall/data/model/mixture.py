"""The shape of a mixture of experts by its config.json, and the bytes that one token's routing takes. No torch.

A token's routing is the ids of the experts that it was sent to, the k of each layer one after another; a layer without
experts has zeros. An id takes one byte, or two (little-endian) in a model of more than 256 experts. What makes and
reads those bytes with torch is rolecall/training/model/router_replay.py.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from rolecall.data.model.files import NUM_EXPERTS, num_experts, text_config
from rolecall.errors import ConfigError, InvalidInputError
from rolecall.settings import ActorSection
from rolecall.settings.sizes.layers import NUM_CHOSEN, num_chosen
from rolecall.wire import Array


@dataclass(frozen=True)
class Mixture:
    """The shape of a mixture of experts."""

    num_layers: int
    """Layers, those without experts included."""
    num_experts: int
    """Experts of a layer that a router chooses among."""
    num_chosen: int
    """Experts that a token is sent to in each layer."""

    @property
    def id_bytes(self) -> int:
        """Bytes of one expert's id."""
        return 1 if self.num_experts <= 256 else 2

    @property
    def width(self) -> int:
        """Bytes of one token's routing."""
        return self.num_layers * self.num_chosen * self.id_bytes

    def encode(self, ids_TLk: Array) -> Array:
        """uint8 [T, W] of ids of any integer type. InvalidInputError when they are not this mixture's."""
        shape = (self.num_layers, self.num_chosen)
        if ids_TLk.shape[1:] != shape or (ids_TLk.size and not 0 <= ids_TLk.min() <= ids_TLk.max() < self.num_experts):
            raise InvalidInputError(
                f"a routing of shape {ids_TLk.shape} with ids up to {ids_TLk.max(initial=0)} is not of a mixture of "
                f"{self.num_layers} layers that choose {self.num_chosen} of {self.num_experts} experts"
            )
        narrow = np.ascontiguousarray(ids_TLk, "u1" if self.id_bytes == 1 else "<i2")
        return narrow.reshape(len(ids_TLk), -1).view(np.uint8)


def read_mixture(path: Path) -> Mixture:
    """The mixture in the model directory `path`. ConfigError when config.json describes none."""
    text = text_config(path)
    counts = [text.get("num_hidden_layers"), num_experts(text), num_chosen(text)]
    numbers = [each for each in counts if isinstance(each, int) and each > 0]
    if len(numbers) < 3:
        raise ConfigError(
            f"actor.router_replay: model.path {path} is no mixture of experts (its config.json lacks one of "
            f"num_hidden_layers, {' or '.join(NUM_CHOSEN)} and {' or '.join(NUM_EXPERTS)}); leave it off"
        )
    return Mixture(*numbers)


def check_cpu_routing(actor: ActorSection) -> None:
    """ConfigError when rollouts on CPUs are to say which experts they sampled with: vLLM does on GPUs only."""
    if actor.router_replay == "r3":
        raise ConfigError(
            "actor.router_replay r3: vLLM says on GPUs only which experts it samples with; give rollout.devices, or "
            "use r2"
        )
