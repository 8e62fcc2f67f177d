"""Logprobs and entropy from hidden states, in blocks of the vocabulary, forward and backward: never a whole [M, V]
beyond the weight's own gradient.

One autograd function with a hand-written backward. Blocks run over the vocabulary, not over tokens: a block's weight
gradient is then one product over all tokens, written in place, and needs no float32 copy; and ranks that each keep a
part of the vocabulary (tensor parallel) differ from one rank only by three small reductions. The backward pass needs
each block's logits again. As many as fit are kept since the forward pass in the memory of the weight's gradient, which
nobody needs before; the others are computed again, as are all float32 logits of half-precision inputs, for which that
memory is too narrow. On GPUs a kernel takes each block in one pass (softmax_kernels.py). It owns the arithmetic that
must agree with the sampler's: log_softmax(logits / temperature), the softmax in float32, and logits in the inputs'
dtype or in float32, as the sampler has them. A soft cap c makes c tanh(x / c) of each product x before the temperature,
in the products' dtype as the sampler does. Nothing here knows packing or models.

The sum over the vocabulary is the online softmax of Milakov and Gimelshein (arXiv 1805.02867).

Shapes: M scored tokens; K targets of each; H hidden size; V this rank's part of the vocabulary, all of it without
`vocab`; B vocabulary of one block; k ids of highest probability; R ranks that share the vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from rolecall.training.ranks.device import add_product_, float32_product, runs_kernels

CPU_BLOCK_ELEMENTS = 2**22
"""Most logits of one block on a CPU, 16 MiB in float32: what caches and the allocator's free lists hold. At the peak
there are about four such tensors.
"""
DEVICE_BLOCK_ELEMENTS = 2**24
"""The same on other devices, 64 MiB: enough work for each of a block's operators."""
KERNEL_BLOCK_ELEMENTS = 2**26
"""The same where kernels take a block in one pass, 128 MiB in bfloat16 and twice that in float32: there are two such
tensors at the peak, logits and their gradient. The more columns a block has, the fewer times a product of it is added
to the hidden states' gradient.
"""


@dataclass(frozen=True)
class VocabShard:
    """The part of the vocabulary that a rank keeps, when the output layer is split over the ranks of a group."""

    group: dist.ProcessGroup
    """Ranks that keep all of the vocabulary together, each row on one rank, and make the same calls with equal hidden
    states and targets.
    """
    start: int
    """The token id of this rank's first row."""


_ALIGNMENT = 128
"""A block has a multiple of so many columns if it has more: rows of logits, in whatever dtype, then begin where the
products and kernels of a GPU read them whole.
"""


def logprobs_and_entropy(
    hidden_MH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets: torch.Tensor,
    temperature_M: torch.Tensor,
    *,
    entropy: bool = True,
    vocab: VocabShard | None = None,
    cap: float | None = None,
    float32_logits: bool = False,
    block_elements: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(logprobs, entropy_M), float32, differentiable in hidden_MH and weight_VH (any float dtype, the same);
    temperatures float32.

    Targets are int64, [M] or several of each token, [M, K]; logprobs have their shape. Entropy is zeros, and costs
    nothing, unless asked for. Double precision inputs are computed in double. With `vocab` the outputs and the gradient
    of hidden_MH are those of the whole vocabulary, equal on its ranks, weight_VH and its gradient this rank's; forward
    and backward are then collectives. `cap`: the soft cap of the products; None: they have none. `float32_logits`:
    products of half-precision inputs are not rounded to it; gradients are. `block_elements` absent: as suits the
    device.
    """
    keeps = torch.is_grad_enabled() and weight_VH.requires_grad
    size = block_elements or _block_elements(hidden_MH, in_kernels=_in_kernels(hidden_MH))
    cut = _cut(hidden_MH, vocab, size, cap, float32_logits, keeps=keeps)
    targets_MK = targets if targets.ndim == 2 else targets[:, None]
    outputs: tuple[torch.Tensor, torch.Tensor]
    outputs = _BlockedLogprobs.apply(hidden_MH, weight_VH, targets_MK, temperature_M, entropy, vocab, cut)  # type: ignore[no-untyped-call]
    return outputs if targets.ndim == 2 else (outputs[0].squeeze(1), outputs[1])


@dataclass(frozen=True)
class Wanted:
    """The parts of a token's distribution that are wanted beside the logprob of one id; never with a graph."""

    top_k: int = 0
    """The number of ids of highest probability that are wanted, with their logprobs; 0: none."""
    num_ids: int | None = None
    """Only ids below this are ranked: those that the reader of the ranking knows. Absent: all."""
    squares: bool = False
    """The sum of squared probabilities."""


@dataclass(frozen=True)
class Distribution:
    """The parts of each token's distribution that were asked for, without a graph."""

    logprobs_M: torch.Tensor
    """Logprobs of the targets."""
    top_ids_Mk: torch.Tensor
    """int64, highest probability first; k = 0 unless asked for."""
    top_logprobs_Mk: torch.Tensor
    """Logprobs of those ids."""
    sum_squared_probs_M: torch.Tensor
    """Sums over the whole vocabulary; zeros unless asked for."""


@torch.no_grad()
def distribution(
    hidden_MH: torch.Tensor,
    weight_VH: torch.Tensor,
    targets_M: torch.Tensor,
    temperature_M: torch.Tensor,
    wanted: Wanted,
    *,
    vocab: VocabShard | None = None,
    cap: float | None = None,
    float32_logits: bool = False,
    block_elements: int | None = None,
) -> Distribution:
    """Logprobs and what else is `wanted`, in one pass over the blocks; arguments as of logprobs_and_entropy. With
    `vocab` a collective.
    """
    softmax = _Ranking(temperature_M[:, None].to(torch.promote_types(hidden_MH.dtype, torch.float32)), wanted)
    size = block_elements or _block_elements(hidden_MH, in_kernels=False)
    cut = _cut(hidden_MH, vocab, size, cap, float32_logits, keeps=False)
    for block in cut.blocks(weight_VH, targets_M[:, None], None):
        softmax.add(block.logits(hidden_MH), block, entropy=False)
    if vocab:
        softmax.reduce(vocab.group)
    log_norm_M1 = softmax.max_M1 + softmax.sum_M1.log()
    return Distribution(
        logprobs_M=(softmax.target_MK - log_norm_M1).squeeze(1),
        top_ids_Mk=softmax.top_ids_Mk,
        top_logprobs_Mk=softmax.top_Mk - log_norm_M1,
        sum_squared_probs_M=(softmax.squares_M1 / softmax.sum_M1.square()).squeeze(1),
    )


def _in_kernels(hidden_MH: torch.Tensor) -> bool:
    """Whether kernels, which compute in float32, take the blocks."""
    return runs_kernels(hidden_MH.device) and hidden_MH.dtype != torch.float64


def _block_elements(hidden_MH: torch.Tensor, *, in_kernels: bool) -> int:
    if in_kernels:
        return KERNEL_BLOCK_ELEMENTS
    return CPU_BLOCK_ELEMENTS if hidden_MH.device.type == "cpu" else DEVICE_BLOCK_ELEMENTS


def _cut(
    hidden_MH: torch.Tensor,
    vocab: VocabShard | None,
    block_elements: int,
    cap: float | None,
    float32_logits: bool,
    *,
    keeps: bool,
) -> "_Cut":
    widens = float32_logits and hidden_MH.dtype in (torch.float16, torch.bfloat16)
    start = vocab.start if vocab else 0
    return _Cut(start=start, block_elements=block_elements, keeps=keeps and not widens, widens=widens, cap=cap)


@dataclass(frozen=True)
class _Block:
    """Some rows of weight_VH, as columns of logits."""

    rows: slice
    weight_BH: torch.Tensor
    first_id: int
    """The token id of its first row."""
    targets_MK: torch.Tensor
    kept_MB: torch.Tensor | None
    """Where the block's logits stay between forward and backward; None: nowhere."""
    widens: bool
    """Whether logits are float32 though their factors are not."""
    cap: float | None
    """The soft cap of its logits; None: they have none."""

    def columns(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The targets' columns here, int64 [M, K], 0 where the target is in another block; whether it is in this one,
        bool [M, K].
        """
        column_MK = self.targets_MK - self.first_id
        inside_MK = (column_MK >= 0) & (column_MK < len(self.weight_BH))
        return torch.where(inside_MK, column_MK, 0), inside_MK

    def logits(self, hidden_MH: torch.Tensor) -> torch.Tensor:
        """[M, B], without their cap, kept if there is room."""
        if self.widens:
            return float32_product(hidden_MH, self.weight_BH.T)
        return (
            hidden_MH @ self.weight_BH.T
            if self.kept_MB is None
            else torch.mm(hidden_MH, self.weight_BH.T, out=self.kept_MB)
        )

    def capped(self, logits_MB: torch.Tensor) -> torch.Tensor:
        """`logits_MB` with their cap; the same tensor where they have none."""
        return logits_MB if self.cap is None else (logits_MB / self.cap).tanh_().mul_(self.cap)


@dataclass(frozen=True)
class _Cut:
    """The cut of a rank's part of the vocabulary into blocks."""

    start: int
    """The token id of its first row."""
    block_elements: int
    keeps: bool
    """Whether logits are kept in the memory of the weight's gradient, which a backward pass will want."""
    widens: bool
    """Whether each block is widened, as in _Block."""
    cap: float | None
    """The soft cap of its logits; None: they have none."""

    def blocks(
        self, weight_VH: torch.Tensor, targets_MK: torch.Tensor, kept_VH: torch.Tensor | None
    ) -> Iterator[_Block]:
        """All blocks, in order.

        A block's logits are kept at M (or H, if that is more) elements for each row before it: then a gradient written
        over the block's own rows, in order, never reaches the logits of a later block.
        """
        num_tokens, (vocab_size, hidden_size) = targets_MK.shape[0], weight_VH.shape
        size, stride = max(1, self.block_elements // max(1, num_tokens)), max(num_tokens, hidden_size)
        size -= size % _ALIGNMENT if size > _ALIGNMENT else 0
        for start in range(0, vocab_size, size):
            end = min(start + size, vocab_size)
            first, last = start * stride, start * stride + num_tokens * (end - start)
            fits = kept_VH is not None and last <= kept_VH.numel()
            kept_MB = (
                kept_VH.view(-1)[first:last].view(num_tokens, end - start) if kept_VH is not None and fits else None
            )
            rows, first_id = slice(start, end), self.start + start
            yield _Block(rows, weight_VH[rows], first_id, targets_MK, kept_MB, self.widens, self.cap)


class _Softmax:
    """Running sums over blocks of z = logits / temperature: what log_softmax and the entropy are made of."""

    def __init__(self, temperature_M1: torch.Tensor, num_targets: int) -> None:
        self._temperature_M1 = temperature_M1
        # not -inf: a difference of two would be nan
        self.max_M1 = torch.full_like(temperature_M1, torch.finfo(temperature_M1.dtype).min)
        self.sum_M1 = torch.zeros_like(temperature_M1)
        """The sum of exp(z - max)."""
        self.weighted_M1 = torch.zeros_like(temperature_M1)
        """The sum of exp(z - max) (z - max); stays 0 without entropy."""
        self.target_MK = temperature_M1.new_zeros(temperature_M1.shape[0], num_targets)
        """The targets' z."""

    def add(self, logits_MB: torch.Tensor, block: _Block, *, entropy: bool) -> None:
        """Takes in a block."""
        self._take(block.capped(logits_MB) / self._temperature_M1, block, entropy)

    def _take(self, z_MB: torch.Tensor, block: _Block, entropy: bool) -> torch.Tensor:
        """Overwrites z_MB; returns its exp(z - max)."""
        column_MK, inside_MK = block.columns()
        self.target_MK += torch.where(inside_MK, z_MB.gather(1, column_MK), 0.0)
        self._raise_max(torch.maximum(self.max_M1, z_MB.amax(1, keepdim=True)))
        z_MB.sub_(self.max_M1)
        if entropy:
            p_MB = z_MB.exp()
            self.weighted_M1 += z_MB.mul_(p_MB).sum(1, keepdim=True)
        else:
            p_MB = z_MB.exp_()
        self.sum_M1 += p_MB.sum(1, keepdim=True)
        return p_MB

    def reduce(self, group: dist.ProcessGroup) -> None:
        """Becomes the sums over all ranks' blocks."""
        max_M1 = self.max_M1.clone()
        dist.all_reduce(max_M1, dist.ReduceOp.MAX, group)
        self._raise_max(max_M1)
        sums_MC = torch.cat([self.sum_M1, self.weighted_M1, self.target_MK], 1)
        dist.all_reduce(sums_MC, dist.ReduceOp.SUM, group)
        self.sum_M1, self.weighted_M1, self.target_MK = sums_MC[:, :1], sums_MC[:, 1:2], sums_MC[:, 2:]

    def _raise_max(self, max_M1: torch.Tensor) -> None:
        lower_M1 = self.max_M1 - max_M1
        scale_M1 = lower_M1.exp()
        self.weighted_M1 = scale_M1 * (self.weighted_M1 + lower_M1 * self.sum_M1)
        self.sum_M1, self.max_M1 = scale_M1 * self.sum_M1, max_M1


class _KernelSoftmax(_Softmax):
    """The same by a kernel."""

    def add(self, logits_MB: torch.Tensor, block: _Block, *, entropy: bool) -> None:
        """_Softmax.add."""
        from rolecall.training.model.logits.softmax_kernels import (
            add_block,  # Triton comes with builds of torch for GPUs
        )

        sums = self.max_M1, self.sum_M1, self.weighted_M1, self.target_MK
        add_block(
            logits_MB, block.targets_MK, block.first_id, self._temperature_M1, *sums, cap=block.cap, entropy=entropy
        )


class _Ranking(_Softmax):
    """The same, with the highest z and the sum of squares."""

    def __init__(self, temperature_M1: torch.Tensor, wanted: Wanted) -> None:
        super().__init__(temperature_M1, 1)
        self._wanted = wanted
        shape = (temperature_M1.shape[0], wanted.top_k)
        self.top_Mk = torch.full(shape, -torch.inf, dtype=temperature_M1.dtype, device=temperature_M1.device)
        self.top_ids_Mk = torch.zeros(shape, dtype=torch.int64, device=temperature_M1.device)
        self.squares_M1 = torch.zeros_like(temperature_M1)
        """The sum of exp(z - max)^2."""

    def _take(self, z_MB: torch.Tensor, block: _Block, entropy: bool) -> torch.Tensor:
        """_Softmax._take, with the squares and the highest ids."""
        if self._wanted.top_k:
            num_ids = (
                z_MB.shape[1]
                if self._wanted.num_ids is None
                else min(z_MB.shape[1], max(0, self._wanted.num_ids - block.first_id))
            )
            top_Mk, columns_Mk = z_MB[:, :num_ids].topk(min(self._wanted.top_k, num_ids), 1)
            self._merge(top_Mk, block.first_id + columns_Mk)
        p_MB = super()._take(z_MB, block, entropy)
        if self._wanted.squares:
            self.squares_M1 += p_MB.square_().sum(1, keepdim=True)
        return p_MB

    def reduce(self, group: dist.ProcessGroup) -> None:
        """_Softmax.reduce, with the squares and the highest ids."""
        super().reduce(group)
        dist.all_reduce(self.squares_M1, dist.ReduceOp.SUM, group)
        tops_RMk, ids_RMk = (
            torch.zeros((group.size(), *own.shape), dtype=own.dtype, device=own.device)
            for own in (self.top_Mk, self.top_ids_Mk)
        )
        tops_RMk[group.rank()], ids_RMk[group.rank()] = self.top_Mk, self.top_ids_Mk
        for whole in (tops_RMk, ids_RMk):
            dist.all_reduce(whole, dist.ReduceOp.SUM, group)
        self.top_Mk, self.top_ids_Mk = self.top_Mk[:, :0], self.top_ids_Mk[:, :0]
        self._merge(tops_RMk.transpose(0, 1).flatten(1), ids_RMk.transpose(0, 1).flatten(1))

    def _merge(self, more_Mx: torch.Tensor, ids_Mx: torch.Tensor) -> None:
        all_Mx, all_ids_Mx = torch.cat([self.top_Mk, more_Mx], 1), torch.cat([self.top_ids_Mk, ids_Mx], 1)
        self.top_Mk, at_Mk = all_Mx.topk(self._wanted.top_k, 1)
        self.top_ids_Mk = all_ids_Mx.gather(1, at_Mk)

    def _raise_max(self, max_M1: torch.Tensor) -> None:
        self.squares_M1 = (2 * (self.max_M1 - max_M1)).exp() * self.squares_M1
        super()._raise_max(max_M1)


class _BlockedLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_MH: torch.Tensor,
        weight_VH: torch.Tensor,
        targets_MK: torch.Tensor,
        temperature_M: torch.Tensor,
        entropy: bool,
        vocab: VocabShard | None,
        cut: _Cut,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.entropy, ctx.vocab, ctx.cut = entropy, vocab, cut
        ctx.set_materialize_grads(False)  # an entropy that is shown and in no loss costs the backward pass nothing
        ctx.kept_VH = (
            torch.empty(weight_VH.shape, dtype=weight_VH.dtype, device=weight_VH.device) if cut.keeps else None
        )
        temperature_M1 = temperature_M[:, None].to(torch.promote_types(hidden_MH.dtype, torch.float32)).contiguous()
        kind = _KernelSoftmax if _in_kernels(hidden_MH) else _Softmax
        softmax = kind(temperature_M1, targets_MK.shape[1])
        for block in cut.blocks(weight_VH, targets_MK, ctx.kept_VH):
            softmax.add(block.logits(hidden_MH), block, entropy=entropy)
        if vocab:
            softmax.reduce(vocab.group)
        log_sum_M1 = softmax.sum_M1.log()
        entropy_M1 = log_sum_M1 - softmax.weighted_M1 / softmax.sum_M1 if entropy else torch.zeros_like(log_sum_M1)
        ctx.save_for_backward(hidden_MH, weight_VH, targets_MK, temperature_M1, softmax.max_M1 + log_sum_M1, entropy_M1)
        return softmax.target_MK - softmax.max_M1 - log_sum_M1, entropy_M1.squeeze(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """Returns the gradients; one of `grads` is None where the loss does not read that output."""
        hidden_MH, weight_VH, targets_MK, temperature_M1, log_norm_M1, entropy_M1 = ctx.saved_tensors
        given_MK, given_M = grads
        num_tokens, num_targets = targets_MK.shape
        grad_logprobs_MK = (
            temperature_M1.new_zeros(num_tokens, num_targets) if given_MK is None else given_MK / temperature_M1
        )
        grad_entropy_M1 = None if given_M is None or not ctx.entropy else given_M[:, None] / temperature_M1
        above = _Above(temperature_M1, log_norm_M1, entropy_M1, grad_logprobs_MK, grad_entropy_M1)
        gradient = _kernel_gradient if _in_kernels(hidden_MH) else _gradient
        grad_hidden_MH = torch.zeros(hidden_MH.shape, dtype=temperature_M1.dtype, device=hidden_MH.device)
        # overwritten here: another backward pass over the same graph computes all logits again
        kept_VH, ctx.kept_VH = ctx.kept_VH, None
        grad_weight_VH = None
        if ctx.needs_input_grad[1]:
            grad_weight_VH = (
                torch.empty(weight_VH.shape, dtype=weight_VH.dtype, device=weight_VH.device)
                if kept_VH is None
                else kept_VH
            )
        for block in ctx.cut.blocks(weight_VH, targets_MK, kept_VH):
            logits_MB = block.logits(hidden_MH) if block.kept_MB is None else block.kept_MB
            grad_logits_MB = gradient(logits_MB, block, above, hidden_MH.dtype)
            del logits_MB
            if grad_weight_VH is not None:
                torch.mm(grad_logits_MB.T, hidden_MH, out=grad_weight_VH[block.rows])
            add_product_(grad_hidden_MH, grad_logits_MB, block.weight_BH)
            del grad_logits_MB  # before the next block's logits are made
        if ctx.vocab:
            dist.all_reduce(grad_hidden_MH, dist.ReduceOp.SUM, ctx.vocab.group)
        return grad_hidden_MH.to(hidden_MH.dtype), grad_weight_VH, None, None, None, None, None


@dataclass(frozen=True)
class _Above:
    """All that the gradient of a block's logits needs beside them: of the softmax, and of the gradients from above,
    which are divided by the temperature.
    """

    temperature_M1: torch.Tensor
    log_norm_M1: torch.Tensor
    entropy_M1: torch.Tensor
    grad_logprobs_MK: torch.Tensor
    grad_entropy_M1: torch.Tensor | None
    """None: the loss does not read the entropy."""


def _gradient(logits_MB: torch.Tensor, block: _Block, above: _Above, dtype: torch.dtype) -> torch.Tensor:
    """`dtype` [M, B]. For z = logits / temperature and p = softmax(z): d logp(target) / dz = onehot - p, d entropy / dz
    = -p (log p + entropy). For y = c tanh(x / c), the soft cap: dy / dx = 1 - (y / c)^2.
    """
    total_M1 = above.grad_logprobs_MK.sum(1, keepdim=True)
    capped_MB = block.capped(logits_MB)
    log_p_MB = (capped_MB / above.temperature_M1).sub_(above.log_norm_M1)
    if above.grad_entropy_M1 is not None:
        p_MB = log_p_MB.exp()
        grad_MB = log_p_MB.add_(above.entropy_M1).mul_(-above.grad_entropy_M1).sub_(total_M1).mul_(p_MB)
    else:
        grad_MB = log_p_MB.exp_().mul_(-total_M1)
    column_MK, inside_MK = block.columns()
    grad_MB.scatter_add_(1, column_MK, torch.where(inside_MK, above.grad_logprobs_MK, 0.0))
    if block.cap is not None:
        grad_MB.mul_((capped_MB.to(grad_MB.dtype) / block.cap).square_().neg_().add_(1.0))
    return grad_MB.to(dtype)


def _kernel_gradient(logits_MB: torch.Tensor, block: _Block, above: _Above, dtype: torch.dtype) -> torch.Tensor:
    """_gradient by a kernel."""
    from rolecall.training.model.logits.softmax_kernels import gradient

    return gradient(
        logits_MB,
        block.targets_MK,
        block.first_id,
        above.temperature_M1,
        above.log_norm_M1,
        above.entropy_M1,
        above.grad_logprobs_MK,
        above.grad_entropy_M1,
        block.cap,
        dtype,
    )
