"""The parts that a rank works with: engine, command group, device, memory, recorder and, in a run, the store's
rows.

They are made once per process (start.py) and never change.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from rolecall.store.rows import Rows
from rolecall.training.account.memory import PhaseMemory
from rolecall.training.engine import EngineState, TrainingEngine
from rolecall.training.packing.images import ImageReader
from rolecall.training.packing.pieces import Piece
from rolecall.training.packing.plan import RankPlan, plan_pieces
from rolecall.training.ranks.command_group import CommandGroup
from rolecall.training.serving.hooks import nothing
from rolecall.training.step.recorder import StepRecorder


@dataclass(frozen=True)
class RankContext:
    """The parts that a rank computes with."""

    engine: TrainingEngine
    state: EngineState
    group: CommandGroup
    device: torch.device
    token_budget: int
    memory: PhaseMemory
    recorder: StepRecorder
    peak_flops: float | None = None
    """FLOP/s that the device could do at most; None: not known."""
    progressed: Callable[[], None] = nothing
    """Called whenever a part of the work is done."""

    def plan(self, pieces: Sequence[Piece], num_minibatches: int, seed: int, prompts: Sequence[str] = ()) -> RankPlan:
        """Returns this rank's part of the rows that `pieces` are of, which is its slot's. All find the same
        partition. `prompts` as in plan_pieces.
        """
        plans = plan_pieces(
            pieces,
            num_minibatches=num_minibatches,
            token_budget=self.token_budget,
            world_size=self.group.num_slots,
            cost=self.engine.flops.forward,
            seed=seed,
            prompts=prompts,
        )
        return plans[self.group.slot]


@dataclass(frozen=True, kw_only=True)
class StoreRankContext(RankContext):
    """The context of a rank that reads rows from the run's store and writes columns to it."""

    rows: Rows
    images: ImageReader | None = None
    """Reads the images that rows hold; None: prompts are text."""
