"""The memory that a pass over packed tokens keeps until its backward pass, and what attention computes in it, by a
model's config.json.

    kept = activations(Path("/models/Qwen3-32B"), num_bytes=2)
    kept.per_token(recomputed=True)      # bytes, with actor.gradient_checkpointing

Counted are the tensors that transformers' own layers keep on a GPU, where attention is one kernel, and the head, whose
logits go through the vocabulary in blocks. Peaks on an H200 were within 4% of it (docs/log.md, 2026-11-27). Left out:
what is compiled keeps less, and so does a gated delta rule by the kernels of flash-linear-attention.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall.settings.sizes.families import FAMILIES, TOWERS, Family
from rolecall.settings.sizes.layers import UNREADABLE, Layer, language_model, layers_of, read_config

_UNREADABLE = (OSError, RecursionError, *UNREADABLE)
"""Raised where config.json is not there, or lacks what such a model has."""
_CHUNK = 64
"""Tokens that a gated delta rule computes at a time."""


@dataclass(frozen=True)
class Activations:
    """Bytes that a training pass keeps of each token until its backward pass."""

    num_layers: int
    layer_input: float
    """The input of one layer."""
    layer: float
    """All that the largest layer keeps, its input included."""
    layers: float
    """All that all of them keep."""
    ends: float
    """The last norm and the head."""
    attended: float
    """FLOPs of a token and one that it attends to, in all layers."""

    def per_token(self, *, recomputed: bool) -> float:
        """Bytes at the height of a pass: of all layers, or where they are `recomputed` of their inputs and of one."""
        return (self.num_layers * self.layer_input + self.layer if recomputed else self.layers) + self.ends


def activations(path: Path, num_bytes: int, num_tensor: int = 1) -> Activations | None:
    """The activations of the model at `path` that computes in numbers of `num_bytes`, on each of `num_tensor` ranks
    that share its matrices. None where the model is of another kind, or is not there, which others complain of.
    """
    try:
        text = language_model(read_config(path))
        family = FAMILIES.get(text.get("model_type", ""))
        return None if family is None else _of(text, family, num_bytes, num_tensor)
    except _UNREADABLE:
        return None


def tower_activations(path: Path, num_bytes: int) -> Activations | None:
    """The activations of the vision tower of the model at `path`, of each token that shows an image in place of each
    token. None where it has none that is known.
    """
    try:
        config = read_config(path)
        family, vision = TOWERS.get(config.get("model_type", "")), config.get("vision_config")
        return None if family is None or not vision else _of_tower(vision, family, num_bytes)
    except _UNREADABLE:
        return None


def _of_tower(vision: dict[str, Any], family: Family, size: int) -> Activations:
    """Each patch has what a token has, and its queries, keys and values also where one product made them."""
    hidden, num_patches = vision.get("embed_dim") or vision["hidden_size"], vision["spatial_merge_size"] ** 2
    width = vision["mlp_ratio"] * hidden if "mlp_ratio" in vision else vision[family.width_name]
    norms = (family.num_norms * family.norm.kept(size) + family.num_inputs * size) * hidden
    layer = num_patches * float(norms + 6 * size * hidden + family.widths * width * size)
    return Activations(
        num_layers=vision["depth"],
        layer_input=num_patches * size * hidden,
        layer=layer,
        layers=vision["depth"] * layer,
        ends=0.0,
        attended=0.0,
    )


def _of(text: dict[str, Any], family: Family, size: int, num_tensor: int) -> Activations:
    layers = layers_of(text)
    kept = [_layer(text, family, layer, size, num_tensor) for layer in layers]
    heads = text["num_attention_heads"]
    return Activations(
        num_layers=len(layers),
        layer_input=size * text["hidden_size"],
        layer=max(kept),
        layers=sum(kept),
        ends=(4 + 4 * size) * text["hidden_size"],
        attended=sum(4 * heads * _head_dim(text, layer) for layer in layers if layer.kind != "recurrent"),
    )


def _layer(text: dict[str, Any], family: Family, layer: Layer, size: int, num_tensor: int) -> float:
    hidden, norm = text["hidden_size"], family.norm.kept(size)
    whole = (family.num_norms * norm + family.num_inputs * size) * hidden
    if narrow := text.get("hidden_size_per_layer_input"):  # Gemma 4: a gate of a token's own, and its norm
        whole += (norm + size) * hidden + (4 + 4 * size) * narrow
    attention = _recurrence(text, size) if layer.kind == "recurrent" else _attention(text, family, layer, size)
    return float(whole + (attention + _feed_forward(text, family, layer, size)) / num_tensor)


def _attention(text: dict[str, Any], family: Family, layer: Layer, size: int) -> float:
    """Bytes of queries, keys, values, what comes of them, and their norms."""
    heads, head_dim = text["num_attention_heads"], _head_dim(text, layer)
    if text.get("kv_lora_rank"):  # latent; values are padded to the width of keys
        ranks = (text.get("q_lora_rank") or 0) + text["kv_lora_rank"]
        return float(4 * heads * head_dim * size + (4 + 2 * size) * ranks)
    keys = 0 if layer.reuses else layer.keys
    beside = size if family.fuses_values else 0  # of each number of queries and keys
    if family.norms_heads or text.get("use_qk_norm"):
        beside = family.norm.kept(size)
    kept = (2 * size + beside) * (heads + keys) * head_dim + 4 * heads
    if family.norms_values:
        kept += 4 * keys * head_dim
    if family.gates_attention:
        kept += 2 * size * heads * head_dim
    if text.get("attn_logit_softcapping"):  # no kernel has it: keys and values are repeated for their heads
        kept += 2 * size * (heads - keys) * head_dim
    return float(kept)


def _recurrence(text: dict[str, Any], size: int) -> float:
    """Bytes of a gated delta rule as transformers computes it with torch: mostly in float32, keys repeated for the
    heads of values, in chunks whose states all stay, and of sequences that were taken out of the pack.
    """
    heads, key, value = (text[f"linear_{name}"] for name in ("num_value_heads", "key_head_dim", "value_head_dim"))
    convolved = 2 * text["linear_num_key_heads"] * key + heads * value
    in_float32 = heads * (5 * _CHUNK + 6 * value + 8 * key + key * value / _CHUNK)
    return float(4 * in_float32 + size * (3 * heads * value + 2 * convolved + text["hidden_size"]))


def _head_dim(text: dict[str, Any], layer: Layer) -> int:
    if text.get("kv_lora_rank"):
        return int(text["qk_nope_head_dim"] + text["qk_rope_head_dim"])
    return layer.head_dim


def _feed_forward(text: dict[str, Any], family: Family, layer: Layer, size: int) -> float:
    """Bytes between the matrices of the feed-forward network, or of the experts that are chosen, and their rows."""
    hidden, chosen = text["hidden_size"], layer.num_chosen
    double = 2 if layer.reuses and text.get("use_double_wide_mlp") else 1
    dense = family.widths * text.get("intermediate_size", 0) * double * size
    if not chosen:
        return float(dense)
    width = text.get("moe_intermediate_size") or text["intermediate_size"]
    experts = chosen * (family.expert_widths * width + 2 * hidden) * size
    if text.get("enable_moe_block"):  # Gemma 4: beside the dense network, with three norms and the router's
        return float(dense + experts + (3 * family.norm.kept(size) + 4 + 2 * size) * hidden)
    shared = 4 * _num_shared(text) * width
    if family.gates_shared and (gated := text.get("shared_expert_intermediate_size")):
        shared = 4 * gated + hidden
    router = 4 * hidden if family.routes_in_float32 else 0
    return float(experts + shared * size + router)


def _num_shared(text: dict[str, Any]) -> int:
    names = ("n_shared_experts", "num_shared_experts", "moe_num_shared_experts")
    return next((text[name] for name in names if isinstance(text.get(name), int)), 0)
