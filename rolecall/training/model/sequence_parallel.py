"""Sequence parallelism (Ulysses, arXiv 2309.14509): ranks that compute one microbatch together, each a run of its
tokens, each some heads of attention.

Tokens are cut into equal runs, the last ones padded. Everything token-wise happens on the own run. Around attention one
exchange gives every rank all tokens of its part of the heads, another brings the results back. Per-token outputs are
then summed over the ranks, so that everybody has those of the whole microbatch and computes the same loss; each rank's
gradients are of its own run, and their sum over the ranks is the gradient.

Shapes: N tokens of the microbatch; n tokens of a run, R ranks, n * R >= N; H query heads, K key heads, D head size.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad


@dataclass(frozen=True)
class SequenceShare:
    """One rank's part in a group that shares sequences."""

    group: dist.ProcessGroup
    rank: int
    size: int

    def run(self, num_tokens: int) -> range:
        """This rank's tokens of `num_tokens`; may reach beyond them, or be wholly beyond."""
        length = -(-num_tokens // self.size)
        return range(self.rank * length, (self.rank + 1) * length)

    def own(self, tensor_N: torch.Tensor) -> torch.Tensor:
        """The own run of a per-token tensor, zeros where it reaches beyond."""
        run = self.run(tensor_N.shape[0])
        part = tensor_N[run.start : run.stop]
        return _padded(part, 0, len(run) - part.shape[0])

    def to_heads(
        self, query_nHD: torch.Tensor, key_nKD: torch.Tensor, value_nKD: torch.Tensor, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """All tokens of this rank's heads: [N, H / R, D] and twice [N, max(K / R, 1), D]. Fewer key heads than ranks
        are sent to several.
        """
        copies = max(1, self.size // key_nKD.shape[1])
        sent = [query_nHD, *(x.repeat_interleave(copies, dim=1) if copies > 1 else x for x in (key_nKD, value_nKD))]
        parts = [x.reshape(x.shape[0], self.size, -1).transpose(0, 1) for x in sent]  # each [R, n, (heads / R) * D]
        arrived = self._exchange(torch.cat(parts, dim=2)).flatten(0, 1)[:num_tokens]
        query, key, value = torch.split(arrived, [part.shape[2] for part in parts], dim=1)
        heads = [
            x.reshape(num_tokens, -1, original.shape[2]) for x, original in zip((query, key, value), sent, strict=True)
        ]
        return heads[0], heads[1], heads[2]

    def of_heads(self, tensor_H: torch.Tensor) -> torch.Tensor:
        """This rank's part, [H / R], of a tensor of one number for each query head."""
        return tensor_H.chunk(self.size)[self.rank]

    def to_tokens(self, attended_NHD: torch.Tensor) -> torch.Tensor:
        """The way back: all heads of the own run, [n, H, D], from all tokens of this rank's heads."""
        padding = -attended_NHD.shape[0] % self.size
        padded = pad(attended_NHD, (0, 0, 0, 0, 0, padding)) if padding else attended_NHD
        arrived = self._exchange(padded.reshape(self.size, -1, *attended_NHD.shape[1:]))
        return arrived.transpose(0, 1).flatten(1, 2)

    def whole(self, part_N: torch.Tensor) -> torch.Tensor:
        """Per-token outputs of all runs from `part_N`, which is zero outside the own one."""
        result: torch.Tensor = _Sum.apply(part_N, self.group)  # type: ignore[no-untyped-call]
        return result

    def joined(self, own_n: torch.Tensor, num_tokens: int) -> torch.Tensor:
        """Per-token outputs of all runs, [N, ...], from those of the own one."""
        run = self.run(num_tokens)
        real = own_n[: max(0, num_tokens - run.start)]
        return self.whole(_padded(real, min(run.start, num_tokens), max(0, num_tokens - run.stop)))

    def _exchange(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Exchange.apply(x, self.group)  # type: ignore[no-untyped-call]
        return result


def _padded(x: torch.Tensor, before: int, after: int) -> torch.Tensor:
    """`x` with zeros around it along its first dimension."""
    return pad(x, (*(0, 0) * (x.ndim - 1), before, after))


class _Exchange(torch.autograd.Function):
    """x[r] goes to rank r; what rank r sent here is result[r]. Its own transpose."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        result = torch.empty_like(x, memory_format=torch.contiguous_format)
        dist.all_to_all_single(result, x.contiguous(), group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        (grad,) = grads
        result = torch.empty_like(grad, memory_format=torch.contiguous_format)
        dist.all_to_all_single(result, grad.contiguous(), group=ctx.group)
        return result, None


class _Sum(torch.autograd.Function):
    """The sum over ranks. Backward is the identity: every rank computes the same loss of it, and each goes on with its
    own part only.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        result = x.clone()
        dist.all_reduce(result, group=group)
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grads[0], None
