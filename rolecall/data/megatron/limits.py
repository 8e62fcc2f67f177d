"""The limits of actor.backend megatron: its models, by config.json, and the layouts of each. No torch.

Owns every complaint of that back end that needs no weights to be loaded: `rolecall check` tells it before anything
starts, and a rank that is about to build the model asks the same. What of layouts holds for every back end is
data/model/trainable.py.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from rolecall.data.megatron.stages import split_layers
from rolecall.data.model.files import num_experts, text_config
from rolecall.data.model.rope import kind_of_rope, rope_parameters
from rolecall.errors import ConfigError
from rolecall.settings import LayoutSection, MegatronSection

BY_SIGMOID = ("glm4_moe", "deepseek_v3", "glm4_moe_lite")
"""Models whose experts are weighed by sigmoids, and chosen by these with a bias for each."""
MODEL_TYPES = (
    *("llama", "mistral", "qwen2", "seed_oss", "qwen3", "mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v2"),
    *BY_SIGMOID,
)
"""model_type of config.json, of the models that rolecall/training/megatron/families.py has a map for."""
ROPES = ("default", "linear", "llama3", "yarn")
"""Rotations whose angles depend on a token's position alone."""
ABSENT: dict[str, dict[str, Any]] = {
    "glm4_moe": {"partial_rotary_factor": 0.5, "first_k_dense_replace": 1},
    "deepseek_v3": {"n_group": 8, "topk_group": 4, "num_experts_per_tok": 8, "first_k_dense_replace": 3},
    "glm4_moe_lite": {"mlp_layer_types": ["dense"]},
}
"""Values that transformers takes where config.json is silent, as far as the limits depend on them, by model_type."""


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
    text = ABSENT.get(text.get("model_type", ""), {}) | text
    _check_model(text, where)
    split_layers(path, parallel, megatron, setting)
    _check_widths(text, parallel, where)
    if num_experts(text):
        _check_experts(parallel, megatron, num_ranks, where)


def _check_model(text: dict[str, Any], where: str) -> None:
    kind = text.get("model_type")
    if kind == "mistral" and "layer_types" in text:  # so transformers takes it
        kind = "ministral"
    if kind not in MODEL_TYPES:
        raise ConfigError(
            f"{where}: actor.backend megatron has no map for a model of type {kind}, only for "
            f"{', '.join(MODEL_TYPES)}; use one of these, or actor.backend fsdp"
        )
    rope = kind_of_rope(text)
    wrong = {
        f"rotary positions of type {rope}": rope not in ROPES,
        "yarn that makes only a part of queries and keys longer": rope == "yarn" and _in_part(text),
        f"activation {text.get('hidden_act')}": text.get("hidden_act", "silu") != "silu",
        **(_of_sigmoid(text) if kind in BY_SIGMOID else _of_softmax(text)),
        "biases on its output projections (attention_bias)": _has_output_bias(text),
        "biases in its MLP (mlp_bias)": bool(text.get("mlp_bias")),
    }
    for what, found in wrong.items():
        if found:
            raise ConfigError(
                f"{where} has {what}, which actor.backend megatron does not compute; use another model, or "
                "actor.backend fsdp"
            )


def _of_softmax(text: dict[str, Any]) -> dict[str, bool]:
    method = text.get("topk_method") or "greedy"
    return {
        f"experts that are chosen by {method}": method != "greedy",
        "one expert for a token, whose weight is always 1": _has_one_choice(text) and has_normalized_weights(text),
    }


def _of_sigmoid(text: dict[str, Any]) -> dict[str, bool]:
    chosen, groups = text.get("num_experts_per_tok") or 0, text.get("topk_group") or 1
    by_two = (text.get("n_group") or 1) == 1 or chosen // groups == 2
    return {
        # whose worth is that of their two best experts to transformers, of chosen / topk_group to Megatron
        f"groups of experts of which {groups} are chosen for {chosen} experts (topk_group)": not by_two,
        "experts whose weights do not add up to 1 (norm_topk_prob)": not has_normalized_weights(text),
        "one expert for a token": _has_one_choice(text),
        "rotary positions in halves (rope_interleave)": not text.get("rope_interleave", True),
    }


def _has_one_choice(text: dict[str, Any]) -> bool:
    return bool(text.get("num_experts_per_tok") == 1)


def has_normalized_weights(text: dict[str, Any]) -> bool:
    """Whether the weights of a token's experts are made to add up to 1, by a model's configuration."""
    kind = text["model_type"]
    if kind in ("mixtral", "deepseek_v2"):  # whatever config.json says
        return bool(kind == "mixtral")
    return bool(text.get("norm_topk_prob", kind in BY_SIGMOID))


def _has_output_bias(text: dict[str, Any]) -> bool:
    if text.get("model_type") == "glm4_moe":  # whose attention_bias is of queries, keys and values alone
        return False
    return bool(text.get("attention_out_bias", text.get("attention_bias")))


def _in_part(text: dict[str, Any]) -> bool:
    """Whether yarn, which makes what it turns longer, turns a part alone. DeepSeek's two factors cancel out."""
    rope = rope_parameters(text)
    if text.get("kv_lora_rank"):
        scale, factor = rope.get("mscale"), rope.get("attention_factor")
        return factor != 1 if factor is not None else not scale or scale != rope.get("mscale_all_dim")
    part: float = rope.get("partial_rotary_factor") or text.get("partial_rotary_factor") or 1.0
    return part < 1


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
    if not num_experts(text) or _has_dense_layers(text):
        found["intermediate_size"] = text.get("intermediate_size", 0)
    if width := shared_experts_width(text):
        found["width of shared experts"] = width
    return found


def shared_experts_width(text: dict[str, Any]) -> int:
    """The inner width of the experts of a layer that all tokens go to, by a model's configuration; 0: none."""
    several = (text.get("n_shared_experts") or 0) * text.get("moe_intermediate_size", 0)
    return int(several or text.get("shared_expert_intermediate_size") or 0)


def _has_dense_layers(text: dict[str, Any]) -> bool:
    """Whether any layer of a mixture has no experts, by one of the names under which models tell it."""
    some = text.get("mlp_only_layers") or text.get("decoder_sparse_step", 1) != 1
    return bool(some or text.get("first_k_dense_replace") or "dense" in (text.get("mlp_layer_types") or ()))


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
