"""Attention with sinks, by torch's fused kernels, which know none: each head has one learned score that takes part in
the softmax of its every row and has no value (gpt-oss' model card, arXiv:2508.10925, section 2).

Forward. A row has scores z_j, values v_j and its head's sink s. A kernel without sinks gives the row's output o and
l = log sum_j exp(z_j). With the sink the softmax divides by exp(l) + exp(s), whose logarithm is l' = logaddexp(l, s):

    p_j = exp(z_j - l'),    o' = sum_j p_j v_j = exp(l - l') o.

Backward, of a gradient g of o'. Let dp_j = g . v_j and D = sum_j p_j dp_j = g . o'. The softmax is over the scores and
the sink, and the sink's own probability exp(s - l') meets no value, so its dp is 0:

    dv_j = p_j g,    dz_j = p_j (dp_j - D),    ds = exp(s - l') (0 - D), summed over the rows of the head.

The backward pass of flash attention (arXiv:2307.08691, algorithm 2) makes p_j = exp(z_j - l) and D = g . o of what
forward kept, and uses l and o for nothing else. Given l' and o' in their place it returns exactly the gradients above
of queries, keys and values. So any mask and window is the kernel's own, and as much waits for backward as without
sinks.

Shapes: H query heads, K key heads, D head size. A batch has b sequences of L tokens, a pack N tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

BIAS_MULTIPLE = 16
"""The memory-efficient kernel reads rows of a bias whose storage is a multiple of so many numbers."""


@dataclass(frozen=True)
class Kernel:
    """Both passes of one of torch's kernels of attention."""

    forward: Callable[..., Sequence[torch.Tensor]]
    """(query, key, value) -> output, log-sum-exps in float32 or wider, and whatever else backward takes."""
    backward: Callable[..., Sequence[torch.Tensor]]
    """(gradient, query, key, value, output, log-sum-exps, and the rest) -> gradients of query, key and value."""
    is_packed: bool = False
    """Whether it attends over packs, [N, H, D] with log-sum-exps [H, N]; else over batches, [b, H, L, D] with [b, H, L
    or more].
    """


def attend_with_sinks(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sinks_H: torch.Tensor, kernel: Kernel
) -> torch.Tensor:
    """The output of `kernel` as if each head's softmax had the head's sink in it, with gradients to all four."""
    out: torch.Tensor = _WithSinks.apply(query, key, value, sinks_H, kernel)  # type: ignore[no-untyped-call]
    return out


def host_kernel(bias_LL: torch.Tensor | None, scaling: float | None) -> Kernel:
    """The kernel of CPUs, which takes fewer key heads than query heads. `bias_LL` is added to the scores; None:
    causal.
    """
    aten, causal = torch.ops.aten, bias_LL is None
    return Kernel(
        lambda *qkv: aten._scaled_dot_product_flash_attention_for_cpu(
            *qkv, 0.0, causal, attn_mask=bias_LL, scale=scaling
        ),
        lambda *kept: aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *kept, 0.0, causal, attn_mask=bias_LL, scale=scaling
        ),
    )


def memory_efficient_kernel(bias_LL: torch.Tensor | None, scaling: float | None) -> Kernel:
    """The kernel of GPUs for float32 and for wide heads, which takes as many key heads as query heads. Its
    log-sum-exps go on behind the L rows, with infinity.
    """
    aten, causal = torch.ops.aten, bias_LL is None
    if bias_LL is not None:
        bias_LL = pad(bias_LL, (0, -bias_LL.shape[1] % BIAS_MULTIPLE))[:, : bias_LL.shape[1]]

    def bias(query_bHLD: torch.Tensor) -> torch.Tensor | None:
        return None if bias_LL is None else bias_LL.expand(*query_bHLD.shape[:2], -1, -1)

    def backward(grad: torch.Tensor, *kept: torch.Tensor) -> Sequence[torch.Tensor]:
        query, key, value, *rest = kept
        found: Sequence[torch.Tensor] = aten._scaled_dot_product_efficient_attention_backward(
            grad, query, key, value, bias(query), *rest, 0.0, [True, True, True, False], causal, scale=scaling
        )
        return found[:3]

    return Kernel(
        lambda query, key, value: aten._scaled_dot_product_efficient_attention(
            query, key, value, bias(query), True, 0.0, causal, scale=scaling
        ),
        backward,
    )


def packed_kernel(cu_seqlens: torch.Tensor, max_length: int, window: tuple[int, int], scaling: float) -> Kernel:
    """Flash attention over a pack, on GPUs in half precision. A query sees window[0] keys before its own and window[1]
    behind; -1: all.
    """
    aten, where = torch.ops.aten, (cu_seqlens, cu_seqlens, max_length, max_length)
    causal = window == (-1, 0)
    sides = {"window_size_left": window[0], "window_size_right": window[1]}
    return Kernel(
        lambda *qkv: aten._flash_attention_forward(*qkv, *where, 0.0, causal, False, scale=scaling, **sides)[:4],
        lambda *kept: aten._flash_attention_backward(*kept[:6], *where, 0.0, causal, *kept[6:], scale=scaling, **sides),
        is_packed=True,
    )


class _WithSinks(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks_H: torch.Tensor,
        kernel: Kernel,
    ) -> torch.Tensor:
        out, lse, *rest = kernel.forward(query, key, value)
        with_sinks = torch.logaddexp(lse, sinks_H.to(lse.dtype)[:, None])
        out = out.mul_(_of_rows((lse - with_sinks).exp(), out, kernel)[..., None])
        ctx.kernel = kernel
        ctx.save_for_backward(sinks_H, query, key, value, out, with_sinks, *rest)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (grad,) = grads
        sinks_H, *kept = ctx.saved_tensors
        out, lse = kept[3:5]
        shares = _of_rows((sinks_H.to(lse.dtype)[:, None] - lse).exp(), out, ctx.kernel)
        deltas = (grad * out).sum(-1, dtype=lse.dtype)
        grad_sinks = -(shares * deltas).transpose(0, 1).flatten(1).sum(1)
        return *ctx.kernel.backward(grad, *kept), grad_sinks.to(sinks_H.dtype), None


def _of_rows(lse: torch.Tensor, out: torch.Tensor, kernel: Kernel) -> torch.Tensor:
    """Puts numbers that lie as log-sum-exps do in the order of the output's rows: [N, H] or [b, H, L]."""
    return lse.t() if kernel.is_packed else lse[..., : out.shape[2]]
