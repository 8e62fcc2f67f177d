"""Names and layouts between a model directory and transformers' modules, where they differ: fused experts of
mixture-of-experts models.

transformers keeps one [experts, ...] parameter where checkpoints (and vLLM) have one tensor per expert; its own
conversion rules are applied here one parameter at a time, so that never more than one fused parameter is held, and of
one that is read only the experts that are wanted. Dense models pass through untouched.
"""

from collections.abc import Callable
from copy import deepcopy

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
    revert_weight_conversion,
)

from rolecall.errors import ConfigError


class Conversion:
    """The rules of one model; made once."""

    def __init__(self, hf: PreTrainedModel) -> None:
        self._hf = hf
        transforms = get_model_conversion_mapping(hf, add_legacy=False)
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self._trivial = not transforms
        self._turned = tuple(t.target_patterns[0] for t in self._converters if _is_either_way(t))
        self.experts_are_transposed = any(getattr(module, "is_transposed", False) for module in hf.modules())
        """Whether parameters of stacked experts are [experts, inputs, outputs]; else outputs come first."""

    def to_checkpoint(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors of a model directory that hold parameter `name`, in a fixed order."""
        if self._trivial:
            return {name: tensor}
        if self.is_turned(name):
            return {name: tensor.transpose(1, 2).contiguous()}
        pieces: dict[str, torch.Tensor] = revert_weight_conversion(self._hf, {name: tensor})
        return {piece: pieces[piece] for piece in sorted(pieces, key=dot_natural_key)}

    def is_turned(self, name: str) -> bool:
        """Whether published directories hold the parameter `name`, [experts, ...], with its matrices transposed.
        Directories that transformers writes hold it as it is.
        """
        return name.endswith(self._turned)

    def from_checkpoint(
        self, name: str, shape: torch.Size, read: Callable[[str], torch.Tensor], rows: slice
    ) -> torch.Tensor:
        """`rows` of parameter `name` of the given full shape, put together from the tensors that `read` returns by
        checkpoint name.

        Where experts are stacked only those of `rows` are read; else everything is. ConfigError when the rules do not
        fit, or what was read whole has another shape.
        """
        sources, converter = self._sources(name, shape)
        if converter is None:
            return _rows_of(name, shape, read(sources[name][0]), rows)
        is_stacked = _stacks(converter) and all(len(found) == shape[0] for found in sources.values())
        wanted = {pattern: found[rows] if is_stacked else found for pattern, found in sources.items()}
        if not any(wanted.values()):
            return torch.empty(0, *shape[1:])
        for pattern, found in wanted.items():
            for source in found:
                converter.add_tensor(name, source, pattern, lambda source=source: read(source))
        result = converter.convert(name, model=self._hf, config=self._hf.config)[name]
        tensor: torch.Tensor = result[0] if isinstance(result, list) else result
        return tensor if is_stacked else _rows_of(name, shape, tensor, rows)

    def _sources(self, name: str, shape: torch.Size) -> tuple[dict[str, list[str]], WeightConverter | None]:
        """The tensors that hold parameter `name`, by the converter's pattern that they fit, in order; without a
        converter by `name`.
        """
        converter: WeightConverter | None = None
        sources: dict[str, list[str]] = {}
        for source in self.to_checkpoint(name, torch.empty(shape, device="meta")):
            target, pattern = rename_source_key(source, self._renamings, self._converters)
            if target != name:
                raise ConfigError(
                    f"transformers turns the checkpoint tensor {source!r} into {target!r}, not {name!r}; this model "
                    "cannot be converted"
                )
            if pattern is None:
                return {name: [source]}, None
            if converter is None:
                converter = deepcopy(next(c for c in self._converters if pattern in c.source_patterns))
            sources.setdefault(pattern, []).append(source)
        if converter is None:
            raise ConfigError(
                f"transformers has no rule that makes the parameter {name!r} of {type(self._hf).__name__}"
            )
        return sources, converter


def _rows_of(name: str, shape: torch.Size, whole: torch.Tensor, rows: slice) -> torch.Tensor:
    if whole.shape != shape:  # looked at here, for a part of a longer tensor would fit
        raise ConfigError(
            f"tensor {name!r} has the shape {tuple(whole.shape)}, not {tuple(shape)} as its config.json says; use "
            "matching files"
        )
    return whole[rows]


def _is_either_way(converter: WeightConverter) -> bool:
    """Whether the rule transposes by shape: what has the parameter's own stays as it is."""
    return any(isinstance(operation, Transpose) and operation.check_dims for operation in converter.operations)


def _stacks(converter: WeightConverter) -> bool:
    """Whether the parameter's first dimension counts experts, each made of tensors of its own."""
    first, *others = converter.operations
    return (
        isinstance(first, MergeModulelist)
        and first.dim == 0
        and all(isinstance(other, Concatenate) and other.dim > 0 for other in others)
    )
