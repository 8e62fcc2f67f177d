"""Adapters as far as JSON and safetensors headers tell: which matrices of a model get one, how large they are, and
whether a folder in peft's format is what `actor.lora` or `critic.lora` can begin with. No torch.
"""

import math
from collections import Counter
from pathlib import Path

from rolecall.data.json_text import parse_json
from rolecall.data.model.files import EXPERTS, IN_BLOCK, language_shapes, tensor_shapes
from rolecall.errors import ConfigError
from rolecall.settings import ALL_LINEAR, LoraSection

ADAPTER = "adapter_model.safetensors"
"""File of an adapter's tensors in a directory of peft's format."""
_PLAIN = (
    "use_dora",
    "use_rslora",
    "rank_pattern",
    "alpha_pattern",
    "modules_to_save",
    "fan_in_fan_out",
    "alora_invocation_tokens",
)
"""Keys of adapter_config.json that say, unless they are false or empty, that the adapter is computed otherwise."""

_CHANGE_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of peft's ways to begin an adapter that subtract it from the base weights, or quantize them."""

_OUT_OF_EXPERT = frozenset({"down_proj", "w2"})
"""Names of the matrix that an expert ends with; the others read the layer's input."""
_NOT_ALL_LINEAR = frozenset({"gate", "shared_expert_gate", "router", "kv_b_proj"})
"""Parts of the names of a block's matrices to which all-linear gives no adapter: routers, and latent attention's
kv_b_proj, which vLLM multiplies into others as it loads a model, so that it would decode without the adapter.
"""


def check_start(section: LoraSection, model: Path, setting: str = "actor.lora") -> None:
    """ConfigError when `start`, where it is given, is no adapter like `section`, which `setting` names, beside the
    model directory `model`.
    """
    if section.start is None:
        return
    where = f"{setting}.start {section.start}"
    try:
        config = parse_json((section.start / "adapter_config.json").read_text(encoding="utf-8"))
        if not isinstance(config, dict):
            raise ValueError("not an object")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{where} is no adapter in peft's format ({error}); rolecall export writes one to the folder `adapter`; "
            "a run that has a checkpoint goes on without"
        ) from error
    if config.get("peft_type", "LORA") != "LORA":
        raise ConfigError(f"{where}: adapter_config.json says that it is of {config['peft_type']}; use one of LORA")
    for key in _PLAIN:
        if config.get(key):
            raise ConfigError(f"{where}: adapter_config.json sets {key}, which is not computed here; merge it instead")
    if config.get("bias") not in (None, "none"):
        raise ConfigError(f"{where}: adapter_config.json sets bias, which is not trained here; merge it instead")
    init = config.get("init_lora_weights")
    if isinstance(init, str) and init.lower().startswith(_CHANGE_BASE):
        raise ConfigError(
            f"{where}: adapter_config.json sets init_lora_weights {init}, which changed the base weights too; convert "
            "it with peft's save_pretrained(path_initial_model_for_weight_conversion=...), or merge it"
        )
    shapes = tensor_shapes(section.start / ADAPTER)
    modules = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in shapes if EXPERTS not in name}
    found = {"rank": config.get("r"), "alpha": config.get("lora_alpha"), "target_modules": sorted(modules)}
    modules_of = with_modules(section, model, setting).target_modules
    given = {"rank": section.rank, "alpha": section.alpha, "target_modules": sorted(modules_of)}
    found["experts"], given["experts"] = any(EXPERTS in name for name in shapes), section.experts
    for name in given:
        if found[name] != given[name]:
            raise ConfigError(
                f"{where} has {name} {found[name]}, {setting}.{name} is {given[name]}; write the adapter's"
            )
    size = sum(map(math.prod, shapes.values()))
    expected = num_adapter_parameters(model, section, setting)
    if size != expected:
        raise ConfigError(
            f"{where} has {size:,} numbers, and adapters beside {model} have {expected:,}; name the adapter of this "
            "model"
        )


def num_adapter_parameters(path: Path, section: LoraSection, setting: str = "actor.lora") -> int:
    """Elements of the adapters that `section`, which `setting` names, gives the model at `path`. ConfigError names a
    module that the model lacks, and experts.
    """
    inner = sum(map(sum, adapted_matrices(path, section, setting).values()))
    return section.rank * (inner + (sum(sizes_of_experts(path, setting).values()) if section.experts else 0))


def adapted_matrices(path: Path, section: LoraSection, setting: str = "actor.lora") -> dict[str, list[int]]:
    """The shapes of the matrices to which `section`, which `setting` names, gives an adapter in the model at `path`, by
    name. ConfigError names a module that the model lacks.
    """
    matrices = _matrices(path, setting)
    own = {_module(name) for name in matrices}
    modules = with_modules(section, path, setting).target_modules
    unknown = sorted(set(modules) - own)
    if unknown:
        raise ConfigError(
            f"{setting}.target_modules: the model {path} has no {', '.join(unknown)}; its matrices are called "
            f"{', '.join(sorted(own))}"
        )
    return {name: shape for name, shape in matrices.items() if _module(name) in modules}


def expert_parameters(path: Path, setting: str = "actor.lora") -> list[int]:
    """Counts the parameters of the experts of each layer that has some, in the model at `path`; `setting` names who
    asks.
    """
    counts = Counter[str]()
    for name, shape in language_shapes(path, f"{setting}: the model").items():
        if EXPERTS in name:
            counts[name.partition(EXPERTS)[0]] += math.prod(shape)
    return list(counts.values())


def with_modules(section: LoraSection, path: Path, setting: str = "actor.lora") -> LoraSection:
    """`section`, which `setting` names, with the names that all-linear stands for in the model at `path`. ConfigError
    where it stands for none.
    """
    if section.target_modules != ALL_LINEAR:
        return section
    inside = [
        name
        for name in _matrices(path, setting)
        if IN_BLOCK.search(name) and name.endswith(".weight") and _NOT_ALL_LINEAR.isdisjoint(name.split("."))
    ]
    if not inside:
        raise ConfigError(
            f"{setting}.target_modules {ALL_LINEAR}: the model {path} has no matrix in its blocks that may have an "
            "adapter; use another model"
        )
    return section.model_copy(update={"target_modules": tuple(sorted(set(map(_module, inside))))})


def _matrices(path: Path, setting: str) -> dict[str, list[int]]:
    """The shapes of the model's matrices that are neither an expert's nor a vision tower's, by name."""
    return {
        name: shape
        for name, shape in language_shapes(path, f"{setting}: the model").items()
        if len(shape) == 2 and EXPERTS not in name
    }


def sizes_of_experts(path: Path, setting: str) -> Counter[str]:
    """The inputs and outputs of the matrices of each layer's experts, summed, by the beginning of their names. Those of
    one expert that read the layer's input are one matrix. `setting` names the adapters' section. ConfigError where the
    model at `path` has no experts.
    """
    sizes, seen = Counter[str](), set[str]()
    for name, shape in language_shapes(path, f"{setting}: the model").items():
        expert, _, matrix = name.removesuffix(".weight").rpartition(".")
        layer = name.partition(EXPERTS)[0]
        if expert.endswith(EXPERTS[:-1]) and len(shape) == 3:  # a tensor holds a matrix of all experts
            sizes[layer] += shape[0] * sum(shape[1:])
        elif EXPERTS in expert and len(shape) == 2:
            sizes[layer] += shape[0] if expert in seen and matrix not in _OUT_OF_EXPERT else sum(shape)
            seen |= {expert} if matrix not in _OUT_OF_EXPERT else set()
    if not sizes:
        raise ConfigError(f"{setting}.experts: the model {path} has no experts; leave it out")
    return sizes


def _module(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]
