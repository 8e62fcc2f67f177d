"""LoRA: adapters beside the linear modules of a frozen base (arXiv:2106.09685), made of peft's layers.

Owns which modules get one, how they start, what their tensors are called (a base weight keeps its name in the model
directory, an adapter has peft's) and how an adapter is merged into the base or written in peft's format. Nothing here
knows ranks: shapes are those of whole tensors. peft is imported where it is used, because it takes half a second and
most trainers have no adapters.

Shapes: R rank; I inputs and O outputs of a linear module.
"""

import hashlib
import json
import math
import zlib
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn
from transformers import PreTrainedModel

from rolecall.data.adapters import ADAPTER
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

_BASE = ".base_layer."
"""What peft puts into the name of a weight that got an adapter."""
_DOWN, _UP = ".lora_A.default.weight", ".lora_B.default.weight"
"""Ends of the names of an adapter's parameters: [R, I] and [O, R]."""
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
    config = _peft_config(section, _targets(model, blocks, section, setting))
    inject_adapter_in_model(config, blocks, low_cpu_mem_usage=True)
    head = set(model.head.parameters()) if isinstance(model, ValueModel) else set()
    for name, parameter in model.hf.named_parameters():
        parameter.requires_grad_(is_adapter(name) or parameter in head)
        if parameter.requires_grad:
            parameter.data = parameter.data.float()  # made in the base's dtype, as peft makes them


def adapters_off(hf: PreTrainedModel) -> AbstractContextManager[None]:
    """Makes the model compute what its base does, to the bit, as long as the context lasts."""
    from peft.helpers import rescale_adapter_scale

    context: AbstractContextManager[None] = rescale_adapter_scale(hf, 0.0)
    return context


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name belongs to an adapter."""
    return name.endswith((_DOWN, _UP))


def checkpoint_name(name: str) -> str:
    """Returns the name of the base's parameter `name` in the model directory."""
    return name.replace(_BASE, ".")


def peft_name(name: str) -> str:
    """Returns the name of the adapter's parameter `name` in peft's files and in the weight channel."""
    return _PEFT_PREFIX + name.replace(".default.weight", ".weight")


def new_adapter(name: str, shape: torch.Size, seed: int) -> torch.Tensor:
    """Makes the first value of the adapter's parameter `name`, float32: peft's default (B zeros, A uniform with bound 1
    / sqrt(I)), the same on every rank.
    """
    if name.endswith(_UP):
        return torch.zeros(shape)
    generator = torch.Generator().manual_seed(torch_seed(seed, zlib.crc32(name.encode())))
    return (2.0 * torch.rand(shape, generator=generator) - 1.0) / math.sqrt(shape[1])


def adapter_names(weight: str) -> tuple[str, str]:
    """Names of the parameters [R, I] and [O, R] of the adapter that the model directory's tensor `weight` has, if it
    has one.
    """
    module = weight.removesuffix(".weight")
    return module + _DOWN, module + _UP


def merged(weight_OI: torch.Tensor, down_RI: torch.Tensor, up_OR: torch.Tensor, section: LoraSection) -> torch.Tensor:
    """The base's weight with its adapter added, in its own dtype; summed in float32 and rounded once."""
    return (weight_OI.float() + section.alpha / section.rank * (up_OR.float() @ down_RI.float())).to(weight_OI.dtype)


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
                yield peft_name(name), gather(name, dtype)
        elif not is_adapter(name):
            weight, stored = gather(name, dtype), checkpoint_name(name)
            down, up = adapter_names(stored)
            if section is not None and down in names:
                weight = merged(weight, gather(down, torch.float32), gather(up, torch.float32), section)
            yield from conversion.to_checkpoint(stored, weight).items()


def base_digest(files: ModelFiles, section: LoraSection) -> str:
    """Hex digest over the first row of every matrix that has an adapter: beside another base, whose shapes may be the
    same, adapters mean nothing.
    """
    state = hashlib.sha256()
    for name in sorted(files):
        if name.removesuffix(".weight").rpartition(".")[2] in section.target_modules and ".experts." not in name:
            state.update(
                name.encode() + files.part(name, (slice(0, 1), slice(None))).view(torch.uint8).numpy().tobytes()
            )
    return state.hexdigest()


def check_names(hf: PreTrainedModel, files: ModelFiles, conversion: Conversion, setting: str) -> None:
    """ConfigError when a matrix that has an adapter in `hf` is no tensor in the model directory: a merge looks for it
    there, by that name or by what transformers renames it to. `setting` is the adapters' section's.
    """
    matrices = [name.replace(_DOWN, ".weight") for name, _ in hf.named_parameters() if name.endswith(_DOWN)]
    held = {name for stored, name in parameter_names(hf, conversion).items() if stored in files}
    renamed = [name for name in matrices if name not in files and name not in held]
    if renamed:
        raise ConfigError(
            f"{setting}.target_modules: {files.path} has no tensor {renamed[0]!r}, as {type(hf).__name__} calls it "
            f"({len(renamed)} of {len(matrices)} matrices), so that its adapter would not be found there; name modules "
            "whose tensors are called alike in both"
        )


def parameter_names(hf: PreTrainedModel, conversion: Conversion) -> dict[str, str]:
    """The parameters of `hf`, without adapters, by their names in a model directory; those that are a tensor each."""
    names = {}
    for own_name, parameter in hf.named_parameters():
        name = checkpoint_name(own_name)
        stored = list(conversion.to_checkpoint(name, torch.empty(parameter.shape, device="meta")))
        if len(stored) == 1 and not is_adapter(name):
            names[stored[0]] = name
    return names


def write_adapter(
    path: Path,
    source: Path,
    tensors: Iterator[tuple[str, torch.Tensor]],
    section: LoraSection,
    progressed: Callable[[], None],
) -> int:
    """Writes an adapter of the model directory `source` in peft's format; `tensors` by peft's names, held together.
    Returns their bytes. DiskFullError.
    """
    with writing("export the adapter to", path):
        path.mkdir(parents=True, exist_ok=True)
        num_bytes = write_tensors(path / ADAPTER, dict(tensors), {"format": "pt"}, progressed)
        modules = list(section.target_modules)
        config = {
            **_peft_config(section, modules).to_dict(),
            "target_modules": modules,
            "base_model_name_or_path": str(source),
            "inference_mode": True,
        }
        write_text(path / "adapter_config.json", json.dumps(config, indent=2, sort_keys=True))
    return num_bytes


def _peft_config(section: LoraSection, modules: list[str]) -> "LoraConfig":
    from peft import LoraConfig

    return LoraConfig(
        r=section.rank,
        lora_alpha=section.alpha,
        target_modules=modules,
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
