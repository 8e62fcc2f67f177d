"""Floating-point operations of a model, counted from the built model itself: what balances microbatches and what MFU is
made of.

    flops = count_flops(build_model(path, "policy", torch.float32))  # on the meta device: no storage, no arithmetic
    flops.forward.costs([310, 42])                                           # per sequence, for a partition
    flops.update.total([310, 42], num_scored=200)                            # forward and backward of both, for MFU

The model runs once forward and once backward on the meta device under torch's FLOP counter, some 50 ms a layer, so that
every matrix multiplication it makes is counted, whatever the architecture (experts, shared experts, latent attention):
no table of names and no reading of configurations. Attention's scores are left out of that count and come from the
shapes and sliding windows that each layer hands to packed attention: they alone are not linear in the length.
Recurrent layers tell what their rule costs. A vision tower is traced by itself: what it costs depends on images, which
are not known when work is planned, so it counts for MFU and balances nothing.

What counts is what the mathematics needs: a multiplication and an addition are 2; a causal query meets the keys up to
itself and not the whole square; the head runs on scored tokens; a backward pass has no product for a frozen weight;
what gradient checkpointing or flash attention compute twice counts once. Elementwise work is left out, as in torch's
counter. The convention is that of PaLM (arXiv:2204.02311, appendix B) but for the causal half.

Shapes: N tokens; H query heads, D size of a key, E size of a value.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import PreTrainedModel

from rolecall.errors import ConfigError, RoleCallError
from rolecall.training.model.attention.packed import TracedAttention
from rolecall.training.model.lora import experts_merged
from rolecall.training.model.packed_model import PackedModel, ValueModel, language_layers
from rolecall.training.model.vision import VisionTower
from rolecall.wire import Array

_WOULD_MIX = (
    "would mix the tokens of packed sequences (recurrent, linear or convolutional layers); use a model "
    "that mixes them by attention alone"
)
TRACED_TOKENS = 8
"""Length of the trace; what is counted is divided by it."""


@dataclass(frozen=True)
class AttentionCost:
    """Layers whose queries see equally far."""

    flops_per_pair: float
    """FLOPs of one query and one key, in all such layers and heads."""
    window: int | None = None
    """Keys that a query sees at most, itself included; None: all before it."""


@dataclass(frozen=True)
class CostModel:
    """FLOPs of one pass over sequences, by their lengths."""

    per_token: float
    """All but attention's scores and the head."""
    attention: tuple[AttentionCost, ...] = ()
    per_scored_token: float = 0.0
    """The head."""

    def costs(self, num_tokens: Sequence[int]) -> Array:
        """float64 [sequences], every token scored: which will be is not known when work is planned."""
        lengths = np.asarray(num_tokens, np.float64)
        return np.asarray((self.per_token + self.per_scored_token) * lengths + self._attention(lengths))

    def total(self, num_tokens: Sequence[int], num_scored: int, num_saved: int = 0) -> float:
        """Returns the FLOPs of all sequences together. `num_scored` of their tokens are scored, and `num_saved` are
        computed once with another's (prefixes.py).
        """
        lengths = np.asarray(num_tokens, np.float64)
        return float(
            self.per_token * (lengths.sum() - num_saved)
            + self._attention(lengths).sum()
            + self.per_scored_token * num_scored
        )

    def _attention(self, lengths: Array) -> Array:
        flops = np.zeros(lengths.shape)
        for part in self.attention:
            beyond = lengths * 0 if part.window is None else np.maximum(lengths - part.window, 0)
            flops += part.flops_per_pair * (lengths * (lengths + 1) - beyond * (beyond + 1)) / 2
        return flops


@dataclass(frozen=True)
class TowerCost:
    """FLOPs of a vision tower's pass over images, each once."""

    per_patch: float = 0.0
    """All but attention's scores."""
    per_pair: float = 0.0
    """Two patches of one image, in all layers that attend to whole images."""
    per_window_pair: float = 0.0
    """Two patches of one window, in all layers that attend within windows."""

    def total(self, images: Sequence[int], windows: Sequence[int]) -> float:
        """FLOPs of images, and the windows in them, of so many patches."""
        whole, parts = (np.asarray(lengths, np.float64) for lengths in (images, windows))
        pairs = self.per_pair * (whole**2).sum() + self.per_window_pair * (parts**2).sum()
        return float(self.per_patch * whole.sum() + pairs)


@dataclass(frozen=True)
class ModelFlops:
    """The FLOPs of one model with its head, of a forward pass and of an update."""

    forward: CostModel
    """A pass without gradients."""
    update: CostModel
    """Forward and backward."""
    head_size: int
    """Width of the widest head of keys or values: which attention kernels take its layer depends on it."""
    tower_forward: TowerCost = TowerCost()
    """What images cost beside the tokens that show them, in a pass without gradients."""
    tower_update: TowerCost = TowerCost()
    """The same forward and backward."""


def count_flops(model: PackedModel, trace: TracedAttention | None = None) -> ModelFlops:
    """Traces `model`, which is on the meta device and requires gradients where it trains (nowhere: `update` is
    `forward`), by `trace`, which is new where it is given.

    ConfigError when it cannot be trained packed: what mixes tokens beside packed attention would mix them across
    sequences.
    """
    trace = trace or TracedAttention()
    with _static_experts(model.hf), experts_merged(model.hf):
        forward, backward = _traced(model, trace)
    name, num_layers = type(model.hf).__name__, max(len(language_layers(model)), 1)
    if len(trace.layers) + len(trace.recurrences) < num_layers:
        raise ConfigError(
            f"{name} has {num_layers} layers, of which {len(trace.layers)} attend by transformers' attention "
            f"interface; the others {_WOULD_MIX}"
        )
    head = 2.0 * _head(model).numel()
    trains = any(p.requires_grad for p in model.parameters())
    recurrent = float(sum(trace.recurrences))
    pairs = Counter[int | None]()
    for layer in trace.layers:
        pairs[layer.sliding_window] += 2 * layer.num_heads * (layer.key_size + layer.value_size)
    attention = [
        tuple(AttentionCost(float(times * per_pair), window) for window, per_pair in pairs.items())
        for times in (1, 3 if trains else 1)
    ]
    head_update = head * (1 + trains + _head(model).requires_grad)
    head_size = max((size for layer in trace.layers for size in (layer.key_size, layer.value_size)), default=0)
    return ModelFlops(
        CostModel(forward + recurrent, attention[0], head),
        CostModel(forward + backward + (3 if trains else 1) * recurrent, attention[1], head_update),
        head_size,
        *(_tower(model.vision) if model.vision is not None else ()),
    )


def _tower(vision: VisionTower) -> tuple[TowerCost, TowerCost]:
    """The costs of a pass of images through the tower, and of an update."""
    num_rows, num_columns = vision.merge * 2, vision.merge * 2
    trace = TracedAttention()
    with FlopCounterMode(display=False) as counter:
        features_VH = vision.trace(num_rows, num_columns, trace)
        forward = counter.get_total_flops()
        if features_VH.requires_grad:
            features_VH.sum().backward()  # type: ignore[no-untyped-call]
    vision.module.zero_grad(set_to_none=True)
    update, times = counter.get_total_flops(), 3 if features_VH.requires_grad else 1
    num_patches = num_rows * num_columns
    pairs = Counter[bool]()
    for index, layer in enumerate(trace.layers):
        pairs[vision.sees_windows(index)] += 2 * layer.num_heads * (layer.key_size + layer.value_size)
    return (
        TowerCost(forward / num_patches, pairs[False], pairs[True]),
        TowerCost(update / num_patches, times * pairs[False], times * pairs[True]),
    )


@contextmanager
def _static_experts(hf: PreTrainedModel) -> Iterator[None]:
    """Experts computed by the one implementation whose shapes do not depend on which of them a token chooses; each
    token meets exactly its own.
    """
    if not hf._can_set_experts_implementation():
        yield
        return
    before = hf.get_experts_implementation()
    hf.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        hf.set_experts_implementation(before)


def _traced(model: PackedModel, trace: TracedAttention) -> tuple[float, float]:
    """FLOPs per token of the backbone, forward and backward, without attention's scores."""
    ids_N = torch.zeros(TRACED_TOKENS, dtype=torch.int64, device="meta")
    name = type(model.hf).__name__
    try:
        with FlopCounterMode(display=False) as counter:
            hidden_NH = model.hidden_NH(ids_N, ids_N, trace)
            forward = counter.get_total_flops()
            if hidden_NH.requires_grad:
                hidden_NH.sum().backward()  # type: ignore[no-untyped-call]
    except RoleCallError:
        raise
    except Exception as error:  # an edge: the code of any architecture
        raise ConfigError(
            f"{name} cannot be followed without data, so its work cannot be counted or balanced ({error}); use "
            "another architecture"
        ) from error
    if torch.ops.aten.convolution in counter.get_flop_counts()["Global"]:
        raise ConfigError(f"{name} has convolutions over tokens, which {_WOULD_MIX}")
    model.zero_grad(set_to_none=True)
    return forward / TRACED_TOKENS, (counter.get_total_flops() - forward) / TRACED_TOKENS


def _head(model: PackedModel) -> torch.nn.Parameter:
    head = model.head if isinstance(model, ValueModel) else model.hf.get_output_embeddings()
    weight = head.weight
    assert isinstance(weight, torch.nn.Parameter)
    return weight
