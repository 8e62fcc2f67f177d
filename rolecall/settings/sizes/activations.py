"""The memory that a pass over packed tokens keeps until its backward pass, and what attention computes in it, by a
model's config.json.

    kept = activations(Path("/models/Qwen3-32B"), num_bytes=2)
    kept.per_token(recomputed=True)      # bytes, with actor.gradient_checkpointing

Counted are the tensors that transformers' own layers keep on a GPU, where attention is one kernel, and the head, whose
logits go through the vocabulary in blocks. Peaks on an H200 were within 4% of it (docs/log.md, 2026-11-27). Left out:
what is compiled keeps less.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_DENSE = ("llama", "mistral", "qwen2", "seed_oss", "qwen3", "phi3", "granite", "smollm3", "glm4", "gemma3_text")
_ROUTED_IN_FLOAT32 = ("deepseek_v2", "deepseek_v3", "glm4_moe", "glm4_moe_lite")
"""Values of model_type of mixtures whose routers read float32."""
_MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe", *_ROUTED_IN_FLOAT32)
_NORMED_HEADS = ("qwen3", "qwen3_moe")
"""Values of model_type whose queries and keys have norms of their own."""


@dataclass(frozen=True)
class Activations:
    """Bytes that a training pass keeps of each token until its backward pass."""

    num_layers: int
    layer_input: float
    """The input of one layer."""
    layer: float
    """All that one layer keeps, its input included."""
    ends: float
    """The last norm and the head."""
    attended: float
    """FLOPs of a token and one that it attends to, in all layers."""

    def per_token(self, *, recomputed: bool) -> float:
        """Bytes at the height of a pass: of all layers, or where they are `recomputed` of their inputs and of one."""
        layers = self.num_layers * self.layer_input + self.layer if recomputed else self.num_layers * self.layer
        return layers + self.ends


def activations(path: Path, num_bytes: int, num_tensor: int = 1) -> Activations | None:
    """The activations of the model at `path` that computes in numbers of `num_bytes`, on each of `num_tensor` ranks
    that share its matrices. None where the model is of another kind, or is not there, which others complain of.
    """
    try:
        text = json.loads((path / "config.json").read_text(encoding="utf-8"))
        is_known = isinstance(text, dict) and text.get("model_type") in (*_DENSE, *_MIXTURES)
        return _of(text, num_bytes, num_tensor) if is_known else None
    except (OSError, ValueError, LookupError, TypeError, ZeroDivisionError, RecursionError):
        return None


def _of(text: dict[str, Any], size: int, num_tensor: int) -> Activations:
    hidden = text["hidden_size"]
    shared = _attention(text, size) + _feed_forward(text, size)
    return Activations(
        num_layers=text["num_hidden_layers"],
        layer_input=size * hidden,
        layer=_norms(text, size) * hidden + shared / num_tensor,
        ends=(4 + 4 * size) * hidden,
        attended=4 * text["num_attention_heads"] * _head_dim(text) * text["num_hidden_layers"],
    )


def _norms(text: dict[str, Any], size: int) -> int:
    """Bytes of a layer's norms, of each number of a hidden state."""
    match text["model_type"]:
        case "gemma3_text":  # four, each all in float32; what two of them give is a matrix's input
            return 4 * 8 + 2 * size
        case "glm4":  # two more, behind matrices
            return 2 * (4 + 2 * size) + 2 * (4 + size)
        case _:  # normalized in float32, rounded, and multiplied by the weight
            return 2 * (4 + 2 * size)


def _attention(text: dict[str, Any], size: int) -> float:
    """Bytes of queries, keys, values, what comes of them, and their norms."""
    heads, head_dim = text["num_attention_heads"], _head_dim(text)
    if text.get("kv_lora_rank"):  # latent; values are padded to the width of keys
        ranks = (text.get("q_lora_rank") or 0) + text["kv_lora_rank"]
        return float(4 * heads * head_dim * size + (4 + 2 * size) * ranks)
    keys = text.get("num_key_value_heads") or heads
    beside = 0  # of each number of queries and keys
    if text["model_type"] in _NORMED_HEADS or text.get("use_qk_norm"):
        beside = 4 + size
    elif text["model_type"] == "gemma3_text":
        beside = 8
    elif text["model_type"] == "phi3":  # values are a part of what one product made, which stays whole
        beside = size
    return float((2 * size + beside) * (heads + keys) * head_dim + 4 * heads)


def _head_dim(text: dict[str, Any]) -> int:
    if text.get("kv_lora_rank"):
        return int(text["qk_nope_head_dim"] + text["qk_rope_head_dim"])
    return int(text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"])


def _feed_forward(text: dict[str, Any], size: int) -> float:
    """Bytes of the gate's input, its activation, what it multiplies, and the product; of an expert, its rows too."""
    if text["model_type"] in _DENSE:
        return float(4 * text["intermediate_size"] * size)
    hidden, chosen = text["hidden_size"], text["num_experts_per_tok"]
    width = text.get("moe_intermediate_size") or text["intermediate_size"]
    shared = 4 * (text.get("n_shared_experts") or 0) * width
    if gated := text.get("shared_expert_intermediate_size"):
        shared = 4 * gated + hidden
    router = 4 * hidden if text["model_type"] in _ROUTED_IN_FLOAT32 else 0
    return float((chosen * (4 * width + 2 * hidden) + shared) * size + router)
