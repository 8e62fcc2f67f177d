"""Attention over packed sequences, registered with transformers as `rolecall_packed`: never a T x T mask over the pack.

Two ways, chosen by device and dtype, same numbers: on GPUs in half precision torch's variable-length flash attention over cu_seqlens; otherwise
scaled_dot_product_attention over buckets of sequences of similar length, padded on the right inside the bucket only (a causal query never sees padding on its
right, so no mask is needed). Many short sequences then cost one call, one long sequence costs no padding. Where sequences share their beginnings
(prefixes.py), each still attends as a whole, and of what is computed more than once the first is taken.

Models must run with use_cache=False and get the plan as the keyword `packed`. Left out: attention dropout, logit soft-capping, attention sinks; models that
need them are refused.

Shapes: N tokens of the pack; S sequences; b sequences of a bucket, L its longest; H query heads, K key heads, D head size.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import AttentionInterface

from rolecall.errors import ConfigError
from rolecall.training.device import attends_packed
from rolecall.training.prefixes import SharedPrefixes
from rolecall.training.sequence import SequenceShare

NAME = "rolecall_packed"
"""Pass as attn_implementation."""

PADDING_RATIO = 1.25
"""A bucket ends where padding every sequence to its longest would cost more than this over the bucket's own tokens."""


@dataclass(frozen=True)
class Bucket:
    """Sequences of similar length."""

    gather_bL: torch.Tensor
    """int64 [b, L], index into the queries; padding repeats the sequence's last token."""
    kept: torch.Tensor | None
    """int64, flat positions in [b * L] whose outputs are wanted; None: all, there is no padding and nothing shared."""
    scatter: torch.Tensor
    """int64, their indices into the output."""


@dataclass(frozen=True)
class PackedPlan:
    """How to attend over one microbatch; made once, used by every layer."""

    cu_seqlens: torch.Tensor
    max_length: int
    buckets: tuple[Bucket, ...]
    """Empty when the flash path is used."""
    num_tokens: int
    sequence: SequenceShare | None = None
    """With whom the tokens are shared; None: this rank computes all of them."""
    prefixes: SharedPrefixes | None = None
    """Given, queries, keys, values and the output are of distinct tokens; every sequence attends as a whole."""


@dataclass(frozen=True)
class TracedLayer:
    """What one layer asks of attention."""

    num_heads: int
    key_size: int
    value_size: int
    sliding_window: int | None


class TracedAttention:
    """In a plan's place where a model is only looked at, on the meta device: notes what each layer asks and attends to nothing (training/flops.py)."""

    def __init__(self) -> None:
        self.layers: list[TracedLayer] = []
        self.sequence: SequenceShare | None = None

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sliding_window: int | None) -> torch.Tensor:
        """[1, N, H, value size]: of the right shape, with gradients to all three and without a matrix multiplication."""
        self.layers.append(TracedLayer(query.shape[1], key.shape[-1], value.shape[-1], sliding_window))
        keyed = query.sum(-1, keepdim=True) + key.sum((1, 3))[:, None, :, None]
        return (keyed + value.sum(1, keepdim=True)).transpose(1, 2).contiguous()


def plan_attention(
    lengths: Sequence[int],
    cu_seqlens: torch.Tensor,
    dtype: torch.dtype,
    sequence: SequenceShare | None = None,
    prefixes: SharedPrefixes | None = None,
) -> PackedPlan:
    """The plan for sequences of these lengths (at least one) on cu_seqlens' device, computing in `dtype`."""
    if attends_packed(cu_seqlens.device, dtype):
        return PackedPlan(cu_seqlens, max(lengths), (), sum(lengths), sequence, prefixes)
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    by_length = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    buckets, members, tokens = [], [by_length[0]], lengths[by_length[0]]
    for i in by_length[1:]:
        if lengths[members[0]] * (len(members) + 1) > PADDING_RATIO * (tokens + lengths[i]):
            buckets.append(_bucket(members, lengths, starts, cu_seqlens.device, prefixes))
            members, tokens = [], 0
        members.append(i)
        tokens += lengths[i]
    buckets.append(_bucket(members, lengths, starts, cu_seqlens.device, prefixes))
    return PackedPlan(cu_seqlens, max(lengths), tuple(buckets), sum(lengths), sequence, prefixes)


def _bucket(members: Sequence[int], lengths: Sequence[int], starts: Sequence[int], device: torch.device, prefixes: SharedPrefixes | None) -> Bucket:
    start_b = torch.tensor([starts[i] for i in members])
    length_b = torch.tensor([lengths[i] for i in members])
    offset_L = torch.arange(int(length_b.max()))
    gather_bL = start_b[:, None] + torch.minimum(offset_L, length_b[:, None] - 1)
    real_bL = offset_L < length_b[:, None]
    if prefixes is not None:
        home_N, first_C = prefixes.home_N.cpu(), prefixes.first_C.cpu()
        home_bL = home_N[gather_bL]
        real_bL &= first_C[home_bL] == gather_bL
        gather_bL = home_bL
    scatter = gather_bL[real_bL]
    kept = None if bool(real_bL.all()) else real_bL.flatten().nonzero().squeeze(1).to(device)
    return Bucket(gather_bL.to(device), kept, scatter.to(device))


def packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    packed: PackedPlan | TracedAttention | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [1, H, N, D], key and value [1, K, N, D] -> ([1, N, H, D], None). Causal within each sequence."""
    if packed is None:
        raise ConfigError(f"{type(module).__name__} is not told how sequences are packed: its model does not hand on what it does not know; use another model")
    if attention_mask is not None or dropout or softcap is not None or s_aux is not None:
        raise ConfigError(f"{type(module).__name__} needs an attention mask, dropout, soft-capping or sinks, which packed attention does not have")
    if isinstance(packed, TracedAttention):
        return packed.attend(query, key, value, sliding_window), None
    query_NHD, key_NKD, value_NKD = (x[0].transpose(0, 1) for x in (query, key, value))
    if packed.sequence is None:
        return _attend(query_NHD, key_NKD, value_NKD, packed, scaling, sliding_window)[None], None
    query_NHD, key_NKD, value_NKD = packed.sequence.to_heads(query_NHD, key_NKD, value_NKD, packed.num_tokens)
    return packed.sequence.to_tokens(_attend(query_NHD, key_NKD, value_NKD, packed, scaling, sliding_window))[None], None


def _attend(
    query_NHD: torch.Tensor, key_NKD: torch.Tensor, value_NKD: torch.Tensor, packed: PackedPlan, scaling: float | None, sliding_window: int | None
) -> torch.Tensor:
    if not packed.buckets and packed.prefixes is not None:
        home_N, first_C = packed.prefixes.home_N, packed.prefixes.first_C
        query_NHD, key_NKD, value_NKD = (x.index_select(0, home_N) for x in (query_NHD, key_NKD, value_NKD))
        return _flash(query_NHD, key_NKD, value_NKD, packed, scaling, sliding_window).index_select(0, first_C)
    if not packed.buckets:
        return _flash(query_NHD, key_NKD, value_NKD, packed, scaling, sliding_window)
    attended, order = [], []
    for bucket in packed.buckets:
        # index_select, not indexing: its backward (index_add) is several times faster on CPUs.
        gather, shape = bucket.gather_bL.flatten(), bucket.gather_bL.shape
        q, k, v = (x.index_select(0, gather).view(*shape, *x.shape[1:]).transpose(1, 2) for x in (query_NHD, key_NKD, value_NKD))
        length = q.shape[2]
        window = None if sliding_window is None or sliding_window >= length else _window_mask(length, sliding_window, q.device)
        out = scaled_dot_product_attention(q, k, v, attn_mask=window, is_causal=window is None, scale=scaling, enable_gqa=q.shape[1] != k.shape[1])
        flat = out.transpose(1, 2).flatten(0, 1)
        attended.append(flat if bucket.kept is None else flat.index_select(0, bucket.kept))
        order.append(bucket.scatter)
    return torch.empty_like(query_NHD).index_copy(0, torch.cat(order), torch.cat(attended))


def _window_mask(length: int, sliding_window: int, device: torch.device) -> torch.Tensor:
    """bool [L, L]: a token sees itself and the sliding_window - 1 tokens before it."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None, :]
    return (distance >= 0) & (distance < sliding_window)


def _flash(
    query_NHD: torch.Tensor, key_NKD: torch.Tensor, value_NKD: torch.Tensor, packed: PackedPlan, scaling: float | None, window: int | None
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn  # CUDA only: imported where it is used

    out = varlen_attn(
        query_NHD.contiguous(),
        key_NKD.contiguous(),
        value_NKD.contiguous(),
        packed.cu_seqlens,
        packed.cu_seqlens,
        packed.max_length,
        packed.max_length,
        scale=scaling,
        window_size=(-1 if window is None else window - 1, 0),
        enable_gqa=query_NHD.shape[1] != key_NKD.shape[1],
    )
    assert isinstance(out, torch.Tensor)
    return out


AttentionInterface.register(NAME, packed_attention)
