"""The layers of a language model as its config.json has them, each with the sizes by which memory is reckoned: of a
training pass (activations.py) and of a rollout's cache (data/model/cache_sizes.py).

Not how a family computes a layer. Read are configurations as publishers write them and as transformers saves them.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, ZeroDivisionError)
"""Raised where a configuration lacks what such a model has, or has something else in its place."""
NUM_CHOSEN = ("num_experts_per_tok", "top_k_experts")
"""Names under which architectures keep how many of a layer's experts a token is sent to."""
_DENSE_AT_FIRST = ("first_k_dense_replace", "num_dense_layers")
"""Names under which mixtures keep how many of their first layers have no experts."""
_EVERY = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2, "olmo3": 4, "exaone4": 4, "afmoe": 4}
"""Layers of which the last attends to all tokens and the others within a window, where config.json does not say."""
_ALL_WITHIN = ("mistral", "mixtral", "phi3", "starcoder2")
"""Values of model_type whose layers all attend within sliding_window, where config.json has one."""
_RECURRENT_BUT_EVERY = {"qwen3_next": 4, "qwen3_5_text": 4, "qwen3_5_moe_text": 4}
"""Layers of which the last attends and the others hand on a state, where config.json does not say."""


@dataclass(frozen=True)
class Layer:
    """A layer's attention and its experts."""

    kind: Literal["full", "window", "recurrent"]
    keys: int
    """Heads of keys and values; 0: those of an earlier layer."""
    head_dim: int
    window: int
    """Tokens that it attends to at most; 0: all."""
    num_chosen: int
    """Experts that a token is sent to; 0: it has none."""
    reuses: bool
    """Whether it attends to keys and values of an earlier layer."""


def read_config(path: Path) -> dict[str, Any]:
    """Reads config.json in `path`. OSError, ValueError or RecursionError where there is none."""
    config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    return config if isinstance(config, dict) else {}


def language_model(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a configuration, which is the whole of most."""
    return dict(config.get("text_config") or config)


def num_chosen(text: dict[str, Any]) -> int:
    """The experts of a layer that a token is sent to, by a model's configuration; 0 in a dense model."""
    return next((text[name] for name in NUM_CHOSEN if isinstance(text.get(name), int)), 0)


def layers_of(text: dict[str, Any]) -> list[Layer]:
    """Every layer of the language model of the configuration `text`. One of UNREADABLE where it lacks what it must
    have.
    """
    return [_layer(text, number) for number in range(text["num_hidden_layers"])]


def _layer(text: dict[str, Any], number: int) -> Layer:
    kind = _kind(text, number)
    own = (text.get("per_layer_config") or {}).get(str(number)) or {}  # Gemma 4, as transformers saves it
    if kind == "full" and text.get("global_head_dim"):  # and as its publisher does
        own = {"head_dim": text["global_head_dim"], "num_key_value_heads": text.get("num_global_key_value_heads")}
    keys = own.get("num_key_value_heads") or text.get("num_key_value_heads") or text["num_attention_heads"]
    return Layer(
        kind=kind,
        keys=keys,
        head_dim=own.get("head_dim") or text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"],
        window=text["sliding_window"] if kind == "window" else 0,
        num_chosen=num_chosen(text) if _is_sparse(text, number) else 0,
        reuses=number >= text["num_hidden_layers"] - (text.get("num_kv_shared_layers") or 0),
    )


def _kind(text: dict[str, Any], number: int) -> Literal["full", "window", "recurrent"]:
    family, kinds = text.get("model_type"), text.get("layer_types")
    window = text.get("sliding_window") if text.get("use_sliding_window", True) else None
    if kinds:
        if kinds[number] == "linear_attention":
            return "recurrent"
        return "window" if kinds[number] == "sliding_attention" and window else "full"
    if every := text.get("full_attention_interval") or _RECURRENT_BUT_EVERY.get(str(family)):
        return "full" if (number + 1) % every == 0 else "recurrent"
    if not window:
        return "full"
    every = text.get("sliding_window_pattern") or _EVERY.get(str(family))
    if isinstance(every, int):
        return "full" if (number + 1) % every == 0 else "window"
    return "window" if family in _ALL_WITHIN else "full"


def _is_sparse(text: dict[str, Any], number: int) -> bool:
    """Whether a layer of a mixture has experts."""
    if kinds := text.get("mlp_layer_types"):
        return bool(kinds[number] == "sparse")
    first = next((text[name] for name in _DENSE_AT_FIRST if isinstance(text.get(name), int)), 0)
    is_dense = number < first or number in (text.get("mlp_only_layers") or ())
    return not is_dense and (number + 1) % (text.get("decoder_sparse_step") or 1) == 0
