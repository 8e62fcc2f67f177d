"""Experts of a layer in grouped products: two products for all experts of a rank, however many they are.

Shapes: n tokens that were sent to this rank's experts, those of one expert after those of another; E experts of the
rank; H hidden size; F inner size of an expert; I inputs, O outputs of a matrix; R rank of an adapter.
"""

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.module import MegatronModule
from torch import nn
from torch.nn.functional import grouped_mm, linear, silu
from torch.utils.checkpoint import checkpoint

from rolecall.settings import LoraSection


class ExpertsAdapter(nn.Module):
    """The adapters of one matrix of a rank's experts, float32: model/lora.py's, cut by experts."""

    is_on = True
    """Whether they are added; what is left without them is the base."""

    def __init__(self, weight_EOI: torch.Tensor, section: LoraSection) -> None:
        super().__init__()
        num_experts, num_outputs, num_inputs = weight_EOI.shape
        device = weight_EOI.device
        self.down = nn.Parameter(torch.empty(num_experts * section.rank, num_inputs, device=device))
        """[E R, I]."""
        self.up = nn.Parameter(torch.empty(num_outputs, section.rank, num_experts, device=device))
        """[O, R, E]."""
        self._scale = section.alpha / section.rank

    def forward(self, weight_EOI: torch.Tensor) -> torch.Tensor:
        """The matrices with their adapters added, as peft adds them beneath FSDP2."""
        up_EOR = self.up.to(weight_EOI.dtype).permute(2, 0, 1)
        down_ERI = self.down.to(weight_EOI.dtype).view(len(weight_EOI), -1, weight_EOI.shape[2])
        return torch.baddbmm(weight_EOI, up_EOR, down_ERI, alpha=self._scale)


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
        self.gate_up_adapter: ExpertsAdapter | None = None
        self.down_adapter: ExpertsAdapter | None = None

    def add_adapters(self, section: LoraSection) -> None:
        """Gives each matrix of each expert an adapter."""
        self.gate_up_adapter = ExpertsAdapter(self.gate_up, section)
        self.down_adapter = ExpertsAdapter(self.down, section)

    def forward(
        self, tokens_nH: torch.Tensor, tokens_per_expert_E: torch.Tensor, probs_n: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Each token through its expert, times its weight: [n, H], and no bias."""
        ends_E = tokens_per_expert_E.cumsum(0).to(tokens_nH.device, torch.int32)
        gate_nF, up_nF = _product(tokens_nH, self.gate_up, ends_E, self.gate_up_adapter).chunk(2, -1)
        inner_nF = (silu(gate_nF) * up_nF * probs_n[:, None]).to(tokens_nH.dtype)
        return _product(inner_nF, self.down, ends_E, self.down_adapter), None


def _product(
    input_nI: torch.Tensor, weight_EOI: torch.Tensor, ends_E: torch.Tensor, adapter: ExpertsAdapter | None
) -> torch.Tensor:
    if adapter is None or not adapter.is_on:
        return _grouped(input_nI, weight_EOI, ends_E)

    def adapted(input_nI: torch.Tensor) -> torch.Tensor:
        return _grouped(input_nI, adapter(weight_EOI), ends_E)

    # backward sums again: kept until then, every layer's sums would be all experts' memory once more
    product: torch.Tensor = checkpoint(adapted, input_nI, use_reentrant=False, preserve_rng_state=False)
    return product


def _grouped(input_nI: torch.Tensor, weight_EOI: torch.Tensor, ends_E: torch.Tensor) -> torch.Tensor:
    if not len(input_nI):  # no kernel of no rows; backward gives all the weights their zeros
        return linear(input_nI, weight_EOI.flatten(0, 1))[:, : weight_EOI.shape[1]]
    return grouped_mm(input_nI, weight_EOI.transpose(1, 2), offs=ends_E)
