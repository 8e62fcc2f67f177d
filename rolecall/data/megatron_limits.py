"""The limits of actor.backend megatron: its models, by config.json, and the layouts of each. No torch.

Owns every complaint of that back end that needs no weights to be loaded: `rolecall check` tells it before anything
starts, and a rank that is about to build the model asks the same. What of layouts holds for every back end is
model_files.check_parallel.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rolecall.data.megatron.stages import split_layers
from rolecall.data.model_files import num_experts, text_config
from rolecall.errors import ConfigError
from rolecall.settings import LayoutSection, MegatronSection

MODEL_TYPES = ("llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v2")
"""model_type of config.json, of the models that rolecall/training/megatron/families.py has a map for."""
ROPES = ("default", "linear", "llama3")
"""Rotations whose angles depend on a token's position alone, unscaled."""


def require_installed() -> None:
    """ConfigError when megatron-core is not there."""
    if find_spec("megatron") is None:
        raise ConfigError(
            "actor.backend is megatron, but megatron-core is not installed; pip install 'rolecall[megatron]', or use "
            "fsdp"
        )


def check_megatron(
    path: Path, parallel: LayoutSection, megatron: MegatronSection, num_ranks: int, setting: str = "model.path"
) -> None:
    """ConfigError when the model at `path`, which `setting` names, is not computed, or not over `num_ranks` ranks as
    `parallel` and `megatron` say.
    """
    text, where = text_config(path, setting), f"{setting} {path}"
    _check_model(text, where)
    split_layers(path, parallel, megatron, setting)
    _check_widths(text, parallel, where)
    if num_experts(text):
        _check_experts(parallel, megatron, num_ranks, where)


def _check_model(text: dict[str, Any], where: str) -> None:
    kind = text.get("model_type")
    if kind not in MODEL_TYPES:
        raise ConfigError(
            f"{where}: actor.backend megatron has no map for a model of type {kind}, only for "
            f"{', '.join(MODEL_TYPES)}; use one of these, or actor.backend fsdp"
        )
    rope = text.get("rope_parameters") or text.get("rope_scaling") or {}
    kind_of_rope = rope.get("rope_type") or rope.get("type") or "default"
    some_dense = text.get("mlp_only_layers") or text.get("decoder_sparse_step", 1) != 1
    method = text.get("topk_method") or "greedy"
    wrong = {
        "attention in sliding windows": _slides(text),
        f"rotary positions of type {kind_of_rope}": kind_of_rope not in ROPES and not _keeps_lengths(text, rope),
        f"activation {text.get('hidden_act')}": text.get("hidden_act", "silu") != "silu",
        "layers of which only some have experts": bool(num_experts(text) and some_dense),
        f"experts that are chosen by {method}": method != "greedy",
        "biases on its output projections (attention_bias)": bool(text.get("attention_bias")),
        "biases in its MLP (mlp_bias)": bool(text.get("mlp_bias")),
    }
    for what, found in wrong.items():
        if found:
            raise ConfigError(
                f"{where} has {what}, which actor.backend megatron does not compute; use another model, or "
                "actor.backend fsdp"
            )


def _keeps_lengths(text: dict[str, Any], rope: dict[str, Any]) -> bool:
    """Whether the rotation leaves lengths as they are: of yarns DeepSeek-V2's, whose two factors cancel each other."""
    is_yarn = (rope.get("rope_type") or rope.get("type")) == "yarn"
    scales = rope.get("mscale"), rope.get("mscale_all_dim")
    return text.get("model_type") == "deepseek_v2" and is_yarn and None not in scales and scales[0] == scales[1]


def _check_widths(text: dict[str, Any], parallel: LayoutSection, where: str) -> None:
    for name, width in _cut_widths(text).items():
        if width % parallel.tensor:
            raise ConfigError(
                f"{where}: parallel.tensor {parallel.tensor} does not divide the model's {name} {width}; choose a "
                "divisor, or 1"
            )


def _cut_widths(text: dict[str, Any]) -> dict[str, int]:
    """Returns the widths that tensor ranks have equal parts of, beside heads and vocabulary, by name."""
    found: dict[str, int] = {}
    if text.get("kv_lora_rank"):
        found["kv_lora_rank + qk_rope_head_dim"] = text["kv_lora_rank"] + text["qk_rope_head_dim"]
    if text.get("q_lora_rank"):
        found["q_lora_rank"] = text["q_lora_rank"]
    if not num_experts(text) or text.get("first_k_dense_replace"):
        found["intermediate_size"] = text.get("intermediate_size", 0)
    if text.get("n_shared_experts"):
        found["n_shared_experts x moe_intermediate_size"] = text["n_shared_experts"] * text["moe_intermediate_size"]
    return found


def _check_experts(parallel: LayoutSection, megatron: MegatronSection, num_ranks: int, where: str) -> None:
    of_a_stage = num_ranks // parallel.pipeline
    if parallel.tensor > 1 and not megatron.sequence_parallel:
        raise ConfigError(
            f"actor.megatron.sequence_parallel is off: Megatron's experts ({where}) need it where parallel.tensor cuts "
            "matrices; leave it on"
        )
    if of_a_stage % parallel.expert:
        raise ConfigError(
            f"parallel.expert {parallel.expert} does not divide the {of_a_stage} ranks of a pipeline stage ({where}); "
            "choose a divisor"
        )


def _slides(text: dict[str, Any]) -> bool:
    """Whether any layer attends in a window, by its name or as the Qwens tell it."""
    if text.get("layer_types"):
        return "sliding_attention" in text["layer_types"]
    first = text.get("max_window_layers", 0)
    return bool(
        text.get("use_sliding_window") and text.get("sliding_window") and first < text.get("num_hidden_layers", 0)
    )
