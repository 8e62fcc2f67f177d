"""Whole steps of the actor on ranks without a store: what test_steps_exact.py holds to loops over single tokens."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rolecall.settings import RunSettings
from rolecall.training.account.memory import PhaseMemory
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.options import EngineOptions
from rolecall.training.packing.pack import Row
from rolecall.training.ranks.command_group import CommandGroup
from rolecall.training.ranks.device import RankSpec, start_rank, stop_rank
from rolecall.training.serving.applied import Applied
from rolecall.training.serving.hooks import nothing
from rolecall.training.serving.trainer import Progress
from rolecall.training.step.rank_context import StoreRankContext
from rolecall.training.step.recorder import StepRecorder
from rolecall.v1.trajectory_pb2 import Coefficients, RowRef, SamplingParams, TrainBatch, TrajectoryMeta
from rolecall.wire import Array
from services.actor.steps import PolicySteps
from tests.integration.exact_ranks import read_rows, write_rows
from tests.integration.fsdp_ranks import weights_of
from tests.smallest import smallest_tree

NUM_STEPS = 2
KL_COEF = 0.3
MAX_TOKENS = 10
"""Of a response; the constant of seq_mean_token_sum_norm."""
TOKEN_BUDGET = 24
OPTIMIZER = {
    "learning_rate": 0.05,
    "eps": 0.3,  # large, so that a last bit of a small gradient moves no weight
    "weight_decay": 0.1,
    "max_grad_norm": 4.0,  # some updates are clipped
    "schedule": "linear",
    "warmup_steps": 1,
}


@dataclass(frozen=True)
class Sampled:
    """A batch that was sampled."""

    rows: Sequence[Row]
    temperatures: list[float]
    refs: list[RowRef]

    def write(self, folder: Path) -> None:
        """Writes it to `folder`."""
        write_rows(folder / "rows.npz", self.rows, self.temperatures)
        refs = [(ref.id, ref.num_tokens, list(ref.segment_starts)) for ref in self.refs]
        (folder / "refs.json").write_text(json.dumps(refs))

    @classmethod
    def read(cls, folder: Path) -> "Sampled":
        """Reads what `write` wrote."""
        refs = [
            RowRef(id=i, num_tokens=n, segment_starts=s) for i, n, s in json.loads((folder / "refs.json").read_text())
        ]
        return cls(*read_rows(folder / "rows.npz"), refs)


class RowsInMemory:
    """The rows of a batch, in place of those in a store."""

    def __init__(self, sampled: Sampled) -> None:
        self._sampled = sampled

    def read_by_calls(
        self, refs: Sequence[RowRef], columns: Sequence[str], optional: Sequence[str] = ()
    ) -> Iterator[list[tuple[dict[str, Array], TrajectoryMeta]]]:
        """Rows.read_by_calls."""
        for ref in refs:
            place = self._sampled.refs.index(ref)
            row, sampling = self._sampled.rows[place], SamplingParams(temperature=self._sampled.temperatures[place])
            yield [
                (
                    {name: row[name] for name in (*columns, *optional) if name in row},
                    TrajectoryMeta(id=ref.id, sampling=sampling),
                )
            ]


def settings_of(model: Path, algorithm: dict[str, Any]) -> RunSettings:
    """A run of two groups of three responses."""
    tree = smallest_tree(
        model.parent,
        run={"name": "steps", "dir": str(model.parent / "run"), "num_steps": 5},
        model={"path": str(model), "dtype": "float32"},
        data={"train": str(model.parent / "train.jsonl"), "max_prompt_tokens": TOKEN_BUDGET - MAX_TOKENS},
        sampling={"num_responses": 3, "max_tokens": MAX_TOKENS},
        algorithm={"groups_per_batch": 2, **algorithm},
        references={"ref": {"token_budget": TOKEN_BUDGET}} if "kl" in algorithm else {},
        actor={"token_budget": TOKEN_BUDGET, "num_threads": 1, "optimizer": OPTIMIZER},
    )
    return RunSettings.model_validate(tree)


def train(model: Path, algorithm: dict[str, Any], sampled: Sampled) -> dict[str, torch.Tensor]:
    """The weights after NUM_STEPS steps of the actor on `sampled`; on every rank."""
    settings, cpu = settings_of(model, algorithm), torch.device("cpu")
    memory, group = PhaseMemory(cpu), CommandGroup.of_default()
    options = EngineOptions(
        path=model,
        head="policy",
        dtype="float32",
        optimizer=settings.actor.optimizer,
        total_steps=settings.num_policy_updates,
    )
    engine, rows = FsdpEngine(options, device=cpu), RowsInMemory(sampled)
    unstored: Any = rows
    context = StoreRankContext(engine, engine, group, cpu, TOKEN_BUDGET, memory, StepRecorder(memory), rows=unstored)
    steps = PolicySteps(settings)
    for step in range(NUM_STEPS):
        batch = TrainBatch(step=step, rows=sampled.refs, coefficients=Coefficients(kl_coef=KL_COEF))
        steps.apply(context, batch, Applied(), Progress(nothing))
    return weights_of(engine)


def main(folder: str, world_size: int, cases: dict[str, dict[str, Any]], rank: int) -> None:
    """Leaves the weights of each case beside the batch in `folder`."""
    out = Path(folder)
    start_rank(RankSpec(rank, world_size, rank, (), f"file://{out / 'rendezvous'}", 1, 100.0))
    for name, algorithm in cases.items():
        weights = train(out / "model", algorithm, Sampled.read(out))
        if rank == 0:
            save_file(weights, out / f"{name}.safetensors")
    stop_rank()
