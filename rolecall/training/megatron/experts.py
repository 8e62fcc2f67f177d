"""Experts of a layer in grouped products: two products for all experts of a rank, however many they are.

Shapes: n tokens that were sent to this rank's experts, those of one expert after those of another; E experts of the
rank; H hidden size; F inner size of an expert.
"""

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import nn
from torch.nn.functional import grouped_mm, linear, silu


class Experts(MegatronModule):  # type: ignore[misc]  # of no known type
    """A rank's experts, their matrices stacked as transformers stacks them."""

    def __init__(self, num_local_experts: int, config: TransformerConfig, *_: Any, **__: Any) -> None:
        super().__init__(config)
        device, dtype = torch.cuda.current_device(), config.params_dtype
        inner, hidden = config.moe_ffn_hidden_size, config.hidden_size
        self.gate_up = nn.Parameter(torch.empty(num_local_experts, 2 * inner, hidden, dtype=dtype, device=device))
        """[E, 2 F, H]: gates, and below them what they multiply."""
        self.down = nn.Parameter(torch.empty(num_local_experts, hidden, inner, dtype=dtype, device=device))
        """[E, H, F]."""

    def forward(
        self, tokens_nH: torch.Tensor, tokens_per_expert_E: torch.Tensor, probs_n: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Each token through its expert, times its weight: [n, H], and no bias."""
        ends_E = tokens_per_expert_E.cumsum(0).to(tokens_nH.device, torch.int32)
        gate_nF, up_nF = _product(tokens_nH, self.gate_up, ends_E).chunk(2, -1)
        inner_nF = (silu(gate_nF) * up_nF * probs_n[:, None]).to(tokens_nH.dtype)
        return _product(inner_nF, self.down, ends_E), None


def _product(input_nI: torch.Tensor, weight_EOI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    if not len(input_nI):  # no kernel of no rows; backward gives all the weights their zeros
        return linear(input_nI, weight_EOI.flatten(0, 1))[:, : weight_EOI.shape[1]]
    return grouped_mm(input_nI, weight_EOI.transpose(1, 2), offs=ends_E)
