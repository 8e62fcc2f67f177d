"""Decoder layers of transformers that keep from their attention what they do not know, made to hand the plan of the
pack on to it.

Each is named, once it was tried: a family whose layers drop the plan may do more that packing does not have.
"""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

KNOWN = frozenset({"NemotronDecoderLayer", "StableLmDecoderLayer"})
"""Names of their classes in transformers; each has its attention as `self_attn`."""


def hand_on_plans(hf: PreTrainedModel) -> None:
    """Has every such layer of `hf` give its attention the keyword `packed` that it was called with itself."""
    for module in hf.modules():
        if type(module).__name__ in KNOWN:
            _hand_on(module, module.get_submodule("self_attn"))


def _hand_on(layer: nn.Module, attention: nn.Module) -> None:
    given: dict[str, Any] = {}

    def take(_: nn.Module, __: tuple[Any, ...], options: dict[str, Any]) -> None:
        given.update({name: value for name, value in options.items() if name == "packed"})

    def add(_: nn.Module, inputs: tuple[Any, ...], options: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return inputs, options | given

    def forget(_: nn.Module, __: tuple[Any, ...], ___: Any) -> None:
        given.clear()

    layer.register_forward_pre_hook(take, with_kwargs=True)
    attention.register_forward_pre_hook(add, with_kwargs=True)
    layer.register_forward_hook(forget)
