"""From hidden states to logprobs and entropy, in chunks, forward and backward: never a whole [N, V] in float32.

One autograd function with a hand-written backward that recomputes each chunk's logits. It owns the arithmetic that must agree with the sampler's:
log_softmax(logits / temperature), the softmax in float32. Nothing here knows packing or models.

Shapes: M scored tokens; H hidden size; V vocabulary; C tokens of one chunk.
"""

from typing import Any

import torch

CHUNK_ELEMENTS = 2**25
"""Most logits of one chunk: 128 MiB in float32; the peak is about three times that."""


def logprobs_and_entropy(
    hidden_MH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_M: torch.Tensor,
    temperature_M: torch.Tensor,
    *,
    entropy: bool = True,
    chunk_elements: int = CHUNK_ELEMENTS,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprobs_M, entropy_M), float32, differentiable in hidden_MH and weight_VH (any float dtype, the same); targets int64, temperatures float32.

    Entropy is zeros, and costs nothing, unless asked for. Double precision inputs are computed in double.
    """
    chunk = max(1, chunk_elements // weight_VH.shape[0])
    logprobs_M, entropy_M = _ChunkedLogprobs.apply(hidden_MH, weight_VH, targets_M, temperature_M, chunk, entropy)  # type: ignore[no-untyped-call]
    return logprobs_M, entropy_M


def _log_softmax(hidden_CH: torch.Tensor, weight_VH: torch.Tensor, temperature_C: torch.Tensor) -> torch.Tensor:
    logits_CV = hidden_CH @ weight_VH.T
    wide = torch.promote_types(logits_CV.dtype, torch.float32)
    return torch.log_softmax(logits_CV.to(wide) / temperature_C[:, None].to(wide), dim=-1)


class _ChunkedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_MH: torch.Tensor, weight_VH: torch.Tensor, targets_M: torch.Tensor, temperature_M: torch.Tensor, chunk: int, entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.promote_types(hidden_MH.dtype, torch.float32)
        logprobs_M = torch.empty(hidden_MH.shape[0], dtype=wide, device=hidden_MH.device)
        entropy_M = torch.zeros_like(logprobs_M)
        for start in range(0, hidden_MH.shape[0], chunk):
            part = slice(start, start + chunk)
            log_p_CV = _log_softmax(hidden_MH[part], weight_VH, temperature_M[part])
            logprobs_M[part] = log_p_CV.gather(1, targets_M[part, None])[:, 0]
            if entropy:
                entropy_M[part] = -(log_p_CV.exp() * log_p_CV).sum(dim=-1)
        ctx.save_for_backward(hidden_MH, weight_VH, targets_M, temperature_M, entropy_M)
        ctx.chunk, ctx.entropy = chunk, entropy
        return logprobs_M, entropy_M

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """With p = softmax(z), z = logits / temperature: d logp(target) / dz = onehot - p, d entropy / dz = -p (log p + entropy)."""
        grad_logprobs_M, grad_entropy_M = grads
        hidden_MH, weight_VH, targets_M, temperature_M, entropy_M = ctx.saved_tensors
        grad_hidden_MH = torch.empty_like(hidden_MH)
        wide = torch.promote_types(weight_VH.dtype, torch.float32)
        grad_weight_VH = torch.zeros(weight_VH.shape, dtype=wide, device=weight_VH.device)
        for start in range(0, hidden_MH.shape[0], ctx.chunk):
            part = slice(start, start + ctx.chunk)
            log_p_CV = _log_softmax(hidden_MH[part], weight_VH, temperature_M[part])
            p_CV = log_p_CV.exp()
            if ctx.entropy:
                grad_z_CV = log_p_CV.add_(entropy_M[part, None]).mul_(-grad_entropy_M[part, None]).sub_(grad_logprobs_M[part, None]).mul_(p_CV)
            else:
                grad_z_CV = p_CV.mul_(-grad_logprobs_M[part, None])
            grad_z_CV.scatter_add_(1, targets_M[part, None], grad_logprobs_M[part, None])
            grad_logits_CV = grad_z_CV.div_(temperature_M[part, None]).to(hidden_MH.dtype)
            grad_hidden_MH[part] = grad_logits_CV @ weight_VH
            grad_weight_VH += grad_logits_CV.T @ hidden_MH[part]
        return grad_hidden_MH, grad_weight_VH.to(weight_VH.dtype), None, None, None, None
