"""The stages of a pipeline over Megatron-Core: the layers of each, and the parameters that a rank has of them.

Both follow from the model's files and the layout alone, so that `rolecall check` says what the ranks will do. Whether a
model and a layout go together is for megatron_limits.py.
"""

import re
from dataclasses import dataclass
from math import prod
from pathlib import Path

from rolecall.data.model_files import EMBEDDINGS, EXPERTS, model_shapes, num_experts, text_config
from rolecall.settings import LayoutSection, MegatronSection

_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\.")


@dataclass(frozen=True)
class RankParameters:
    """Parameters on the rank that computes with most of them."""

    held: float
    """Those that it computes with."""
    optimized: float
    """Those that it keeps moments of."""


@dataclass(frozen=True)
class _Sizes:
    """Numbers of parameters in a model's files."""

    layers: list[int]
    """Of each layer, without its experts."""
    experts: list[int]
    """Of all experts of each layer."""
    embedding: int
    end: int
    """Of what comes after the layers; a tied head, which the last of several stages has too, included."""


def split_layers(
    path: Path, parallel: LayoutSection, megatron: MegatronSection, setting: str = "model.path"
) -> tuple[int, ...]:
    """Returns the number of layers of each stage of the model at `path`, which `setting` names, in the order of layers:
    with virtual stages first of every rank's first, then of every rank's second.

    None has more than an even share, rounded up, for memory is why there are stages. Those that are too many are taken
    off one by one, each time where most is computed, the head at the end counted as layers of as many active
    parameters; among equals from the earliest stage, which keeps the embedding and most activations.
    """
    sizes, text = _read(path, parallel, setting), text_config(path, setting)
    num_layers, num_stages = len(sizes.layers), parallel.pipeline * megatron.virtual_stages
    active = text.get("num_experts_per_tok", 0) / max(num_experts(text), 1)
    layer = (sum(sizes.layers) + active * sum(sizes.experts)) / num_layers
    most = -(-num_layers // num_stages)
    counts, heads = [most] * num_stages, [0] * (num_stages - 1) + [sizes.embedding]
    for _ in range(most * num_stages - num_layers):
        full = [stage for stage in range(num_stages) if counts[stage] > 1]
        counts[max(full, key=lambda stage: counts[stage] * layer + heads[stage])] -= 1
    return tuple(counts)


def rank_parameters(
    path: Path, parallel: LayoutSection, megatron: MegatronSection, num_ranks: int, setting: str = "model.path"
) -> RankParameters:
    """Counts the parameters of a trainer of `num_ranks` ranks, whose model at `path` `setting` names."""
    counts, sizes = split_layers(path, parallel, megatron, setting), _read(path, parallel, setting)
    dense, experts = [0] * parallel.pipeline, [0] * parallel.pipeline
    dense[0] += sizes.embedding
    dense[-1] += sizes.end
    layer = 0
    for stage, count in enumerate(counts):
        own = slice(layer, layer := layer + count)
        dense[stage % parallel.pipeline] += sum(sizes.layers[own])
        experts[stage % parallel.pipeline] += sum(sizes.experts[own])
    ranks_of_stage = num_ranks // parallel.pipeline
    found = [
        RankParameters(one / parallel.tensor + many / parallel.expert, (one + many) / ranks_of_stage)
        for one, many in zip(dense, experts, strict=True)
    ]
    return max(found, key=lambda rank: rank.held)


def _read(path: Path, parallel: LayoutSection, setting: str) -> _Sizes:
    num_layers: int = text_config(path, setting)["num_hidden_layers"]
    layers, experts, outside = [0] * num_layers, [0] * num_layers, dict[str, int]()
    for name, shape in model_shapes(path, setting).items():
        if found := _LAYER.match(name):
            (experts if EXPERTS in name else layers)[int(found[1])] += prod(shape)
        else:
            outside[name] = prod(shape)
    embedding = sum(size for name, size in outside.items() if name.endswith(EMBEDDINGS))
    is_copied = parallel.pipeline > 1 and "lm_head.weight" not in outside
    return _Sizes(layers, experts, embedding, sum(outside.values()) - (0 if is_copied else embedding))
