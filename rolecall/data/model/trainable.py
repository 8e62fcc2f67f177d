"""Models that can be trained packed, and shared by ranks, as far as config.json tells: refusals in words. No torch.

What only the modules tell is training/model/supported.py's.
"""

import importlib.util
from pathlib import Path
from typing import Any

from rolecall.data.images.tokens import FAMILIES
from rolecall.data.model.files import (
    ATTENTION_LAYERS,
    has_recurrent_layers,
    model_json,
    num_experts,
    sees_images,
    text_config,
    text_of,
    values_of_layers,
)
from rolecall.data.model.rope import check_rope
from rolecall.errors import ConfigError
from rolecall.settings import LayoutSection

_SCORE_CAP = "attn_logit_softcapping"
_CAPS_SCORES = ("gemma2",)
"""Values of model_type whose attention caps its scores in transformers and in vLLM alike."""
_SAVED_ALONE = {"gemma3": "Gemma3ForCausalLM", "gemma4": "Gemma4ForCausalLM"}
"""The class of transformers that saves the language model alone, by model_type, of models that can be trained so."""
_RENAMED = r'key_mapping={r"^(model\.language_model|language_model\.model)\.": "model."}'
"""What from_pretrained must be given to find the weights of such a model, without which it makes new ones up."""
_DEQUANTIZED = (
    "make a copy in bfloat16, which transformers does: AutoModelForCausalLM.from_pretrained(..., "
    'quantization_config=Mxfp4Config(dequantize=True), dtype="bfloat16").save_pretrained(..., '
    "save_original_format=False), with the tokenizer beside it"
)
"""Remedy for gpt-oss as its publisher gives it. Without save_original_format=False the copy would lack its experts."""


def check_trainable(path: Path, setting: str = "model.path") -> None:
    """ConfigError when config.json says that the model cannot be trained or scored here, whatever its weights are."""
    config = model_json(path / "config.json", setting)
    text, where = text_of(config), f"{setting} {path}"
    kind = config.get("model_type")
    if kind is not None and not _is_known(kind):
        raise ConfigError(
            f"{where}: the installed transformers knows no model_type {kind!r} of config.json; correct it, or use "
            "another model"
        )
    _check_family(config, where)
    quantization = config.get("quantization_config")
    if quantization is not None:
        method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else quantization
        remedy = _DEQUANTIZED if method == "mxfp4" else "use the model in bfloat16 or float32"
        raise ConfigError(f"{where} is quantized ({method}), and quantized weights cannot be trained; {remedy}")
    layers = set(map(str, text.get("layer_types") or ["unnamed"]))
    if _keeps_state(kind) and not has_recurrent_layers(text) and not layers <= ATTENTION_LAYERS:
        raise ConfigError(
            f"{where} is of model_type {kind!r}, which keeps a state from token to token, and packed sequences would "
            "hand it on to each other; use a model with attention, or with gated delta rules, in every layer"
        )
    _check_caps(text, where)
    if text.get("use_bidirectional_attention") in (True, "all"):
        raise ConfigError(
            f"{where} has tokens see what comes behind them (use_bidirectional_attention of config.json), which a "
            "language model must not; use a causal language model"
        )
    check_rope(text, where)
    _check_heads(text, where)


def _check_family(config: dict[str, Any], where: str) -> None:
    """ConfigError when models of the type of the model `where` are not trained here, or not as it is published."""
    text, kind = text_of(config), config.get("model_type")
    if config.get("is_encoder_decoder"):
        raise ConfigError(f"{where} is an encoder-decoder model; use a causal language model")
    if kind in _SAVED_ALONE:
        raise ConfigError(
            f"{where} is a model of text and images; train its language model alone, which transformers saves: "
            f"{_SAVED_ALONE[kind]}.from_pretrained(..., {_RENAMED}).save_pretrained(..., save_original_format=False), "
            "with the tokenizer beside it"
        )
    if kind == "gemma3n_text":
        raise ConfigError(
            f"{where} is a Gemma 3n, of which transformers cannot compute what its files lack apart from its weights; "
            "use Gemma 3 or Gemma 4"
        )
    if config.get("vision_config") and kind not in FAMILIES:
        raise ConfigError(
            f"{where} is a model of text and images of model_type {kind!r}, and only {', '.join(FAMILIES[:-1])} "
            f"and {FAMILIES[-1]} are trained whole; use one of these, or a model of text"
        )
    hidden, width = text.get("hidden_size"), text.get("moe_intermediate_size")
    if kind == "qwen3_vl_moe" and isinstance(width, int) and hidden in (width, 2 * width):
        raise ConfigError(
            f"{where}: its experts' matrices are square (hidden_size {hidden}, moe_intermediate_size {width} of "
            "config.json), so that it cannot be told which way round its files have them; use another model"
        )


def _check_heads(text: dict[str, Any], where: str) -> None:
    """ConfigError when the heads of the model `where` do not divide what they share."""
    heads, keys, hidden = (text.get(name) for name in ("num_attention_heads", "num_key_value_heads", "hidden_size"))
    if isinstance(heads, int) and isinstance(keys, int) and (keys < 1 or heads % keys):
        raise ConfigError(
            f"{where}: config.json has num_attention_heads {heads}, not a multiple of num_key_value_heads {keys}; "
            "correct it"
        )
    if (
        isinstance(heads, int)
        and isinstance(hidden, int)
        and text.get("head_dim") is None
        and text.get("kv_lora_rank") is None
        and (heads < 1 or hidden % heads)
    ):
        raise ConfigError(
            f"{where}: config.json has hidden_size {hidden}, not a multiple of num_attention_heads {heads}, and no "
            "head_dim; correct it"
        )


def _check_caps(text: dict[str, Any], where: str) -> None:
    """ConfigError when a soft cap of the model `where` is none, or is not applied by all that compute it."""
    for name in (_SCORE_CAP, "final_logit_softcapping"):
        cap = text.get(name)
        if cap is not None and (isinstance(cap, bool) or not isinstance(cap, int | float) or cap <= 0):
            raise ConfigError(
                f"{where}: {name} {cap!r} of config.json is no soft cap; write a number above 0, or null for none"
            )
    if text.get(_SCORE_CAP) is not None and text.get("model_type") not in _CAPS_SCORES:
        raise ConfigError(
            f"{where} caps the scores of attention softly ({_SCORE_CAP} {text[_SCORE_CAP]} of config.json), which is "
            f"supported of model_type {' and '.join(_CAPS_SCORES)} alone; use another model"
        )


def _is_known(model_type: object) -> bool:
    """Whether transformers names the type where it lists its models. Its source is read: an import takes seconds."""
    lists = _sources("auto")
    return not lists or any(f'"{model_type}"' in source for source in lists)


def _keeps_state(model_type: object) -> bool:
    """Whether transformers' source says so of the type's models, where its name is that of their folder."""
    return any("    _is_stateful = True" in source for source in _sources(str(model_type).replace("-", "_")))


def _sources(family: str) -> list[str]:
    """The source files of a folder of transformers' models; none where it is not installed, or has no such folder."""
    spec = importlib.util.find_spec("transformers")
    if spec is None or spec.origin is None:
        return []
    files = Path(spec.origin).parent.glob(f"models/{family}/*.py")
    return [file.read_text(encoding="utf-8") for file in files]


def check_parallel(path: Path, parallel: LayoutSection, setting: str = "model.path") -> None:
    """ConfigError when the model cannot be shared over ranks as `parallel` says."""
    text = text_config(path, setting)
    tensor, sequence = parallel.tensor, parallel.sequence
    if sees_images(path, setting) and (tensor > 1 or sequence > 1):
        raise ConfigError(
            f"{setting} {path} is a model of text and images, whose matrices and sequences ranks do not share: set "
            "parallel.tensor and parallel.sequence to 1, and raise num_ranks"
        )
    if text.get("model_type") == "gpt_oss" and tensor > 1:
        raise ConfigError(
            f"{setting} {path} is a gpt-oss, whose matrices transformers has no plan to cut: set parallel.tensor to 1"
        )
    if text.get("model_type") == "gemma4_text" and tensor > 1:
        raise ConfigError(
            f"{setting} {path} is a Gemma 4, whose matrices ranks do not share: set parallel.tensor to 1, and raise "
            "num_ranks or parallel.sequence"
        )
    if has_recurrent_layers(text) and (tensor > 1 or sequence > 1):
        raise ConfigError(
            f"{setting} {path} has recurrent layers, which ranks do not share: set parallel.tensor and "
            "parallel.sequence to 1"
        )
    counts = {
        name: text[name]
        for name in ("num_attention_heads", "num_key_value_heads", "vocab_size")
        if isinstance(text.get(name), int)
    }
    for name, count in counts.items():
        if count % tensor:
            raise ConfigError(
                f"{setting} {path}: parallel.tensor {tensor} does not divide the model's {name} {count}; choose a "
                "divisor, or 1"
            )
    if parallel.expert > 1 and (num_experts(text) == 0 or num_experts(text) % parallel.expert):
        raise ConfigError(
            f"{setting} {path}: parallel.expert {parallel.expert} does not divide the model's {num_experts(text)} "
            "experts of a layer; choose a divisor, or 1"
        )
    if "num_attention_heads" not in counts:
        return
    heads = counts["num_attention_heads"] // tensor
    keys = min(values_of_layers(text, "num_key_value_heads") or {counts["num_attention_heads"]}) // tensor
    after = f" (num_attention_heads and num_key_value_heads over parallel.tensor {tensor})" if tensor > 1 else ""
    if heads % sequence or (keys % sequence and sequence % keys):
        raise ConfigError(
            f"{setting} {path}: parallel.sequence {sequence} does not divide the model's {heads} query and {keys} "
            f"key heads{after}; "
            "choose a divisor of the query heads that divides the key heads or is a multiple of them"
        )
