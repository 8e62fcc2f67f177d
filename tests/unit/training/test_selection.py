"""Tokens singled out over ranks: two of them, each a thread with half of a mini-batch, choose what one with all of it
chooses.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Barrier
from typing import Any

import numpy as np
import pytest
import torch

from rolecall.algorithms.aggregation import Counts
from rolecall.algorithms.selection import token_keys
from rolecall.settings import CovarianceLoss
from rolecall.training.engine import TokenOutputs
from rolecall.training.packing.pack import Row, pack
from rolecall.training.ranks.command_group import CommandGroup
from rolecall.training.step.share import Minibatch
from rolecall.training.step.token_selection import KEYS, select
from rolecall.wire import Array

LOSSES: list[CovarianceLoss] = [
    CovarianceLoss(kind="kl_cov", fraction=0.1),
    CovarianceLoss(kind="clip_cov", fraction=0.1, cov_low=0.05, cov_high=9.0),
]
WAIT_S = 10.0


@dataclass
class Meeting:
    """Where the ranks meet: what each brought, by rank."""

    barrier: Barrier
    brought: dict[int, Any] = field(default_factory=dict)

    def exchange(self, rank: int, what: Any) -> list[Any]:
        self.brought[rank] = what
        self.barrier.wait(WAIT_S)
        everything = [self.brought[each] for each in sorted(self.brought)]
        self.barrier.wait(WAIT_S)
        return everything


class ThreadGroup(CommandGroup):
    """A command group whose ranks are threads."""

    def __init__(self, rank: int, world_size: int, meeting: Meeting) -> None:
        super().__init__(rank, world_size, None)
        self._meeting = meeting

    def sum(self, numbers: Array) -> Array:
        total: Array = np.sum(self._meeting.exchange(self.rank, numbers), axis=0)
        return total

    def gather(self, data: bytes) -> list[bytes]:
        return self._meeting.exchange(self.rank, data)


def make_row(index: int) -> Row:
    rng = np.random.default_rng(index)
    length = int(rng.integers(2, 30))
    mask = (np.arange(length) >= 2).astype(np.uint8)
    column = {name: rng.normal(size=length).astype(np.float32) for name in ("advantages", "old_logprobs", "logprobs")}
    return {
        "token_ids": np.arange(length, dtype=np.int32),
        "response_mask": mask,
        "loss_mask": mask,
        KEYS: token_keys(str(index), length),
        **column,
    }


def selected(group: CommandGroup, loss: CovarianceLoss, microbatches: list[list[int]]) -> dict[int, list[bool]]:
    """By row, what `group` chooses when this rank holds `microbatches`."""
    device = torch.device("cpu")
    packed = [
        pack(
            [make_row(i) for i in rows],
            ("loss_mask", "advantages", "old_logprobs", "logprobs", KEYS),
            temperature=1.0,
            device=device,
        )
        for rows in microbatches
    ]
    minibatch = Minibatch(packed, Counts(0, 0))
    select(group, minibatch, loss, [TokenOutputs(each.columns["logprobs"], torch.zeros(0)) for each in packed])
    chosen = {}
    for rows, microbatch in zip(microbatches, minibatch.microbatches, strict=True):
        for i, row_T in zip(
            rows, torch.split(microbatch.columns["selected"], list(microbatch.lengths)) if rows else (), strict=True
        ):
            chosen[i] = row_T.tolist()
    return chosen


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: loss.kind)
@pytest.mark.parametrize(
    "parts",
    [
        ([[0, 1, 2], [3]], [[4, 5], [6, 7]]),
        ([[7, 3], [1]], [[0, 2, 4], [6, 5]]),
        ([[], []], [[0, 1, 2, 3], [4, 5, 6, 7]]),
    ],
)
def test_two_ranks_choose_what_one_chooses(
    loss: CovarianceLoss, parts: tuple[list[list[int]], list[list[int]]]
) -> None:
    alone = selected(CommandGroup(0, 1, None), loss, [list(range(8))])
    num_trained = sum(int(make_row(i)["loss_mask"].sum()) for i in range(8))
    assert sum(sum(row) for row in alone.values()) == int(0.1 * num_trained)
    meeting = Meeting(Barrier(2))
    with ThreadPoolExecutor(2) as pool:
        halves = list(pool.map(lambda rank: selected(ThreadGroup(rank, 2, meeting), loss, parts[rank]), range(2)))
    assert halves[0] | halves[1] == alone
