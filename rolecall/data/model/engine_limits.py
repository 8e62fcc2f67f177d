"""The limits of vLLM with a run's model on the devices of its rollouts: said before it dies as it starts, or computes
something else than was asked for.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from rolecall.data.images.tokens import read_visual_tokens
from rolecall.data.model.files import (
    EXPERTS,
    QWEN3_5_TEXT,
    has_recurrent_layers,
    max_model_tokens,
    model_json,
    model_shapes,
    tensor_names,
    text_config,
    values_of_layers,
)
from rolecall.data.model.mixture import check_cpu_routing
from rolecall.data.model.rope import kind_of_rope, rope_parameters
from rolecall.data.shift_plan import check_cpu_sleep
from rolecall.data.vllm_files import check_engine_arguments
from rolecall.errors import ConfigError
from rolecall.settings import ModelServer, RunSettings

CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
"""Head dimensions that vLLM's attention on CPUs takes; with another its engine starts, and dies of the first prompt."""
CPU_BLOCK_TOKENS = 32
"""Tokens that a cache block on CPUs has a multiple of; with another vLLM loads the model first and refuses it then."""
_CPU_DELTA_RULE_DIMS = (64, 128)
"""Head dimensions, the same of keys and values, that vLLM's gated delta rule takes on CPUs, in bfloat16 alone."""
_GLM_EPSILON = 1e-5
"""What the norms of a glm4v's vision tower add, to vLLM where the top of config.json has no rms_norm_eps."""
_OF_QWEN = ("qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3")
"""Values of model_type that vLLM computes by its Qwen 2."""


def engine_tokens(settings: RunSettings) -> int:
    """Tokens of the longest sequence that the rollouts' engines take: their max_model_len."""
    return min(max_model_tokens(settings.model.path), settings.longest_trajectory)


def check_engine(settings: RunSettings) -> None:
    """ConfigError when the rollouts' vLLM cannot run the model as the settings ask; reads the model's JSON files."""
    check_engine_arguments(settings.rollout.engine)
    _check_split(settings.model.path, settings.rollout.tensor_parallel_size)
    _check_stages(settings.model.path, settings.rollout.pipeline_parallel_size)
    _check_images(settings.model.path)
    _check_seeing(settings.model.path, "model.path")
    _check_gpt_oss(settings.model.path, "model.path")
    _check_stablelm(settings.model.path, "model.path")
    _check_windows(settings.model.path, "model.path")
    if settings.published_adapters is not None:
        _check_adapters(settings.model.path)
    if settings.rollout.devices:
        _check_gpus(settings)
    else:
        _check_cpus(settings)


def check_server(section: ModelServer, path: Path, setting: str) -> None:
    """ConfigError when vLLM cannot serve the model at `path` as `section` says, which is `setting` in the file."""
    check_engine_arguments(section.engine, f"{setting}.engine")
    _check_split(path, section.tensor_parallel_size, setting)
    _check_seeing(path, f"{setting}.model")
    _check_gpt_oss(path, f"{setting}.model")
    _check_stablelm(path, f"{setting}.model")
    _check_windows(path, f"{setting}.model")
    if not section.devices:
        _check_cpu_attention(path, section.engine.get("block_size"), f"{setting}.model", setting)


def _check_stages(path: Path, num_stages: int) -> None:
    """ConfigError when a rollout of the model at `path` would have stages without a layer."""
    num_layers = text_config(path).get("num_hidden_layers", 0)
    if num_stages > max(num_layers, 1):
        raise ConfigError(
            f"rollout.pipeline_parallel_size {num_stages}: the model at {path} has {num_layers} layers; lower it"
        )


def _check_split(path: Path, num_workers: int, setting: str = "rollout") -> None:
    """ConfigError when vLLM cannot split the attention of the model at `path` over `num_workers` of `setting`."""
    text = text_config(path)
    heads, of_layers = text.get("num_attention_heads"), sorted(values_of_layers(text, "num_key_value_heads"))
    uneven = isinstance(heads, int) and heads % num_workers
    if uneven or any(keys % num_workers and num_workers % max(keys, 1) for keys in of_layers):
        raise ConfigError(
            f"{setting}.tensor_parallel_size {num_workers}: the model at {path} has num_attention_heads {heads} and "
            f"num_key_value_heads {' and '.join(map(str, of_layers)) or None}; choose a divisor of the first that "
            "divides the second or is a multiple of it"
        )


def _check_images(path: Path) -> None:
    """ConfigError when vLLM could not start with a model of text and images here."""
    if read_visual_tokens(path) is not None and importlib.util.find_spec("torchvision") is None:
        raise ConfigError(
            f"model.path {path} is a model of text and images, whose processor in vLLM needs torchvision, which is not "
            "installed; install the version that fits torch (docs/images.md says how on CPUs)"
        )


def _check_seeing(path: Path, model: str) -> None:
    """ConfigError when vLLM and transformers would compute the model of text and images at `path` apart. Either has
    numbers written in its code, which config.json may say otherwise. `model` names the model.
    """
    config, text = model_json(path / "config.json", model), text_config(path)
    kind, fixed = config.get("model_type"), dict[str, tuple[Any, Any]]()
    if kind == "qwen3_vl_moe":
        fixed["text_config.norm_topk_prob"] = (text.get("norm_topk_prob"), True)
    if kind == "glm4v":
        epsilon = (config.get("vision_config") or {}).get("rms_norm_eps", _GLM_EPSILON)
        turned = text.get("partial_rotary_factor", rope_parameters(text).get("partial_rotary_factor"))
        fixed["text_config.attention_bias"] = (text.get("attention_bias"), True)
        fixed["text_config.partial_rotary_factor"] = (turned, 0.5 if turned is None else turned)
        fixed["vision_config.rms_norm_eps"] = (epsilon, config.get("rms_norm_eps", _GLM_EPSILON))
    for name, (found, wanted) in fixed.items():
        if found != wanted:
            raise ConfigError(
                f"{model} {path}: vLLM and transformers compute a {kind} alike where {name} of config.json is "
                f"{json.dumps(wanted)}, and it is {json.dumps(found)}; take config.json from the model as it was "
                "published, or use another model"
            )


def _check_served_experts(path: Path) -> None:
    """ConfigError when vLLM, which beside adapters reads the model at `path` itself, would take its experts the other
    way round.
    """
    hidden = text_config(path).get("hidden_size")
    is_mixture = text_config(path).get("model_type") == "qwen3_vl_moe_text"
    shapes = model_shapes(path, "model.path") if is_mixture else {}
    if any(name.endswith(".experts.gate_up_proj") and shape[1] != hidden for name, shape in shapes.items()):
        raise ConfigError(
            f"model.path {path} holds its experts as transformers saves them, and beside adapters vLLM reads them as "
            "they are published; set weights.merge_adapters, or use the directory as it was published"
        )


def _check_gpt_oss(path: Path, model: str) -> None:
    """ConfigError when the model at `path`, which `model` names, is a gpt-oss of other numbers than vLLM's code has
    written in it.
    """
    text = text_config(path)
    if text.get("model_type") != "gpt_oss":
        return
    kinds = text.get("layer_types")
    alternating = [("sliding_attention", "full_attention")[layer % 2] for layer in range(len(kinds or ()))]
    wrong = {
        "swiglu_limit": text.get("swiglu_limit", 7.0) != 7.0,
        "swiglu_alpha": text.get("swiglu_alpha", 1.702) != 1.702,
        "rms_norm_eps": text.get("rms_norm_eps", 1e-5) != 1e-5,
        "attention_bias": not text.get("attention_bias", True),
        "layer_types": kinds is not None and kinds != alternating,
        "rope_parameters": bool(rope_parameters(text)) and kind_of_rope(text) != "yarn",
    }
    for name in (name for name, is_wrong in wrong.items() if is_wrong):
        raise ConfigError(
            f"{model} {path}: vLLM computes a gpt-oss with {name} as its publisher has it, and not {text.get(name)} of "
            "config.json; use a model of that kind"
        )


def _check_stablelm(path: Path, model: str) -> None:
    """ConfigError when the model at `path`, which `model` names, is a StableLM with what vLLM's code leaves out."""
    text = text_config(path)
    left_out = [name for name in ("use_parallel_residual", "qk_layernorm") if text.get(name)]
    if text.get("model_type") == "stablelm" and left_out:
        raise ConfigError(
            f"{model} {path}: vLLM computes a stablelm without {' and '.join(left_out)} of config.json; use a model "
            "that has neither, as StableLM 2 1.6B"
        )


def _check_windows(path: Path, model: str) -> None:
    """ConfigError when the model at `path`, which `model` names, is a Qwen of which some layers alone attend within a
    window: vLLM's code ends at that.
    """
    text = text_config(path)
    num_layers, first = text.get("num_hidden_layers", 0), text.get("max_window_layers", 28)  # transformers' default
    has_windows = bool(text.get("use_sliding_window")) and isinstance(first, int)
    by_rule = {has_windows and layer >= first for layer in range(num_layers)}
    if text.get("model_type") in _OF_QWEN and len(set(text.get("layer_types") or by_rule)) > 1 and first != num_layers:
        raise ConfigError(
            f"{model} {path}: vLLM takes no {text['model_type']} whose layers attend within a window in part (from "
            f"max_window_layers {first} of {num_layers} on, or layer_types, of config.json); use a model whose layers "
            "attend alike"
        )


def _check_cpus(settings: RunSettings) -> None:
    path, engine = settings.model.path, settings.rollout.engine
    check_cpu_sleep(settings)
    _check_cpu_attention(path, engine.get("block_size"))
    _check_cpu_recurrence(path, settings.model.dtype, engine.get("enable_prefix_caching"))
    check_cpu_routing(settings.actor)
    if settings.published_adapters is not None:
        _check_cpu_adapters(path)


def _check_gpus(settings: RunSettings) -> None:
    is_recurrent, path = has_recurrent_layers(text_config(settings.model.path)), settings.model.path
    if settings.published_adapters is not None:
        _check_served_experts(path)
    if is_recurrent and settings.actor.router_replay == "r3":
        raise ConfigError(
            f"actor.router_replay r3: model.path {path} has recurrent layers, with which prefixes are not kept, and "
            "vLLM keeps the experts it sampled with beside them; use r2"
        )
    if is_recurrent and settings.run.deterministic:
        raise ConfigError(
            f"run.deterministic: model.path {path} has recurrent layers, for which vLLM has no batch-invariant "
            "kernels; leave it out, or use another model"
        )
    if settings.run.deterministic and settings.model.head_dtype == "float32" and settings.model.dtype != "float32":
        raise ConfigError(
            f"run.deterministic: vLLM multiplies by a float32 head (model.head_dtype) of a {settings.model.dtype} "
            "model with kernels that may depend on the batch; set model.head_dtype to model, or leave it out"
        )


def _check_cpu_attention(
    path: Path, block_size: JsonValue, model: str = "model.path", setting: str = "rollout"
) -> None:
    """ConfigError when vLLM cannot run the model at `path` on CPUs, or not with the `block_size` of the engine of
    `setting`. For latent attention it takes its own in place of that.
    """
    head_dim = _head_dim(text_config(path))
    if head_dim is None:
        return
    if isinstance(block_size, int) and (block_size < 1 or block_size % CPU_BLOCK_TOKENS):
        raise ConfigError(
            f"{setting}.engine.block_size {block_size} is no multiple of {CPU_BLOCK_TOKENS}, which vLLM's attention "
            "needs on CPUs; give one, or remove it"
        )
    for size in sorted({head_dim, *values_of_layers(text_config(path), "head_dim")} - set(CPU_HEAD_DIMS)):
        raise ConfigError(
            f"{model} {path}: head_dim {size} is not one that vLLM's attention takes on CPUs "
            f"({', '.join(map(str, CPU_HEAD_DIMS))}); "
            f"use another model, or give {setting}.devices"
        )


def _check_cpu_recurrence(path: Path, dtype: str, caches_prefixes: JsonValue) -> None:
    """ConfigError when the model at `path` has recurrent layers that vLLM cannot run on CPUs in `dtype`, or not with
    rollout.engine's enable_prefix_caching. A head has 128 numbers where the configuration is silent. vLLM's code for
    Qwen3.5 imports torchvision, for images that a text model never sees.
    """
    text = text_config(path)
    if not has_recurrent_layers(text):
        return
    dims = {text.get(f"linear_{name}_head_dim", 128) for name in ("key", "value")}
    if dtype != "bfloat16" or len(dims) > 1 or not dims <= set(_CPU_DELTA_RULE_DIMS):
        raise ConfigError(
            f"model.path {path} has recurrent layers, which vLLM computes on CPUs in bfloat16 alone, keys and values "
            f"of one head dimension, {' or '.join(map(str, _CPU_DELTA_RULE_DIMS))}; set model.dtype to bfloat16, use "
            "another model, or give rollout.devices"
        )
    if caches_prefixes:
        raise ConfigError(
            "rollout.engine.enable_prefix_caching: with recurrent layers it needs prompts that are cut, which CPUs do "
            "not have; remove it"
        )
    if text.get("model_type") in QWEN3_5_TEXT and importlib.util.find_spec("torchvision") is None:
        raise ConfigError(
            f"model.path {path}: vLLM's code for {text['model_type']} imports torchvision, which is not installed; "
            "install the build for CPUs that fits torch (--index-url https://download.pytorch.org/whl/cpu), or give "
            "rollout.devices"
        )


def _check_adapters(path: Path) -> None:
    """ConfigError when vLLM would serve adapters of the model at `path` wrongly: where a matrix gives keys and values
    of a Gemma 4, its adapter would change the keys alone.
    """
    if text_config(path).get("attention_k_eq_v"):
        raise ConfigError(
            f"model.path {path} has values that are keys (attention_k_eq_v of config.json), of which vLLM would adapt "
            "the keys alone; set weights.merge_adapters"
        )


def _check_cpu_adapters(path: Path) -> None:
    """ConfigError when vLLM cannot serve adapters of the model at `path` on CPUs: beside adapters it computes experts
    with a GPU kernel alone.
    """
    if any(EXPERTS in name for name in tensor_names(path)):
        raise ConfigError(
            f"model.path {path} is a mixture of experts, which vLLM serves with adapters on GPUs only; give "
            "rollout.devices, or set weights.merge_adapters"
        )


def _head_dim(text: dict[str, Any]) -> int | None:
    """Size of a head of attention over keys and values; None where the configuration does not say (latent attention,
    other architectures).
    """
    if text.get("kv_lora_rank") is not None:
        return None
    hidden, heads = text.get("hidden_size"), text.get("num_attention_heads")
    own = hidden // heads if isinstance(hidden, int) and isinstance(heads, int) and heads else None
    return int(text["head_dim"]) if text.get("head_dim") else own
