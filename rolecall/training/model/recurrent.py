"""Layers that hand a state from token to token (gated delta rule), which packed sequences must not hand to each other.

Each sequence goes through such a layer by itself: sequences of similar length are one batch, padded on the right, where
nothing that is kept can see padding. They are the batches in which attention computes on CPUs. Everything else of the
model stays packed. A beginning that several sequences share is computed there for each of them.

Known are layers that were compared with their models on single sequences (test_recurrent.py). A model with others is
refused.

Shapes: N tokens of the pack; C distinct ones (prefixes.py), else N; b sequences of a batch, L its longest; H hidden
size.
"""

from functools import cache, partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from rolecall.errors import ConfigError
from rolecall.training.model.attention.packed import PackedPlan, TracedAttention, in_buckets

KNOWN = frozenset({"Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"})
"""Names of their classes in transformers."""


def recurrent_layers(hf: PreTrainedModel) -> list[nn.Module]:
    """Finds the known recurrent layers of `hf`."""
    return [module for module in hf.modules() if KNOWN & {kind.__name__ for kind in type(module).__mro__}]


def keep_apart(hf: PreTrainedModel) -> bool:
    """Has every recurrent layer of `hf` see one sequence at a time. Returns whether it has any; parameters keep their
    names.
    """
    found = recurrent_layers(hf)
    for module in found:
        module.__class__ = _by_sequence(type(module))  # type: ignore[arg-type]  # classes are hashable
    return bool(found)


@cache
def _by_sequence(kind: type[nn.Module]) -> type[nn.Module]:
    """`kind` whose forward takes the plan of the pack."""

    # Not for compilers of layers, as attention is not.
    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def forward(
        self: nn.Module,
        hidden_states: torch.Tensor,
        *,
        packed: PackedPlan | TracedAttention | None = None,
        attention_mask: torch.Tensor | None = None,
        **_: Any,
    ) -> torch.Tensor:
        """[1, C, H] from [1, C, H]."""
        if packed is None or attention_mask is not None:
            raise ConfigError(
                f"{kind.__name__} is not told how sequences are packed, or is given a mask; use another model"
            )
        if isinstance(packed, TracedAttention):
            return _traced(self, hidden_states, packed)
        x_NH = hidden_states[0] if packed.prefixes is None else packed.prefixes.spread(hidden_states[0])
        out_NH = in_buckets(packed, (x_NH,), partial(kind.forward, self))
        return (out_NH if packed.prefixes is None else out_NH.index_select(0, packed.prefixes.first_C))[None]

    return type(f"Packed{kind.__name__}", (kind,), {"forward": forward})


def _traced(layer: Any, hidden_states: torch.Tensor, trace: TracedAttention) -> torch.Tensor:
    """Goes through the matrices of `layer`, forward and backward, and to the right shape. Its rule is left out: kernels
    cannot be followed without data, and what it costs is known.

    Each head of values has a state [key, value]. A token reads it by its key, adds to it and reads it by its query
    (arXiv:2412.06464, equation 10): three products.
    """
    trace.recurrences.append(6 * layer.num_v_heads * layer.head_k_dim * layer.head_v_dim)
    inputs = [module for name, module in layer.named_children() if name.startswith("in_proj")]
    mixed = sum(module(hidden_states).sum(-1, keepdim=True) for module in inputs)
    traced: torch.Tensor = layer.out_proj(mixed.expand(-1, -1, layer.num_v_heads * layer.head_v_dim))
    return traced
