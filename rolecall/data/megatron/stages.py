"""The stages of a pipeline over Megatron-Core: the layers of each, and the parameters that a rank has of them.

Both follow from the model's files and the layout alone, so that `rolecall check` says what the ranks will do. Whether a
model and a layout go together is for megatron/limits.py.
"""

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import prod
from pathlib import Path
from typing import Literal

from rolecall.data.model.adapters import adapted_matrices, sizes_of_experts
from rolecall.data.model.files import EMBEDDINGS, EXPERTS, language_shapes, num_experts, text_config
from rolecall.errors import ConfigError
from rolecall.settings import (
    ActorSection,
    CriticSection,
    LayoutSection,
    LoraSection,
    MegatronSection,
    TrainerSection,
)

Head = Literal["policy", "value"]
"""The end of a trainer's model: logits of the vocabulary, or one value a token, whose few parameters count nothing."""
_CUT_BY_COLUMNS = ("o_proj.weight", "down_proj.weight")
"""Ends of the names of matrices of which tensor ranks have columns; of others they have rows."""
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.")


@dataclass(frozen=True)
class RankParameters:
    """Most parameters of a rank, by what it does with them."""

    held: float
    """Parameters that it computes with, without adapters."""
    optimized: float
    """Parameters that it keeps moments of, and beneath half precision float32 values."""
    adapters: float | None = None
    """Parameters of its adapters, which are float32 and trained alone; None: the model is trained."""

    def parameter_bytes(self, size: int) -> float:
        """Bytes of the parameters of a model of `size` bytes each, adapters too."""
        return self.held * size + (self.adapters or 0) * 4

    def trained_bytes(self, size: int) -> float:
        """Bytes of all that the trainer of a model of `size` bytes a parameter keeps there, float32 gradients too."""
        if self.adapters is not None:
            return self.parameter_bytes(size) + self.adapters * 4 + self.optimized * 8
        return self.held * (size + 4) + self.optimized * (8 if size == 4 else 12)


@dataclass(frozen=True)
class _Sizes:
    """Numbers of parameters in a model's files."""

    layers: Counter[int]
    """Each layer's, without its experts."""
    experts: Counter[int]
    """All experts' together, of each layer."""
    embedding: int
    end: int
    """The last norm's, and the head's."""


def split_layers(
    path: Path, parallel: LayoutSection, megatron: MegatronSection, setting: str = "model.path", head: Head = "policy"
) -> tuple[int, ...]:
    """Returns the number of layers of each stage of the model at `path`, which `setting` names, in the order of layers:
    with virtual stages first of every rank's first, then of every rank's second. ConfigError when there are too few.

    None has more than an even share, rounded up, for memory is why there are stages. Those that are too many are taken
    off one by one, each time where most is computed, the head at the end counted as layers of as many active
    parameters; among equals from the earliest stage, which keeps the embedding and most activations.
    """
    text, num_stages = text_config(path, setting), parallel.pipeline * megatron.virtual_stages
    num_layers: int = text.get("num_hidden_layers", 0)
    if num_stages == 1:
        return (num_layers,)
    if num_layers < num_stages:
        raise ConfigError(
            f"{setting} {path} has {num_layers} layers, fewer than parallel.pipeline x megatron.virtual_stages = "
            f"{num_stages}; lower one of them"
        )
    sizes, most = _read(path, parallel, setting, head), -(-num_layers // num_stages)
    active = text.get("num_experts_per_tok", 0) / max(num_experts(text), 1)
    layer = (sizes.layers.total() + active * sizes.experts.total()) / num_layers
    counts, heads = [most] * num_stages, [0] * (num_stages - 1) + [sizes.embedding if head == "policy" else 0]
    for _ in range(most * num_stages - num_layers):
        left = [stage for stage in range(num_stages) if counts[stage] > 1]
        counts[max(left, key=lambda stage: counts[stage] * layer + heads[stage])] -= 1
    return tuple(counts)


def head_of(section: TrainerSection) -> Head:
    """Returns the head of the model that the trainer of `section` computes."""
    return "value" if isinstance(section, CriticSection) else "policy"


def rank_parameters(path: Path, section: TrainerSection, megatron: MegatronSection, setting: str) -> RankParameters:
    """Counts the parameters of the trainer of `section`, whose model at `path` `setting` names. ConfigError when it has
    too few layers.
    """
    parallel, head = section.parallel, head_of(section)
    counts, sizes = split_layers(path, parallel, megatron, setting, head), _read(path, parallel, setting, head)
    dense, experts = [0] * parallel.pipeline, [0] * parallel.pipeline
    dense[0] += sizes.embedding
    dense[-1] += sizes.end
    layers = iter(range(sum(counts)))
    for stage, count in enumerate(counts):
        for layer in islice(layers, count):
            dense[stage % parallel.pipeline] += sizes.layers[layer]
            experts[stage % parallel.pipeline] += sizes.experts[layer]
    held = max(whole / parallel.tensor + spread / parallel.expert for whole, spread in zip(dense, experts, strict=True))
    sharing = section.num_ranks / parallel.pipeline
    if isinstance(section, ActorSection | CriticSection) and section.lora is not None:
        name = "actor.lora" if isinstance(section, ActorSection) else "critic.lora"
        found = _adapters(path, section.lora, parallel, counts, name)
        optimized = max(dense * parallel.tensor + experts * parallel.expert for dense, experts in found) / sharing
        return RankParameters(held, optimized, max(map(sum, found)))
    return RankParameters(held, max(map(sum, zip(dense, experts, strict=True))) / sharing)


def _adapters(
    path: Path, lora: LoraSection, parallel: LayoutSection, counts: Sequence[int], setting: str
) -> list[tuple[float, float]]:
    """Elements of the adapters on a rank of each place in a pipeline whose stages have `counts` layers, and of its
    experts' adapters. One half of each is cut as its matrix is, the other whole; an expert's is its ranks' alone.
    """
    places = [stage % parallel.pipeline for stage, count in enumerate(counts) for _ in range(count)]
    dense, experts = [0.0] * parallel.pipeline, [0.0] * parallel.pipeline
    for name, (num_outputs, num_inputs) in adapted_matrices(path, lora, setting).items():
        if not (layer := _LAYER.match(name)):
            continue  # outside the layers none has any: refused where the model is built
        cut, whole = (num_inputs, num_outputs) if name.endswith(_CUT_BY_COLUMNS) else (num_outputs, num_inputs)
        dense[places[int(layer[1])]] += lora.rank * (cut / parallel.tensor + whole)
    for name, size in sizes_of_experts(path, setting).items() if lora.experts else ():
        layer = _LAYER.match(name)
        assert layer is not None  # experts are in layers
        experts[places[int(layer[1])]] += lora.rank * size / parallel.expert
    return list(zip(dense, experts, strict=True))


def _read(path: Path, parallel: LayoutSection, setting: str, head: Head) -> _Sizes:
    layers, experts, outside = Counter[int](), Counter[int](), Counter[str]()
    for name, shape in language_shapes(path, setting).items():
        if found := _LAYER.match(name):
            (experts if EXPERTS in name else layers)[int(found[1])] += prod(shape)
        else:
            outside[name] = prod(shape)
    embedding = sum(size for name, size in outside.items() if name.endswith(EMBEDDINGS))
    if head == "value":
        del outside["lm_head.weight"]
    # of several stages the last has a copy of an embedding that is its head, too
    has_copy = head == "policy" and parallel.pipeline > 1 and "lm_head.weight" not in outside
    return _Sizes(layers, experts, embedding, outside.total() - (0 if has_copy else embedding))
