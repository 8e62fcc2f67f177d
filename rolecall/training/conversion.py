"""Names and layouts between a model directory and transformers' modules, where they differ: fused experts of mixture-of-experts models.

transformers keeps one [experts, ...] parameter where checkpoints (and vLLM) have one tensor per expert; its own conversion rules are applied here one
parameter at a time, so that never more than one fused parameter is held. Dense models pass through untouched.
"""

from collections.abc import Callable
from copy import deepcopy

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key, revert_weight_conversion

from rolecall.errors import ConfigError


class Conversion:
    """The rules of one model; made once."""

    def __init__(self, hf: PreTrainedModel) -> None:
        self._hf = hf
        transforms = get_model_conversion_mapping(hf, add_legacy=False)
        self._renamings = [t for t in transforms if isinstance(t, WeightRenaming)]
        self._converters = [t for t in transforms if isinstance(t, WeightConverter)]
        self._trivial = not transforms

    def to_checkpoint(self, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
        """The tensors of a model directory that hold parameter `name`, in a fixed order."""
        if self._trivial:
            return {name: tensor}
        pieces: dict[str, torch.Tensor] = revert_weight_conversion(self._hf, {name: tensor})
        return {piece: pieces[piece] for piece in sorted(pieces, key=dot_natural_key)}

    def from_checkpoint(self, name: str, shape: torch.Size, read: Callable[[str], torch.Tensor]) -> torch.Tensor:
        """Parameter `name` of the given full shape, put together from the tensors that `read` returns by checkpoint name.

        ConfigError when the rules do not fit.
        """
        sources = list(self.to_checkpoint(name, torch.empty(shape, device="meta")))
        converter: WeightConverter | None = None
        for source in sources:
            target, pattern = rename_source_key(source, self._renamings, self._converters)
            if target != name:
                raise ConfigError(f"transformers turns the checkpoint tensor {source!r} into {target!r}, not {name!r}; this model cannot be converted")
            if pattern is None:
                return read(source)
            if converter is None:
                converter = deepcopy(next(c for c in self._converters if pattern in c.source_patterns))
            converter.add_tensor(name, source, pattern, lambda source=source: read(source))
        if converter is None:
            raise ConfigError(f"transformers has no rule that makes the parameter {name!r} of {type(self._hf).__name__}")
        result = converter.convert(name, model=self._hf, config=self._hf.config)[name]
        tensor: torch.Tensor = result[0] if isinstance(result, list) else result
        return tensor
