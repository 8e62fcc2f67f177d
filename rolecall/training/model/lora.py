"""LoRA: adapters beside the linear modules of a frozen base (arXiv:2106.09685), made of peft's layers.

Owns which modules get one, how they start, what their tensors are called (a base weight keeps its name in the model
directory, an adapter has peft's) and how an adapter is merged into the base or written in peft's format. Nothing here
knows ranks: shapes are those of whole tensors. peft is imported where it is used, because it takes half a second and
most trainers have no adapters.

Shapes: R rank; I inputs and O outputs of a linear module; E experts of a layer, whose matrices transformers stacks in
one parameter.
"""

import hashlib
import json
import math
import re
import zlib
from collections.abc import Callable, Collection, Container, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from rolecall.data.model.adapters import ADAPTER
from rolecall.disk import writing
from rolecall.errors import ConfigError
from rolecall.settings import LoraSection
from rolecall.training.model.conversion import Conversion
from rolecall.training.model.files import write_tensors, write_text
from rolecall.training.model.huggingface import ModelFiles
from rolecall.training.model.packed_model import PackedModel, ValueModel, language_layers
from rolecall.training.ranks.device import torch_seed

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora.layer import ParamWrapper

_BASE = ".base_layer."
"""What peft puts into the name of a weight that got an adapter."""
_DOWN, _UP = ".lora_A.default.weight", ".lora_B.default.weight"
"""Ends of the names of an adapter's parameters: [R, I] and [O, R]; of stacked experts [E R, I] and [O, R E]."""
_STACKED = {"gate_up_proj": ".experts.base_layer", "up_proj": ".experts.base_layer", "down_proj": ".experts"}
"""Parameters of stacked experts, and the module that holds the adapter: peft wraps the layer's experts once for each of
theirs, from the first on.
"""
_OF_EXPERTS = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3"})
"""Modules that peft, as it loads an adapter of a mixture, takes for its experts'. Their weights as target_parameters
are the same adapters, and left alone.
"""
_PEFT_PREFIX = "base_model.model."
"""What peft's files put before every name."""


def prepare_adapters(model: PackedModel, path: Path, conversion: Conversion, section: LoraSection, setting: str) -> str:
    """Does as add_adapters to the model of the directory `path`, and returns the digest of that base. ConfigError also
    where an export would not find a matrix in it.
    """
    add_adapters(model, section, setting)
    base = ModelFiles(path)
    check_names(model.hf, base, conversion, setting)
    return base_digest(base, section)


def add_adapters(model: PackedModel, section: LoraSection, setting: str) -> None:
    """Gives the modules that `section` names an adapter, on the meta device, and freezes the rest but for a value head.
    The head is no adapter and is trained whole; what is trained is float32. ConfigError names a wrong target; `setting`
    is the section's name.
    """
    from peft import inject_adapter_in_model

    # of a whole mixture peft takes names of MLPs for those of its experts, too, which it then gives adapters of its own
    blocks = nn.ModuleList(language_layers(model))
    stacked = stacked_experts(blocks) if section.experts else []
    unknown = sorted({name.rpartition(".")[2] for name in stacked} - set(_STACKED))
    if section.experts and (unknown or not stacked):
        has = f"calls its experts' parameters {', '.join(unknown)}" if unknown else "has no stacked experts"
        raise ConfigError(f"{setting}.experts: {type(model.hf).__name__} {has}; leave it out")
    for name in stacked:  # last in their module, where peft puts them in every pass: names keep their order
        module, _, last = name.rpartition(".")
        parameter = getattr(blocks.get_submodule(module), last)
        delattr(blocks.get_submodule(module), last)
        blocks.get_submodule(module).register_parameter(last, parameter)
    config = _peft_config(section, _targets(model, blocks, section, setting), stacked)
    inject_adapter_in_model(config, blocks, low_cpu_mem_usage=True)
    head = set(model.head.parameters()) if isinstance(model, ValueModel) else set()
    for name, parameter in model.hf.named_parameters():
        parameter.requires_grad_(is_adapter(name) or parameter in head)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # made in the base's dtype, as peft makes them


def stacked_experts(module: nn.Module) -> list[str]:
    """Names of the parameters below `module`, without adapters, that hold a matrix of every expert of a layer."""
    parameters = ((checkpoint_name(name), parameter) for name, parameter in module.named_parameters())
    return [name for name, parameter in parameters if parameter.ndim == 3 and name.split(".")[-2] == "experts"]


def adapters_off(hf: PreTrainedModel) -> AbstractContextManager[None]:
    """Makes the model compute what its base does, to the bit, as long as the context lasts."""
    from peft.helpers import rescale_adapter_scale

    context: AbstractContextManager[None] = rescale_adapter_scale(hf, 0.0)
    return context


def expert_adapters(module: nn.Module) -> list["ParamWrapper"]:
    """The adapters of stacked experts in `module`."""
    if not any(is_of_experts(name) for name, _ in module.named_parameters()):
        return []
    from peft.tuners.lora.layer import ParamWrapper

    return [each for each in module.modules() if isinstance(each, ParamWrapper)]


@contextmanager
def experts_merged(hf: PreTrainedModel) -> Iterator[None]:
    """Makes stacked experts compute, and train, as their sums with adapters do, without the sums: what each token
    costs. For the meta device, where peft cannot add them.
    """
    wrappers = expert_adapters(hf)
    for wrapper in wrappers:
        wrapper.enable_adapters(enabled=False)
        wrapper.get_param().requires_grad_(True)
    try:
        yield
    finally:
        for wrapper in wrappers:
            wrapper.enable_adapters(enabled=True)
            wrapper.get_param().requires_grad_(False).grad = None


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return name.endswith((_DOWN, _UP))


def is_of_experts(name: str) -> bool:
    """Whether a parameter of this name is an adapter of stacked experts."""
    return is_adapter(name) and name.rpartition(".lora_")[0].endswith(tuple(_STACKED.values()))


def kept_shape(name: str, shape: torch.Size, section: LoraSection | None) -> torch.Size:
    """The shape by which ranks and checkpoints know the parameter `name` of `shape`: its own, but [O, R, E] of stacked
    experts' B, so that what it has of some experts is a box.
    """
    if section is None or not (is_of_experts(name) and name.endswith(_UP)):
        return shape
    return torch.Size((shape[0], section.rank, shape[1] // section.rank))


def checkpoint_name(name: str) -> str:
    """Returns the name of the base's parameter `name` in the model directory; an adapter's stays as it is."""
    return name if is_adapter(name) else re.sub(rf"({re.escape(_BASE[:-1])})+\.", ".", name)


def peft_name(name: str) -> str:
    """Returns the name of the adapter's parameter `name` in peft's files and in the weight channel."""
    return _PEFT_PREFIX + name.replace(".default.weight", ".weight")


def to_peft(name: str, tensor: torch.Tensor) -> tuple[str, torch.Tensor]:
    """The adapter's parameter `name`, of kept_shape(), by its name and in its shape in peft's files."""
    return peft_name(name), tensor.flatten(1)


def new_adapter(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """Makes the first value of the adapter's parameter `name`, float32: peft's default (B zeros, A uniform with bound 1
    / sqrt(I)), the same on every rank.
    """
    if name.endswith(_UP):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(torch_seed(seed, zlib.crc32(name.encode())))
    return (2.0 * torch.rand(shape, generator=generator) - 1.0) / math.sqrt(shape[1])


def adapter_names(weight: str) -> tuple[str, str]:
    """Names the parameters [R, I] and [O, R] of an adapter of `weight`, whether it has one or not: a tensor of the
    model directory, or a parameter that holds a layer's experts.
    """
    layer, _, last = weight.rpartition(".experts.")
    module = layer + _STACKED[last] if last in _STACKED and layer else weight.removesuffix(".weight")
    return module + _DOWN, module + _UP


def merged(weight_OI: torch.Tensor, down_RI: torch.Tensor, up_OR: torch.Tensor, section: LoraSection) -> torch.Tensor:
    """The base's weight with its adapter added, in its own dtype; summed in float32 and rounded once."""
    return (weight_OI.float() + section.alpha / section.rank * (up_OR.float() @ down_RI.float())).to(weight_OI.dtype)


def merged_experts(
    weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor, section: LoraSection, *, transposed: bool
) -> torch.Tensor:
    """Adds the adapters of a layer's experts, each as `merged` does. `weight` is [E, O, I], `transposed` [E, I, O];
    `down` is [E R, I] and `up` [O, R, E] or [O, R E], as peft orders them, in the type of a pass, which adds them
    likewise.
    """
    result = torch.empty_like(weight)
    down_ERI, up_ORE = down.reshape(len(weight), section.rank, -1), up.reshape(len(up), section.rank, -1)
    for expert, (old, new) in enumerate(zip(weight, result, strict=True)):
        old_OI, new_OI = (old.T, new.T) if transposed else (old, new)
        new_OI.copy_(merged(old_OI, down_ERI[expert], up_ORE[..., expert], section))
    return result


def with_adapter(
    name: str,
    weight: torch.Tensor,
    has: Container[str],
    read: Callable[[str], torch.Tensor],
    section: LoraSection,
    conversion: Conversion,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Adds the adapter of the base's parameter `name` to its `weight`, where it `has` one; `read` returns a whole
    parameter of an adapter by its name. `dtype`: that of a pass.
    """
    if adapter_names(name)[0] not in has:
        return weight
    down, up = map(read, adapter_names(name))
    if weight.ndim == 2:
        return merged(weight, down, up, section)
    is_transposed = conversion.experts_are_transposed
    return merged_experts(weight, down.to(dtype), up.to(dtype), section, transposed=is_transposed)


def weights_to_publish(
    names: Collection[str],
    gather: Callable[[str, torch.dtype], torch.Tensor],
    conversion: Conversion,
    dtype: torch.dtype,
    section: LoraSection | None,
    *,
    merges: bool,
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a model whose parameters are `names`, in `dtype`, one at a time: without adapters all of them, by
    their names in a model directory; else the adapters alone, by peft's names, or, where it `merges`, all with each
    adapter added.

    `gather` returns a whole parameter in a type; it is called in the same order on every rank.
    """
    for name in names:
        if section is not None and not merges:
            if is_adapter(name):
                yield to_peft(name, gather(name, dtype))
        elif not is_adapter(name):
            weight, stored = gather(name, dtype), checkpoint_name(name)
            if section is not None:
                weight = with_adapter(
                    stored, weight, names, lambda each: gather(each, torch.float32), section, conversion, dtype
                )
            yield from conversion.to_checkpoint(stored, weight).items()


def base_digest(files: ModelFiles, section: LoraSection) -> str:
    """Hex digest over the first row of every matrix that has an adapter, of a layer's experts of the first one's:
    beside another base, whose shapes may be the same, adapters mean nothing.
    """
    state = hashlib.sha256()
    for name in sorted(files):
        matrix = name.removesuffix(".weight").rpartition(".")[2]
        of_experts = section.experts and (".experts.0." in name or (".experts." in name and matrix in _STACKED))
        if of_experts or (matrix in section.target_modules and ".experts." not in name):
            first = (*(slice(0, 1) for _ in files.shape(name)[1:]), slice(None))
            state.update(name.encode() + files.part(name, first).view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


def check_names(hf: PreTrainedModel, files: ModelFiles, conversion: Conversion, setting: str) -> None:
    """ConfigError when a matrix that has an adapter in `hf` is no tensor in the model directory: a merge looks for it
    there, by that name or by what transformers renames it to. `setting` is the adapters' section's.
    """
    names = {checkpoint_name(name) for name, _ in hf.named_parameters()}
    matrices = [name for name in names if not is_adapter(name) and adapter_names(name)[0] in names]
    held = {name for stored, name in parameter_names(hf, conversion).items() if stored in files}
    renamed = sorted(name for name in matrices if name not in files and name not in held)
    if renamed:
        raise ConfigError(
            f"{setting}.target_modules: {files.path} has no tensor {renamed[0]!r}, as {type(hf).__name__} calls it "
            f"({len(renamed)} of {len(matrices)} matrices), so that its adapter would not be found there; name modules "
            "whose tensors are called alike in both"
        )


def parameter_names(hf: PreTrainedModel, conversion: Conversion) -> dict[str, str]:
    """The parameters of `hf`, without adapters, by the names of the tensors in a model directory that hold them; those
    that are a tensor each, and stacked experts, which may be one for each expert and matrix.
    """
    names = {}
    for own_name, parameter in hf.named_parameters():
        name = checkpoint_name(own_name)
        stored = conversion.to_checkpoint(name, torch.empty(parameter.shape, device="meta"))
        if not is_adapter(name) and (len(stored) == 1 or parameter.ndim == 3):
            names.update(dict.fromkeys(stored, name))
    return names


def write_adapter(
    path: Path,
    source: Path,
    tensors: Iterator[tuple[str, torch.Tensor]],
    section: LoraSection,
    stacked: Collection[str],
    progressed: Callable[[], None],
) -> int:
    """Writes an adapter of the model directory `source` in peft's format; `tensors` by peft's names, held together.
    `stacked`: the model's parameters of stacked experts. Returns their bytes. DiskFullError.
    """
    with writing("export the adapter to", path):
        path.mkdir(parents=True, exist_ok=True)
        num_bytes = write_tensors(path / ADAPTER, dict(tensors), {"format": "pt"}, progressed)
        own_names = _OF_EXPERTS if stacked else frozenset[str]()
        modules = [name for name in section.target_modules if name not in own_names]
        parameters = [f"{name}.weight" for name in section.target_modules if name in own_names]
        parameters += sorted({name[name.rindex("experts.") :] for name in stacked if section.experts})
        config = {
            **_peft_config(section, modules, parameters).to_dict(),
            "target_modules": modules,
            "base_model_name_or_path": str(source),
            "inference_mode": True,
        }
        write_text(path / "adapter_config.json", json.dumps(config, indent=2, sort_keys=True))
    return num_bytes


def _peft_config(section: LoraSection, modules: list[str], parameters: list[str]) -> "LoraConfig":
    from peft import LoraConfig

    return LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        target_modules=modules,
        target_parameters=parameters or None,
        lora_dropout=0.0,
        bias="none",
        task_type="CAUSAL_LM",
    )


def _targets(model: PackedModel, blocks: nn.ModuleList, section: LoraSection, setting: str) -> list[str]:
    """Names of the linear modules in the transformer blocks of `model` that `section` names."""
    linear = [name for name, module in blocks.named_modules() if type(module) is nn.Linear]
    last = {name.rpartition(".")[2] for name in linear}
    unknown = sorted(set(section.target_modules) - last)
    if unknown:
        raise ConfigError(
            f"{setting}.target_modules: no {unknown} among the linear modules in the blocks of "
            f"{type(model.hf).__name__}, which are {sorted(last)}; "
            "name some of these"
        )
    return [name for name in linear if name.rpartition(".")[2] in section.target_modules]
