"""One rank of four, in a process of its own. What test_parallel.py looks at.

Trains one model in several layouts, each going on from the checkpoint of the one before, and writes what was seen to
FOLDER/seen.json (rank 0) and the weights after every layout's steps.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from rolecall.errors import ConfigError
from rolecall.settings import LayoutSection, LoraSection, OptimizerSection, ParallelSection
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.model.box import Box
from rolecall.training.objective.objectives import SftObjective
from rolecall.training.packing.pack import local_counts, pack
from rolecall.training.ranks.command_group import CommandGroup
from rolecall.training.ranks.device import RankSpec, start_rank, stop_rank
from tests.checkpoint_rig import load, save
from tests.integration import fsdp_ranks
from tests.integration.fsdp_ranks import make_rows, train_step, weights_of

WORLD_SIZE = 4
LAYOUTS: list[dict[str, Any]] = [
    {"sequence": 2, "tensor": 2},
    {"replicate": 2, "tensor": 2},
    {"replicate": 2, "sequence": 2, "accumulate": "unsharded"},
    {},
]
STEPS_PER_LAYOUT = 2
SECTION = OptimizerSection(learning_rate=1e-3, weight_decay=0.1)
ADAPTERS = LoraSection(rank=4, target_modules=("q_proj", "k_proj", "down_proj"))
NUM_ROWS = 12


def make_engine(model: Path, parallel: dict[str, Any], **more: Any) -> FsdpEngine:
    """An engine in this layout of the ranks."""
    return fsdp_ranks.make_engine(model, optimizer=SECTION, parallel=ParallelSection(**parallel), **more)


def train(engine: FsdpEngine, first_step: int, num_steps: int) -> list[float]:
    """Gradient norms of `num_steps` SFT steps over the same rows."""
    steps, rows = range(first_step, first_step + num_steps), make_rows(NUM_ROWS)
    return [train_step(engine, rows, token_budget=40, seed=step)["grad_norm"] for step in steps]


def _check_boxes(engine: FsdpEngine) -> None:
    """A box is what to_local() holds, and each part of a tensor has one first holder among num_holders."""
    for name, parameter in engine._model.hf.named_parameters():
        assert isinstance(parameter, DTensor)
        box, local = Box.of(parameter), parameter.to_local()
        assert torch.equal(parameter.full_tensor()[box.slices], local), name
        counted = torch.tensor(
            [
                local.numel() * engine.layout.is_first_holder(parameter),
                local.numel() / engine.layout.num_holders(parameter),
            ]
        )
        dist.all_reduce(counted)
        assert counted.tolist() == [parameter.numel()] * 2, name


def _num_reductions(engine: FsdpEngine) -> dict[str, int]:
    """How often gradients are scattered and summed over replicas in three microbatches."""
    rows = make_rows(3, seed=1)
    packed = [pack([row], ["loss_mask"], temperature=1.0, device=engine.device) for row in rows]
    with _Collectives() as seen:
        engine.forward_backward(packed, SftObjective(local_counts(rows)))
    return {kind: sum(kind in name for name in seen.names) for kind in ("reduce_scatter", "allreduce")}


class _Collectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the collectives that are started inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def _refused(model: Path, parallel: dict[str, Any]) -> str:
    try:
        make_engine(model, parallel)
    except ConfigError as error:
        return error.message
    return ""


def _sum_over_slots() -> list[float]:
    group = CommandGroup.of_default(parallel=LayoutSection(tensor=2))
    return [float(group.slot), *group.sum_over_slots(np.array([1.0, group.slot])).tolist()]


def main(folder: Path, rank: int) -> None:
    start_rank(RankSpec(rank, WORLD_SIZE, rank, (), f"file://{folder / 'rendezvous'}", 1, 100.0))
    seen: dict[str, Any] = {"norms": [], "slots": _sum_over_slots()}
    for index, parallel in enumerate(LAYOUTS):
        engine = make_engine(folder / "model", parallel, gradient_checkpointing=index == 0)
        _check_boxes(engine)
        if index:
            load(engine, folder / f"checkpoint-{index - 1}")
        seen["norms"] += train(engine, index * STEPS_PER_LAYOUT, STEPS_PER_LAYOUT)
        save(engine, folder / f"checkpoint-{index}")
        weights = weights_of(engine)
        if rank == 0:
            save_file(weights, folder / f"weights-{index}.safetensors")
    seen["adapter_norms"] = train(make_engine(folder / "model", {"replicate": 2, "sequence": 2}, lora=ADAPTERS), 0, 2)
    waiting: list[dict[str, Any]] = [{"replicate": 2, "accumulate": how} for how in ("sharded", "unsharded")]
    seen["reductions"] = [_num_reductions(make_engine(folder / "model", parallel)) for parallel in waiting]
    seen["refused"] = [
        _refused(folder / "model", parallel)
        for parallel in ({"tensor": 4}, {"sequence": 3}, {"sequence": 4, "tensor": 1})
    ]
    if rank == 0:
        (folder / "seen.json").write_text(json.dumps(seen))
    stop_rank()
