"""Adapters (model/lora.py) beside Megatron's linear modules: one for each of transformers' matrices that a module is
made of. A rank's experts have their own (experts.py).

Where tensor ranks have rows of a module (queries, keys and values in one; gate and up), each has A whole and the same
rows of B; where they have columns, the same columns of A and B whole. What travels between ranks is the inner product,
R wide. Where ranks cut tokens between them, what is whole sees those of its own rank alone: Megatron sums its gradient
as it does those of norms.

Shapes: n tokens of this rank's run, or its part of them; R rank; I inputs, O outputs of a module on this rank.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    ColumnParallelLinear,
    RowParallelLinear,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
)
from torch import nn
from torch.nn.functional import linear

from rolecall.settings import LoraSection
from rolecall.training.megatron.experts import Experts, ExpertsAdapter
from rolecall.training.megatron.families import Family, Fused
from rolecall.training.megatron.layout import Place
from rolecall.training.megatron.model import Stage

_SHARED = {
    (ColumnParallelLinear, False): copy_to_tensor_model_parallel_region,
    (ColumnParallelLinear, True): gather_from_sequence_parallel_region,
    (RowParallelLinear, False): reduce_from_tensor_model_parallel_region,
    (RowParallelLinear, True): reduce_scatter_to_sequence_parallel_region,
}
"""What inner products go through between tensor ranks, by the module's kind and whether these cut tokens."""


class Adapter(nn.Module):
    """The adapter of one matrix: this rank's parts of A and B, float32."""

    def __init__(self, rank: int, num_inputs: int, num_outputs: int, device: torch.device) -> None:
        super().__init__()
        self.down = nn.Parameter(torch.empty(rank, num_inputs, device=device))
        self.up = nn.Parameter(torch.empty(num_outputs, rank, device=device))


class Adapters(nn.ModuleDict):
    """The adapters of one module, by the names of transformers' modules."""

    is_on = True
    """Whether they are added; what is left without them is the base."""

    def __init__(self, module: Any, fused: Fused, section: LoraSection) -> None:
        """`fused`: what `module` is made of. Marks what is whole on ranks that cut tokens."""
        num_inputs, device = module.weight.shape[1], module.weight.device
        adapters = {
            name: Adapter(section.rank, num_inputs, num_rows, device)
            for name, num_rows in fused.num_rows.items()
            if name in fused.adapted
        }
        super().__init__(adapters)
        self._num_rows, self._num_groups = fused.num_rows, fused.num_groups
        self._scale = section.alpha / section.rank
        self._share: Any = _SHARED[type(module), bool(module.sequence_parallel)]
        for adapter in adapters.values():
            whole = adapter.down if isinstance(module, ColumnParallelLinear) else adapter.up
            whole.sequence_parallel = module.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, input_n1I: torch.Tensor) -> torch.Tensor:
        """[n, 1, O]: what is added to the module's output. Latent attention's have no middle dimension."""
        adapters = {name: adapter for name, adapter in self.items() if isinstance(adapter, Adapter)}
        downs = torch.cat([adapter.down for adapter in adapters.values()]).to(input_n1I.dtype)
        inner = self._share(linear(input_n1I, downs)) * self._scale
        parts = {
            name: linear(inner_n1R, adapter.up.to(inner.dtype))
            for (name, adapter), inner_n1R in zip(adapters.items(), inner.chunk(len(adapters), -1), strict=True)
        }
        for name, num_rows in self._num_rows.items():
            if name not in parts:
                parts[name] = inner.new_zeros(*inner.shape[:-1], num_rows)
        groups = [parts[name].view(*inner.shape[:-1], self._num_groups, -1) for name in self._num_rows]
        return torch.cat(groups, -1).flatten(-2)


def add_adapters(stages: Sequence[Stage], family: Family, place: Place, section: LoraSection, *, trained: bool) -> None:
    """Freezes the stages of a rank at `place`, but for a value head, and adds the adapters that are in the family's
    shapes. What is `trained` is float32.
    """
    for stage in stages:
        stage.requires_grad_(False)
        if stage.value_head is not None:
            stage.value_head.float().requires_grad_(trained)
        for name, module in list(stage.decoder.named_modules(prefix="decoder")):
            if section.experts and isinstance(module, Experts):
                module.add_adapters(section)
            if not isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
                continue
            fused = family.fused(f"{name}.weight", stage.first_layer, place)
            if fused.adapted:
                module.adapters = Adapters(module, fused, section)
                # before hooks that are there: what they are given is the whole output
                module.register_forward_hook(_with_adapters, prepend=True)
    for adapters in _all_adapters(stages):
        adapters.requires_grad_(trained)


@contextmanager
def adapters_off(stages: Sequence[Stage]) -> Iterator[None]:
    """Inside, the stages compute what their base does, to the bit."""
    found = _all_adapters(stages)
    for adapters in found:
        adapters.is_on = False
    try:
        yield
    finally:
        for adapters in found:
            adapters.is_on = True


def _all_adapters(stages: Sequence[Stage]) -> list[Adapters | ExpertsAdapter]:
    return [each for stage in stages for each in stage.modules() if isinstance(each, (Adapters, ExpertsAdapter))]


def _with_adapters(module: nn.Module, given: Any, output: Any) -> Any:
    adapters = module.adapters
    assert isinstance(adapters, Adapters)
    out_n1O, bias = output
    return (out_n1O + adapters(given[0]) if adapters.is_on else out_n1O), bias
