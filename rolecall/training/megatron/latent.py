"""Latent attention (DeepSeek, GLM-4.7-Flash): Megatron's own, on packed tokens with positions of their own."""

from importlib.util import find_spec
from typing import Any

import torch
from megatron.core.tensor_parallel import (
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.transformer import TransformerConfig, multi_latent_attention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import nn

from rolecall.training.megatron.norm import RmsNorm

# the module takes Transformer Engine for installed also where it is not, and then fails
multi_latent_attention.HAVE_TE = find_spec("transformer_engine") is not None

EPS = 1e-6
"""Floor of the norms of latents, which transformers gives them whatever the model's others have."""


class LatentNorm(RmsNorm):
    """The norm of queries' or keys' latents."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float) -> None:
        super().__init__(config, hidden_size, EPS)


class LatentAttention(MLASelfAttention):  # type: ignore[misc]  # of no known type
    """Attention of a layer whose keys and values come of one latent."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rotary_pos_emb = _Angles()
        if self.config.sequence_parallel:
            self.linear_kv_down_proj.register_forward_hook(_by_tokens)

    def get_query_key_value_tensors(
        self, hidden_states: Any, key_value_states: Any, position_ids: Any, packed_seq_params: Any, **kwargs: Any
    ) -> tuple[Any, ...]:
        """Makes queries, keys and values [n, 1, H, D] of a run."""
        self.rotary_pos_emb.angles_nD = packed_seq_params.angles_nD
        query, key, value, *latents = super().get_query_key_value_tensors(
            hidden_states, key_value_states, position_ids, packed_seq_params, **kwargs
        )
        return (query[:, None], key[:, None], value[:, None], *latents)


def _by_tokens(module: nn.Module, given: Any, output: Any) -> Any:
    """Hands tensor ranks whole latents of their own tokens, in place of a part of every token's latent.

    Of parts Megatron makes whole ones, too, but then loses the gradient of the keys' shared part, rotated by position,
    that comes of other ranks' heads.
    """
    part, bias = output
    return scatter_to_sequence_parallel_region(gather_from_tensor_model_parallel_region(part)), bias


class _Angles(nn.Module):
    """Angles of the pass that the layer is in, in the place of Megatron's, which count tokens from the pack's start."""

    angles_nD: torch.Tensor

    def get_rotary_seq_len(self, *_: Any) -> int:
        """Asked for by Megatron, which gives it back to `forward`."""
        return 0

    def forward(self, _: int, packed_seq: bool) -> torch.Tensor:
        """Returns the angles [n, 1, D], for all heads."""
        return self.angles_nD[:, None]
