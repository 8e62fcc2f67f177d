"""Attention over packed sequences, registered with transformers as `rolecall_packed`: never a T x T mask over the pack.

Two ways, chosen by device, dtype and a layer's heads, same numbers: on GPUs in half precision torch's variable-length
flash attention over cu_seqlens, but for wide heads (Gemma 4 has both); otherwise scaled_dot_product_attention over
buckets of sequences of similar length, padded on the right inside the bucket only (a causal query never sees padding on
its right, so no mask is needed). Many short sequences then cost one call, one long sequence costs no padding. Where
sequences share their beginnings (prefixes.py), each still attends as a whole, and of what is computed more than once
the first is taken.

What the kernels of a device take is given to them: flash attention one head size, a multiple of 8, so the smaller of
keys' and values' (latent attention) is padded with zeros; SDPA's kernels without an L x L matrix on GPUs as many key
heads as query heads.

Where heads have sinks the same kernels compute (sinks.py); where scores have a soft cap, none does (soft_caps.py), and
the buckets are used on every device.

Models must run with use_cache=False and get the plan as the keyword `packed`. Left out: attention dropout; models that
need it are refused.

Shapes: N tokens of the pack; S sequences; b sequences of a bucket, L its longest; H query heads, K key heads, D head
size, E of values.
"""

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface

from rolecall.errors import ConfigError
from rolecall.training.model.attention.sinks import (
    attend_with_sinks,
    host_kernel,
    memory_efficient_kernel,
    packed_kernel,
)
from rolecall.training.model.attention.soft_caps import attend_with_cap
from rolecall.training.model.prefixes import SharedPrefixes
from rolecall.training.model.router_replay import Routes
from rolecall.training.model.sequence_parallel import SequenceShare
from rolecall.training.ranks.device import FLASH_HEAD_SIZE, attends_packed, groups_heads

NAME = "rolecall_packed"
"""Pass as attn_implementation."""

WITH_SINKS = ("GptOssAttention",)
"""Names of layers whose sinks are known to arrive in rollouts (weights/reload.py)."""
WITH_CAPS = ("Gemma2Attention",)
"""Names of layers whose scores rollouts are known to cap as well."""
PADDING_RATIO = 1.25
"""A bucket ends where padding every sequence to its longest would cost more than this over the bucket's own tokens."""

FLASH_MULTIPLE = 8
"""Flash attention's head sizes are multiples of it."""


@dataclass(frozen=True)
class Bucket:
    """A set of sequences of similar length, attended to as one padded batch."""

    gather_bL: torch.Tensor
    """int64 [b, L], index into the queries; padding repeats the sequence's last token."""
    kept: torch.Tensor | None
    """int64, flat positions in [b * L] that are no padding; None: all."""
    scatter: torch.Tensor
    """int64, their indices into the output."""


@dataclass(frozen=True)
class PackedPlan:
    """The plan by which layers attend over one microbatch; made once, used by every layer."""

    cu_seqlens: torch.Tensor
    max_length: int
    buckets: tuple[Bucket, ...]
    """Empty where the flash path is used and no layer takes buckets."""
    num_tokens: int
    flash: bool
    """Whether layers take the flash path where their heads are not too wide for it; else the buckets."""
    sequence: SequenceShare | None = None
    """The ranks that share the tokens; None: this rank computes all of them."""
    prefixes: SharedPrefixes | None = None
    """Given, queries, keys, values and the output are of distinct tokens; every sequence attends as a whole."""
    plain: bool = False
    """Whether to use matrix products and a softmax instead of one fused kernel: the same but for rounding."""
    causal: bool = True
    """Whether a query sees only keys before it and its own; else all of its sequence."""
    routes: Routes | None = None
    """The experts that the layers' routers are to choose, or have chosen; None: nobody asks."""


@dataclass(frozen=True)
class TracedLayer:
    """The request that one layer makes of attention."""

    num_heads: int
    key_size: int
    value_size: int
    sliding_window: int | None


class TracedAttention:
    """A plan for a model that is only looked at, on the meta device: it notes what each layer asks and attends to
    nothing (training/account/flops.py).
    """

    def __init__(self) -> None:
        self.layers: list[TracedLayer] = []
        self.recurrences: list[int] = []
        """FLOPs of a token in each recurrent layer, beside its matrices (recurrent.py)."""
        self.routes = Routes()
        self.sequence: SequenceShare | None = None

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sliding_window: int | None
    ) -> torch.Tensor:
        """[1, N, H, value size]: of the right shape, with gradients to all three and without a matrix
        multiplication.
        """
        self.layers.append(TracedLayer(query.shape[1], key.shape[-1], value.shape[-1], sliding_window))
        keyed = query.sum(-1, keepdim=True) + key.sum((1, 3))[:, None, :, None]
        return (keyed + value.sum(1, keepdim=True)).transpose(1, 2).contiguous()


def plan_attention(
    lengths: Sequence[int],
    cu_seqlens: torch.Tensor,
    dtype: torch.dtype,
    sequence: SequenceShare | None = None,
    prefixes: SharedPrefixes | None = None,
    head_size: int = 0,
    *,
    plain: bool = False,
    takes_buckets: bool = False,
    causal: bool = True,
) -> PackedPlan:
    """The plan for sequences of these lengths (at least one) on cu_seqlens' device, computing in `dtype`, heads at most
    `head_size` wide; `takes_buckets`: of a model with layers that do, whatever their width. Not `causal`: only
    sequences of one length share a bucket.

    `plain` is for short sequences only: it makes the whole matrix of scores.
    """
    flash = attends_packed(cu_seqlens.device, dtype) and not plain
    takes_buckets |= head_size > FLASH_HEAD_SIZE
    ratio = PADDING_RATIO if causal else 1.0
    buckets = () if flash and not takes_buckets else _buckets(lengths, cu_seqlens.device, ratio)
    return PackedPlan(cu_seqlens, max(lengths), buckets, sum(lengths), flash, sequence, prefixes, plain, causal)


def _buckets(lengths: Sequence[int], device: torch.device, ratio: float) -> tuple[Bucket, ...]:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    by_length = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    buckets, members, tokens = [], [by_length[0]], lengths[by_length[0]]
    for i in by_length[1:]:
        if lengths[members[0]] * (len(members) + 1) > ratio * (tokens + lengths[i]):
            buckets.append(_bucket(members, lengths, starts, device))
            members, tokens = [], 0
        members.append(i)
        tokens += lengths[i]
    return (*buckets, _bucket(members, lengths, starts, device))


def _bucket(members: Sequence[int], lengths: Sequence[int], starts: Sequence[int], device: torch.device) -> Bucket:
    start_b = torch.tensor([starts[i] for i in members])
    length_b = torch.tensor([lengths[i] for i in members])
    offset_L = torch.arange(int(length_b.max()))
    gather_bL = start_b[:, None] + torch.minimum(offset_L, length_b[:, None] - 1)
    real_bL = offset_L < length_b[:, None]
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
    """transformers' attention interface: query [1, H, N, D], key [1, K, N, D], value [1, K, N, E], sinks s_aux [H]
    -> ([1, N, H, E], None). Causal within each sequence.
    """
    if packed is None:
        raise ConfigError(
            f"{type(module).__name__} is not told how sequences are packed: its model does not hand on what it does "
            "not know; use another model"
        )
    if attention_mask is not None or dropout:
        raise ConfigError(
            f"{type(module).__name__} needs an attention mask or dropout, which packed attention does not have"
        )
    if softcap is not None and type(module).__name__ not in WITH_CAPS:
        raise ConfigError(
            f"{type(module).__name__} caps the scores of attention softly, which rollouts do of Gemma 2 alone; use "
            "another model"
        )
    if s_aux is not None and type(module).__name__ not in WITH_SINKS:
        raise ConfigError(
            f"{type(module).__name__} has attention sinks, which rollouts take of gpt-oss alone; use another model"
        )
    if isinstance(packed, TracedAttention):
        return packed.attend(query, key, value, sliding_window), None
    query_NHD, key_NKD, value_NKE = (x[0].transpose(0, 1) for x in (query, key, value))
    if packed.sequence is not None:
        query_NHD, key_NKD, value_NKE = packed.sequence.to_heads(query_NHD, key_NKD, value_NKE, packed.num_tokens)
        s_aux = None if s_aux is None else packed.sequence.of_heads(s_aux)
    if packed.prefixes is not None:
        query_NHD, key_NKD, value_NKE = (packed.prefixes.spread(x) for x in (query_NHD, key_NKD, value_NKE))
    out_NHE = attend_packed(query_NHD, key_NKD, value_NKE, packed, scaling, sliding_window, s_aux, softcap)
    if packed.prefixes is not None:
        out_NHE = out_NHE.index_select(0, packed.prefixes.first_C)
    if packed.sequence is not None:
        out_NHE = packed.sequence.to_tokens(out_NHE)
    return out_NHE[None], None


def attend_packed(
    query_NHD: torch.Tensor,
    key_NKD: torch.Tensor,
    value_NKE: torch.Tensor,
    packed: PackedPlan,
    scaling: float | None,
    sliding_window: int | None = None,
    sinks_H: torch.Tensor | None = None,
    cap: float | None = None,
) -> torch.Tensor:
    """[N, H, E]: each sequence of `packed` attends to itself, whole. `cap`: the soft cap of its scores, with which it
    is causal and has no sinks.
    """
    if cap is not None:
        return _capped_attention(query_NHD, key_NKD, value_NKE, packed, scaling, sliding_window, cap)
    is_wide = max(key_NKD.shape[2], value_NKE.shape[2]) > FLASH_HEAD_SIZE
    attend = _flash if packed.flash and not is_wide else _padded_attention
    return attend(query_NHD, key_NKD, value_NKE, packed, scaling, sliding_window, sinks_H)


def in_buckets(
    packed: PackedPlan, inputs: Sequence[torch.Tensor], compute: Callable[..., torch.Tensor]
) -> torch.Tensor:
    """[N, ...]: what `compute` makes, [b, L, ...], of each bucket's part, [b, L, ...], of every input, [N, ...]."""
    outputs, order = [], []
    for bucket in packed.buckets:
        # index_select, not indexing: its backward (index_add) is several times faster on CPUs.
        gather, shape = bucket.gather_bL.flatten(), bucket.gather_bL.shape
        out = compute(*(x.index_select(0, gather).view(*shape, *x.shape[1:]) for x in inputs)).flatten(0, 1)
        outputs.append(out if bucket.kept is None else out.index_select(0, bucket.kept))
        order.append(bucket.scatter)
    together = torch.cat(outputs)
    return torch.empty_like(together).index_copy(0, torch.cat(order), together)


def _padded_attention(
    query_NHD: torch.Tensor,
    key_NKD: torch.Tensor,
    value_NKE: torch.Tensor,
    packed: PackedPlan,
    scaling: float | None,
    sliding_window: int | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    if packed.plain or not groups_heads(query_NHD.device):
        key_NKD, value_NKE = _repeated(key_NKD, query_NHD.shape[1]), _repeated(value_NKE, query_NHD.shape[1])

    def attend(q_bLHD: torch.Tensor, k_bLKD: torch.Tensor, v_bLKE: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q_bLHD, k_bLKD, v_bLKE))
        length = q.shape[2]
        window = (
            None
            if sliding_window is None or sliding_window >= length
            else _window_mask(length, sliding_window, q.device)
        )
        if packed.plain:
            out = _plain(
                q, k, v, _window_mask(length, length, q.device) if window is None else window, scaling, sinks_H
            )
        elif sinks_H is not None:
            bias = None if window is None else torch.zeros_like(window, dtype=q.dtype).masked_fill(~window, -torch.inf)
            kernel = (host_kernel if groups_heads(q.device) else memory_efficient_kernel)(bias, scaling)
            out = attend_with_sinks(q, k, v, sinks_H, kernel)
        else:
            out = scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=window,
                is_causal=packed.causal and window is None,
                scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        return out.transpose(1, 2)

    return in_buckets(packed, (query_NHD, key_NKD, value_NKE), attend)


def _capped_attention(
    query_NHD: torch.Tensor,
    key_NKD: torch.Tensor,
    value_NKE: torch.Tensor,
    packed: PackedPlan,
    scaling: float | None,
    sliding_window: int | None,
    cap: float,
) -> torch.Tensor:
    key_NHD, value_NHE = _repeated(key_NKD, query_NHD.shape[1]), _repeated(value_NKE, query_NHD.shape[1])

    def attend(*qkv_bLHD: torch.Tensor) -> torch.Tensor:
        q, k, v = (x.transpose(1, 2) for x in qkv_bLHD)
        return attend_with_cap(q, k, v, scaling, sliding_window, cap).transpose(1, 2)

    return in_buckets(packed, (query_NHD, key_NHD, value_NHE), attend)


def _plain(
    q_bHLD: torch.Tensor,
    k_bHLD: torch.Tensor,
    v_bHLE: torch.Tensor,
    mask_LL: torch.Tensor,
    scaling: float | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    """[b, H, L, E], rounded after each product as kernels that are not fused do."""
    scores_bHLL = q_bHLD @ k_bHLD.transpose(-1, -2) * (q_bHLD.shape[-1] ** -0.5 if scaling is None else scaling)
    scores_bHLL = scores_bHLL.float().masked_fill(~mask_LL, -torch.inf)
    if sinks_H is None:
        weights_bHLL = scores_bHLL.softmax(-1)
    else:
        sinks_bHL1 = sinks_H.float()[:, None, None].expand(*scores_bHLL.shape[:3], 1)
        weights_bHLL = torch.cat([scores_bHLL, sinks_bHL1], -1).softmax(-1)[..., :-1]
    return weights_bHLL.to(v_bHLE.dtype) @ v_bHLE


def _window_mask(length: int, sliding_window: int, device: torch.device) -> torch.Tensor:
    """bool [L, L]: a token sees itself and the sliding_window - 1 tokens before it."""
    distance = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)[None, :]
    return (distance >= 0) & (distance < sliding_window)


def _flash(
    query_NHD: torch.Tensor,
    key_NKD: torch.Tensor,
    value_NKE: torch.Tensor,
    packed: PackedPlan,
    scaling: float | None,
    sliding_window: int | None,
    sinks_H: torch.Tensor | None,
) -> torch.Tensor:
    from torch.nn.attention.varlen import varlen_attn  # CUDA only: imported where it is used

    kernel: Callable[..., torch.Tensor] = varlen_attn  # type: ignore[assignment]  # a tuple only where return_aux is given
    grouped = _takes_grouped_heads(kernel)
    query, key, value, scale = flash_operands(query_NHD, key_NKD, value_NKE, scaling, grouped=grouped)
    window = (-1 if sliding_window is None else sliding_window - 1, 0 if packed.causal else -1)
    if sinks_H is not None:
        with_sinks = packed_kernel(packed.cu_seqlens, packed.max_length, window, scale)
        return attend_with_sinks(query, key, value, sinks_H, with_sinks)[..., : value_NKE.shape[2]]
    out = kernel(
        query,
        key,
        value,
        packed.cu_seqlens,
        packed.cu_seqlens,
        packed.max_length,
        packed.max_length,
        scale=scale,
        window_size=window,
        **({"enable_gqa": query.shape[1] != key.shape[1]} if grouped else {}),
    )
    return out[..., : value_NKE.shape[2]]


def flash_operands(
    query_NHD: torch.Tensor, key_NKD: torch.Tensor, value_NKE: torch.Tensor, scaling: float | None, *, grouped: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, float]:
    """(query, key, value, scale) that mean the same to flash attention, whose output's first E numbers of a head are
    the wanted ones.

    Heads of one size, a multiple of FLASH_MULTIPLE; as many key heads as query heads unless the kernel takes them
    `grouped`.
    """
    size = -(-max(key_NKD.shape[2], value_NKE.shape[2]) // FLASH_MULTIPLE) * FLASH_MULTIPLE
    query, key, value = (_padded(x, size).contiguous() for x in (query_NHD, key_NKD, value_NKE))
    if not grouped:
        key, value = _repeated(key, query.shape[1]), _repeated(value, query.shape[1])
    return query, key, value, query_NHD.shape[2] ** -0.5 if scaling is None else scaling


def _padded(x_NKD: torch.Tensor, size: int) -> torch.Tensor:
    """Pads each head with zeros; returns the tensor itself where nothing is missing, of which `pad` would make a copy,
    forward and backward.
    """
    return x_NKD if x_NKD.shape[2] == size else pad(x_NKD, (0, size - x_NKD.shape[2]))


def _repeated(x_NKD: torch.Tensor, num_heads: int) -> torch.Tensor:
    """[N, H, D]: every query head's own key head."""
    num_queries = num_heads // x_NKD.shape[1]
    return x_NKD if num_queries == 1 else x_NKD.repeat_interleave(num_queries, dim=1)


@cache
def _takes_grouped_heads(varlen_attn: Callable[..., Any]) -> bool:
    """Whether this torch's variable-length attention takes fewer key heads than query heads: from 2.12 on."""
    return "enable_gqa" in inspect.signature(varlen_attn).parameters


# Not for compilers of layers: the plan, lists of tensors, differs from microbatch to microbatch.
AttentionInterface.register(NAME, torch.compiler.disable(packed_attention))  # type: ignore[no-untyped-call]
