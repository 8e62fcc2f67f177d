"""Selects tokens of a mini-batch over all ranks, before its update: what the losses of
rolecall/algorithms/losses/covariance.py read.

Owns what crosses ranks for it: three sums, then the earliest tokens of every slot. The choice is
rolecall/algorithms/selection.py's; it does not depend on how the mini-batch was cut into microbatches and ranks.
"""

from collections.abc import Sequence

import numpy as np
import torch

from rolecall.algorithms.losses.batch import SELECTED
from rolecall.algorithms.selection import Order, Tokens, num_selected, order
from rolecall.settings import CovarianceLoss
from rolecall.training.engine import Microbatch, TokenOutputs, ValueOutputs
from rolecall.training.ranks.command_group import CommandGroup
from rolecall.training.step.share import Minibatch
from rolecall.wire import Array

KEYS = "token_keys"
"""Derived column: algorithms.selection.token_keys."""


def select(
    group: CommandGroup, minibatch: Minibatch, loss: CovarianceLoss, seen: Sequence[TokenOutputs | ValueOutputs]
) -> None:
    """Gives `minibatch` the column SELECTED. `seen` are its microbatches' outputs under the weights to be updated. A
    collective.
    """
    full = [
        (microbatch, outputs)
        for microbatch, outputs in zip(minibatch.microbatches, seen, strict=True)
        if microbatch.lengths
    ]
    parts = [_tokens(microbatch, outputs) for microbatch, outputs in full]
    sums = group.sum_over_slots(sum((part.sums() for part in parts), np.zeros(3)))
    num = num_selected(loss, int(sums[0]))
    orders = [order(loss, part, sums) for part in parts]
    last = _gathered(group, _joined(orders).first(num)).first(num)
    selected = []
    for (microbatch, _), ordered in zip(full, orders, strict=True):
        mask_N = _trained_N(microbatch)
        selected_N = torch.zeros_like(mask_N)
        selected_N[mask_N] = torch.from_numpy(ordered.up_to(last)).to(mask_N.device)
        selected.append(selected_N)
    minibatch.add_column(SELECTED, selected)


def _trained_N(microbatch: Microbatch) -> torch.Tensor:
    return microbatch.columns["loss_mask"] & microbatch.score_mask_N


def _tokens(microbatch: Microbatch, outputs: TokenOutputs | ValueOutputs) -> Tokens:
    """Reads the trained tokens. Without old logprobs the policy is its own proximal one, as in PolicyObjective."""
    assert isinstance(outputs, TokenOutputs)
    mask_N, columns = _trained_N(microbatch), microbatch.columns
    old_N = columns.get("old_logprobs", outputs.logprobs_N)
    logprobs_M, old_M, advantages_M = (
        each[mask_N].double().cpu().numpy() for each in (outputs.logprobs_N, old_N, columns["advantages"])
    )
    return Tokens(logprobs_M, old_M, advantages_M, columns[KEYS][mask_N].cpu().numpy())


def _joined(orders: Sequence[Order]) -> Order:
    ranks, keys = (
        [np.zeros(0), *(each.ranks_M for each in orders)],
        [np.zeros(0, np.int64), *(each.keys_M for each in orders)],
    )
    return Order(np.concatenate(ranks), np.concatenate(keys))


def _gathered(group: CommandGroup, own: Order) -> Order:
    """All slots' tokens: of each slot, the rank that speaks sends."""

    def everyone(array: Array) -> Array:
        parts = group.gather(array.tobytes() if group.is_slot_leader else b"")
        return np.frombuffer(b"".join(parts), array.dtype)

    return Order(everyone(own.ranks_M), everyone(own.keys_M))
