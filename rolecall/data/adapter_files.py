"""An adapter in peft's format, as far as JSON and a safetensors header tell: whether it is one that `actor.lora` or
`critic.lora` can begin with. No torch.
"""

import math
from pathlib import Path

from rolecall.data.json_text import parse_json
from rolecall.data.model_files import num_adapter_parameters, tensor_shapes, with_modules
from rolecall.errors import ConfigError
from rolecall.settings import LoraSection

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
    modules = {name.rpartition(".lora_")[0].rpartition(".")[2] for name in shapes}
    found = {"rank": config.get("r"), "alpha": config.get("lora_alpha"), "target_modules": sorted(modules)}
    modules_of = with_modules(section, model, setting).target_modules
    given = {"rank": section.rank, "alpha": section.alpha, "target_modules": sorted(modules_of)}
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
