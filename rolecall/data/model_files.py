"""A Hugging Face model directory, as far as JSON and safetensors headers tell: what it is, and whether it is whole and
fits its tokenizer.

Owns the complaints about `model.path` that need no weights to be loaded, but for those of vLLM (engine_limits.py), of
Megatron (megatron/limits.py), of images (images/limits.py), of rotary positions (rope.py), of routing (mixture.py) and
of adapters (adapters.py).
`rolecall check` and the roles' configurations read through here. No torch.
"""

import importlib.util
import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall.data.images.tokens import FAMILIES
from rolecall.data.json_text import parse_json
from rolecall.data.rope import check_rope
from rolecall.errors import ConfigError
from rolecall.settings import LayoutSection

MAX_HEADER_BYTES = 100 * 2**20
"""Bound of a safetensors header, as the format has it."""
QWEN3_5_TEXT = ("qwen3_5_text", "qwen3_5_moe_text")
"""Values of model_type of Qwen3.5's language models where they are saved alone."""
_RECURRENT = ("qwen3_next", *QWEN3_5_TEXT)
"""Values of model_type of models with recurrent layers."""
ATTENTION_LAYERS = frozenset({"attention", "full_attention", "sliding_attention"})
"""Kinds of layers that keep no state, in a configuration's layer_types."""
_SCORE_CAP = "attn_logit_softcapping"
_CAPS_SCORES = ("gemma2",)
"""Values of model_type whose attention caps its scores in transformers and in vLLM alike."""
_SAVED_ALONE = {"gemma3": "Gemma3ForCausalLM", "gemma4": "Gemma4ForCausalLM"}
"""Values of model_type whose language model can be saved, and trained, alone, and the class of transformers that does."""
_RENAMED = r'key_mapping={r"^(model\.language_model|language_model\.model)\.": "model."}'
"""What from_pretrained must be given to find the weights of such a model, without which it makes new ones up."""
_DEQUANTIZED = (
    "make a copy in bfloat16, which transformers does: AutoModelForCausalLM.from_pretrained(..., "
    'quantization_config=Mxfp4Config(dequantize=True), dtype="bfloat16").save_pretrained(..., '
    "save_original_format=False), with the tokenizer beside it"
)
"""Remedy for gpt-oss as its publisher gives it. Without save_original_format=False the copy would lack its experts."""
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names under which architectures keep the number of experts of a layer."""
NUM_CHOSEN = ("num_experts_per_tok", "top_k_experts")
"""Names under which they keep how many of them a token is sent to."""
EXPERTS = ".experts."
"""Part of the name of every tensor of a mixture's experts."""
IN_BLOCK = re.compile(r"\.(\d+)\.")
"""Part of the name of every tensor in a transformer block: its number."""
TOWER = re.compile(r"(model\.)?visual\.")
"""Beginning of the names of a vision tower's tensors, which get no adapters."""
EMBEDDINGS = ("embed_tokens.weight", "wte.weight", "word_embeddings.weight")
"""Ends of the names under which checkpoints keep their input embeddings."""


@dataclass(frozen=True)
class ModelFacts:
    """The facts that a model's files tell."""

    architecture: str
    num_parameters: int
    largest_layer: int
    """Parameters of the largest layer, all experts included."""
    num_tower_parameters: int = 0
    """Parameters of the vision tower of a model of text and images."""


def read_model(path: Path, setting: str = "model.path") -> ModelFacts:
    """Facts of the whole model directory that `setting` names, by the tensors that are loaded. ConfigError says what it
    lacks.
    """
    config, sizes = (
        _json(path / "config.json", setting),
        {name: math.prod(shape) for name, shape in _loaded_shapes(path, setting).items()},
    )
    layers = Counter[str]()
    for name, size in sizes.items():
        numbered = re.match(r".*?\.\d+(?=\.)", name)
        layers[numbered.group() if numbered else name] += size
    return ModelFacts(
        architecture=", ".join(config.get("architectures") or ["an unnamed architecture"]),
        num_parameters=sum(sizes.values()),
        largest_layer=max(layers.values(), default=0),
        num_tower_parameters=sum(size for name, size in sizes.items() if TOWER.match(name)),
    )


def model_shapes(path: Path, setting: str) -> dict[str, list[int]]:
    """Tensor shapes by name of the whole model directory that `setting` names. ConfigError says what it lacks."""
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{setting} {path} has no *.safetensors; convert the weights with save_pretrained")
    index = path / "model.safetensors.index.json"
    if "-of-" in files[0].name and not index.is_file():
        raise ConfigError(f"{setting} {path} has {files[0].name} and no {index.name}; download the rest")
    if index.is_file():
        missing = sorted(
            {str(name) for name in _json(index, setting).get("weight_map", {}).values()} - {file.name for file in files}
        )
        if missing:
            raise ConfigError(
                f"{setting} {path}: {index.name} names {missing[0]}, which is not there ({len(missing)} missing); "
                "download the rest"
            )
    return {name: shape for file in files for name, shape in tensor_shapes(file).items()}


def language_shapes(path: Path, setting: str) -> dict[str, list[int]]:
    """Tensor shapes by name of the language model in the directory that `setting` names: without a vision tower, and
    without blocks after the last one.
    """
    return {name: shape for name, shape in _loaded_shapes(path, setting).items() if not TOWER.match(name)}


def _loaded_shapes(path: Path, setting: str) -> dict[str, list[int]]:
    """Tensor shapes without blocks after the last one, which predict further tokens: neither trainers nor samplers load
    them.
    """
    num_layers = text_config(path, setting).get("num_hidden_layers")
    end = num_layers if isinstance(num_layers, int) else math.inf

    def is_loaded(name: str) -> bool:
        block = None if TOWER.match(name) else IN_BLOCK.search(name)
        return not name.startswith("mtp.") and (block is None or int(block[1]) < end)

    return {name: shape for name, shape in model_shapes(path, setting).items() if is_loaded(name)}


def tensor_names(path: Path, setting: str = "model.path") -> frozenset[str]:
    """Names of the tensors in a model directory."""
    return frozenset(model_shapes(path, setting))


def max_model_tokens(path: Path) -> int:
    """Longest prompt + response by the policy's own account. ConfigError when it gives none."""
    own = _text(_json(path / "config.json")).get("max_position_embeddings")
    if not isinstance(own, int):
        raise ConfigError(f"{path}/config.json has no max_position_embeddings; add it, the longest prompt + response")
    return own


def eos_token_ids(path: Path) -> tuple[int, ...]:
    """The policy's own EOS ids, from generation_config.json and config.json. ConfigError when it names none."""
    config = _json(path / "config.json")
    generation = _json(path / "generation_config.json") if (path / "generation_config.json").is_file() else {}
    given = [tree.get("eos_token_id") for tree in (generation, config, _text(config))]
    found = [each for value in given if value is not None for each in (value if isinstance(value, list) else [value])]
    wrong = [each for each in found if not isinstance(each, int) or isinstance(each, bool)]
    if wrong:
        raise ConfigError(
            f"model.path {path}: eos_token_id {wrong[0]!r} in generation_config.json or config.json is no id; write a "
            "whole number, or a list of them"
        )
    if not found:
        raise ConfigError(
            f"model.path {path} names no eos_token_id in generation_config.json or config.json; without one no "
            "response would stop"
        )
    return tuple(sorted(set(found)))


def vocab_size(path: Path, setting: str = "model.path") -> int:
    """Ids that the model has an embedding for, by config.json and by the weights where they are there; 0 when neither
    says.
    """
    config = _text(_json(path / "config.json", setting))
    shapes = model_shapes(path, setting) if any(path.glob("*.safetensors")) else {}
    sizes = [shape[0] for name, shape in shapes.items() if name.endswith(EMBEDDINGS) and len(shape) == 2]
    return min([*sizes, *([int(config["vocab_size"])] if "vocab_size" in config else [])], default=0)


def check_tokenizer(path: Path, num_ids: int, setting: str = "model.path") -> None:
    """ConfigError when a tokenizer of ids below `num_ids` can make ids that the model has no embedding for."""
    known = vocab_size(path, setting)
    if num_ids > known > 0:
        raise ConfigError(
            f"{setting} {path}: the tokenizer has ids up to {num_ids - 1}, the model has embeddings for 0 to "
            f"{known - 1}; "
            "save the tokenizer that the model was trained with, or resize the model's embeddings"
        )


def check_trainable(path: Path, setting: str = "model.path") -> None:
    """ConfigError when config.json says that the model cannot be trained or scored here, whatever its weights are."""
    config = _json(path / "config.json", setting)
    text, where = _text(config), f"{setting} {path}"
    kind = config.get("model_type")
    if kind is not None and not _is_known(kind):
        raise ConfigError(
            f"{where}: the installed transformers knows no model_type {kind!r} of config.json; correct it, or use "
            "another model"
        )
    if config.get("is_encoder_decoder"):
        raise ConfigError(f"{where} is an encoder-decoder model; use a causal language model")
    if kind in _SAVED_ALONE:
        raise ConfigError(
            f"{where} is a model of text and images; train its language model alone, which transformers saves: "
            f"{_SAVED_ALONE[kind]}.from_pretrained(..., {_RENAMED}).save_pretrained(..., save_original_format=False), with the "
            "tokenizer beside it"
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
    heads, keys = (text.get(name) for name in ("num_attention_heads", "num_key_value_heads"))
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
    text = _text(_json(path / "config.json", setting))
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


def sees_images(path: Path, setting: str = "model.path") -> bool:
    """Whether the model at `path` is one of text and images that is trained whole."""
    return _json(path / "config.json", setting).get("model_type") in FAMILIES


def num_experts(text: dict[str, Any]) -> int:
    """The experts of a layer by a model's configuration; 0 in a dense model."""
    return next((text[name] for name in NUM_EXPERTS if isinstance(text.get(name), int)), 0)


def num_chosen(text: dict[str, Any]) -> int:
    """The experts of a layer that a token is sent to, by a model's configuration; 0 in a dense model."""
    return next((text[name] for name in NUM_CHOSEN if isinstance(text.get(name), int)), 0)


def values_of_layers(text: dict[str, Any], name: str) -> set[int]:
    """The values of the setting `name`, a whole number, in all layers of a model by its configuration; empty where it
    does not say. Gemma 4's layers differ: with what transformers calls per_layer_config, its publisher global_`name`.
    """
    overrides = text.get("per_layer_config")
    layers = overrides.values() if isinstance(overrides, dict) else ()
    of_layers = [layer.get(name) for layer in layers if isinstance(layer, dict)]
    published = text.get("global_head_dim" if name == "head_dim" else f"num_global_{name.removeprefix('num_')}")
    return {value for value in (text.get(name), published, *of_layers) if isinstance(value, int)}


def has_recurrent_layers(text: dict[str, Any]) -> bool:
    """Whether a model has layers with a state (gated delta rule), by its configuration."""
    return text.get("model_type") in _RECURRENT


def text_config(path: Path, setting: str = "model.path") -> dict[str, Any]:
    """The language model's part of config.json in the directory that `setting` names, which is the whole of most."""
    return _text(_json(path / "config.json", setting))


def check_routers(path: Path, moe: object, freezes: bool) -> None:
    """ConfigError when actor.moe is set, or model.freeze_routers, and the model is no mixture of experts."""
    asking = [name for name, asks in (("actor.moe", moe), ("model.freeze_routers", freezes)) if asks]
    if asking and not num_chosen(_text(_json(path / "config.json"))):
        raise ConfigError(
            f"{asking[0]}: model.path {path} is no mixture of experts (its config.json has no "
            f"{' or '.join(NUM_CHOSEN)}); remove {asking[0]}"
        )


def _text(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a configuration, which is the whole of most."""
    return dict(config.get("text_config") or config)


def require_model_folder(path: Path, setting: str = "model.path") -> None:
    """ConfigError when there is no folder `path`, which `setting` names."""
    if not path.is_dir():
        raise ConfigError(
            f"{setting} must be a Hugging Face model directory, and there is no {path}; of a model on the hub, "
            f"`hf download ORGANISATION/NAME --local-dir {path}` makes one"
        )


def _json(path: Path, setting: str = "model.path") -> dict[str, Any]:
    require_model_folder(path.parent, setting)
    try:
        tree = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}; {setting} must be a Hugging Face model directory") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path} is not a JSON object; {setting} must be a Hugging Face model directory")
    return tree


def tensor_shapes(path: Path) -> dict[str, list[int]]:
    """Tensor shapes by name from a safetensors file: 8 bytes of little-endian length, then JSON, then the data that it
    describes. ConfigError when it is none, or not whole.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            header = parse_json(file.read(length).decode()) if length <= min(MAX_HEADER_BYTES, size) else None
        tensors = (
            {name: entry for name, entry in header.items() if name != "__metadata__"}
            if isinstance(header, dict)
            else {}
        )
        end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(f"{path} is not a safetensors file ({error}); download or save it again") from error
    if not tensors:
        raise ConfigError(
            f"{path} is not a safetensors file that holds tensors; download or save it again (a Git LFS pointer is "
            "not the file)"
        )
    if 8 + length + end > size:
        raise ConfigError(f"{path} is cut short: {size} bytes of {8 + length + end}; download or save it again")
    return {name: entry["shape"] for name, entry in tensors.items()}
