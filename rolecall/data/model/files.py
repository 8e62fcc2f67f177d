"""A Hugging Face model directory, as far as JSON and safetensors headers tell: what it is, and whether it is whole and
fits its tokenizer.

`rolecall check` and the roles' configurations read through here. Whether what is there can be trained is for
trainable.py, for rope.py of rotary positions, for mixture.py of routing and for adapters.py of adapters; what vLLM,
Megatron and images ask of it, for engine_limits.py, data/megatron/limits.py and data/images/limits.py. No torch.
"""

import math
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall.checkpoint.manifest import COMMITTED
from rolecall.data.images.tokens import FAMILIES
from rolecall.data.json_text import parse_json
from rolecall.errors import ConfigError
from rolecall.settings.sizes.layers import NUM_CHOSEN, num_chosen

MAX_HEADER_BYTES = 100 * 2**20
"""Bound of a safetensors header, as the format has it."""
QWEN3_5_TEXT = ("qwen3_5_text", "qwen3_5_moe_text")
"""Values of model_type of Qwen3.5's language models where they are saved alone."""
_RECURRENT = ("qwen3_next", *QWEN3_5_TEXT)
"""Values of model_type of models with recurrent layers."""
ATTENTION_LAYERS = frozenset({"attention", "full_attention", "sliding_attention"})
"""Kinds of layers that keep no state, in a configuration's layer_types."""
NUM_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Names under which architectures keep the number of experts of a layer."""
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
        model_json(path / "config.json", setting),
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
            {str(name) for name in model_json(index, setting).get("weight_map", {}).values()}
            - {file.name for file in files}
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
    own = text_of(model_json(path / "config.json")).get("max_position_embeddings")
    if not isinstance(own, int):
        raise ConfigError(f"{path}/config.json has no max_position_embeddings; add it, the longest prompt + response")
    return own


def eos_token_ids(path: Path) -> tuple[int, ...]:
    """The policy's own EOS ids, from generation_config.json and config.json. ConfigError when it names none."""
    config = model_json(path / "config.json")
    generation = model_json(path / "generation_config.json") if (path / "generation_config.json").is_file() else {}
    given = [tree.get("eos_token_id") for tree in (generation, config, text_of(config))]
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
    config = text_of(model_json(path / "config.json", setting))
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


def sees_images(path: Path, setting: str = "model.path") -> bool:
    """Whether the model at `path` is one of text and images that is trained whole."""
    return model_json(path / "config.json", setting).get("model_type") in FAMILIES


def num_experts(text: dict[str, Any]) -> int:
    """The experts of a layer by a model's configuration; 0 in a dense model."""
    return next((text[name] for name in NUM_EXPERTS if isinstance(text.get(name), int)), 0)


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
    return text_of(model_json(path / "config.json", setting))


def check_routers(path: Path, moe: object, freezes: bool) -> None:
    """ConfigError when actor.moe is set, or model.freeze_routers, and the model is no mixture of experts."""
    asking = [name for name, asks in (("actor.moe", moe), ("model.freeze_routers", freezes)) if asks]
    if asking and not num_chosen(text_of(model_json(path / "config.json"))):
        raise ConfigError(
            f"{asking[0]}: model.path {path} is no mixture of experts (its config.json has no "
            f"{' or '.join(NUM_CHOSEN)}); remove {asking[0]}"
        )


def text_of(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a configuration, which is the whole of most."""
    return dict(config.get("text_config") or config)


def require_model_folder(path: Path, setting: str = "model.path") -> None:
    """ConfigError when there is no folder `path`, which `setting` names, or it is that of a run or a checkpoint."""
    if not path.is_dir():
        raise ConfigError(
            f"{setting} must be a Hugging Face model directory, and there is no {path}; of a model on the hub, "
            f"`hf download ORGANISATION/NAME --local-dir {path}` makes one"
        )
    if not (path / "config.json").is_file() and any((path / name).is_file() for name in ("config.yaml", COMMITTED)):
        raise ConfigError(
            f"{setting} must be a Hugging Face model directory, and {path} is a run or a checkpoint; `rolecall export "
            f"{path} DIR` makes one of it"
        )


def model_json(path: Path, setting: str = "model.path") -> dict[str, Any]:
    """A JSON file of the directory that `setting` names, an object. ConfigError where it is none."""
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
