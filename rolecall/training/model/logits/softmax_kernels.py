"""Kernels that take a block of logits into a softmax over the vocabulary, and write its gradient, in one pass each.

In Triton, for GPUs: written out in operators of torch the same arithmetic reads and writes every logit a dozen times,
which takes longer than the products around it. All arithmetic is float32, whatever the logits are; a soft cap of theirs
is rounded to their dtype after each of its steps, as samplers do. What the numbers mean, and the same on other devices,
is in logprobs.py.

Shapes: M scored tokens; K targets of each; B vocabulary of the block.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"
# Triton reads kernels by their source, and knows other types.

import torch
import triton
import triton.language as tl

_CHUNK = 4096
"""Most logits of a token that a program holds at once: 32 a thread."""
_WARPS = 8


def add_block(
    logits_MB: torch.Tensor,
    targets_MK: torch.Tensor,
    first_id: int,
    temperature_M1: torch.Tensor,
    max_M1: torch.Tensor,
    sum_M1: torch.Tensor,
    weighted_M1: torch.Tensor,
    target_MK: torch.Tensor,
    *,
    cap: float | None,
    entropy: bool,
) -> None:
    """Takes a block (its rows contiguous) into the running sums, float32 [M, 1], and the targets' z, float32 [M, K], in
    place. `first_id`: the token id of the block's first column. `cap`: the logits' soft cap; None: they have none.
    Without `entropy` weighted_M1 stays as it is.
    """
    (num_tokens, size), num_targets = logits_MB.shape, targets_MK.shape[1]
    if not num_tokens:
        return
    _add_block[(num_tokens,)](
        logits_MB,
        logits_MB.stride(0),
        targets_MK.contiguous(),
        temperature_M1,
        max_M1,
        sum_M1,
        weighted_M1,
        target_MK,
        first_id,
        size,
        num_targets,
        1.0 if cap is None else cap,
        CAPPED=cap is not None,
        ENTROPY=entropy,
        CHUNK=_chunk(size),
        TARGETS=triton.next_power_of_2(num_targets),
        num_warps=_WARPS,
    )


def gradient(
    logits_MB: torch.Tensor,
    targets_MK: torch.Tensor,
    first_id: int,
    temperature_M1: torch.Tensor,
    log_norm_M1: torch.Tensor,
    entropy_M1: torch.Tensor,
    grad_logprobs_MK: torch.Tensor,
    grad_entropy_M1: torch.Tensor | None,
    cap: float | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The gradient of a block's logits before they were capped, and divided by the temperature, by which the gradients
    from above (float32) are divided already: `dtype` [M, B].
    """
    (num_tokens, size), num_targets = logits_MB.shape, targets_MK.shape[1]
    grad_MB = torch.empty(logits_MB.shape, dtype=dtype, device=logits_MB.device)
    if not num_tokens:
        return grad_MB
    chunk = _chunk(size)
    _gradient[(num_tokens, triton.cdiv(size, chunk))](
        logits_MB,
        logits_MB.stride(0),
        grad_MB,
        targets_MK.contiguous(),
        temperature_M1,
        log_norm_M1,
        entropy_M1,
        grad_logprobs_MK.contiguous(),
        grad_logprobs_MK if grad_entropy_M1 is None else grad_entropy_M1,
        first_id,
        size,
        num_targets,
        1.0 if cap is None else cap,
        CAPPED=cap is not None,
        ENTROPY=grad_entropy_M1 is not None,
        CHUNK=chunk,
        num_warps=_WARPS,
    )
    return grad_MB


def _chunk(size: int) -> int:
    return min(_CHUNK, int(triton.next_power_of_2(size)))


@triton.jit
def _capped(logits, cap, dtype: tl.constexpr):
    """cap tanh(logits / cap), float32 as `logits` are, each step rounded to `dtype`."""
    inner = (logits * (1.0 / cap)).to(dtype).to(tl.float32)
    below = tl.exp(-2.0 * tl.abs(inner))  # at most 1: nothing overflows
    size = (1.0 - below) / (1.0 + below)
    tanh = tl.where(inner < 0.0, -size, size).to(dtype).to(tl.float32)
    return (tanh * cap).to(dtype).to(tl.float32)


@triton.jit
def _add_block(
    logits,
    stride,
    targets,
    temperatures,
    maxima,
    sums,
    weighted_sums,
    target_zs,
    first_id,
    size,
    num_targets,
    cap,
    CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
    CHUNK: tl.constexpr,
    TARGETS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    row = logits + token * stride
    inverse = 1.0 / tl.load(temperatures + token)
    highest, total = tl.load(maxima + token), tl.load(sums + token)
    weighted = tl.load(weighted_sums + token)
    for start in range(0, size, CHUNK):
        columns = start + tl.arange(0, CHUNK)
        inside = columns < size
        z = tl.load(row + columns, mask=inside, other=float("-inf")).to(tl.float32)
        if CAPPED:  # which would make a finite number of what is outside
            z = tl.where(inside, _capped(z, cap, logits.dtype.element_ty), float("-inf"))
        z *= inverse
        higher = tl.maximum(highest, tl.max(z, 0))
        lower = highest - higher
        scale = tl.exp(lower)
        below = z - higher
        p = tl.exp(below)
        if ENTROPY:
            weighted = scale * (weighted + lower * total) + tl.sum(tl.where(inside, p * below, 0.0), 0)
        total = scale * total + tl.sum(p, 0)
        highest = higher
    tl.store(maxima + token, highest)
    tl.store(sums + token, total)
    if ENTROPY:
        tl.store(weighted_sums + token, weighted)
    numbers = tl.arange(0, TARGETS)
    places = token * num_targets + numbers
    exists = numbers < num_targets
    at = tl.load(targets + places, mask=exists, other=-1) - first_id
    here = exists & (at >= 0) & (at < size)
    target_z = tl.load(row + at, mask=here, other=0.0).to(tl.float32)
    if CAPPED:
        target_z = _capped(target_z, cap, logits.dtype.element_ty)
    tl.store(target_zs + places, target_z * inverse, mask=here)


@triton.jit
def _gradient(
    logits,
    stride,
    gradients,
    targets,
    temperatures,
    log_norms,
    entropies,
    above_logprobs,
    above_entropies,
    first_id,
    size,
    num_targets,
    cap,
    CAPPED: tl.constexpr,
    ENTROPY: tl.constexpr,
    CHUNK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * CHUNK
    offsets = tl.arange(0, CHUNK)
    columns = start + offsets
    inside = columns < size
    inverse = 1.0 / tl.load(temperatures + token)
    logit = tl.load(logits + token * stride + columns, mask=inside, other=0.0).to(tl.float32)
    if CAPPED:
        logit = _capped(logit, cap, logits.dtype.element_ty)
    log_p = logit * inverse - tl.load(log_norms + token)
    total = 0.0
    of_targets = tl.zeros([CHUNK], dtype=tl.float32)
    for number in range(num_targets):
        above = tl.load(above_logprobs + token * num_targets + number)
        total += above
        at = tl.load(targets + token * num_targets + number) - first_id - start
        if (at >= 0) & (at < CHUNK):
            of_targets += tl.where(offsets == at, above, 0.0)
    factor = -total
    if ENTROPY:
        factor = factor - (log_p + tl.load(entropies + token)) * tl.load(above_entropies + token)
    gradient = tl.exp(log_p) * factor + of_targets
    if CAPPED:
        share = logit / cap
        gradient *= 1.0 - share * share
    tl.store(gradients + token * size + columns, gradient.to(gradients.dtype.element_ty), mask=inside)
