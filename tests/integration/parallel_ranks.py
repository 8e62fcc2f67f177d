"""One rank of four, as a process of its own: `python -m tests.integration.parallel_ranks FOLDER RANK`. What
test_parallel.py looks at.

Trains one model in several layouts, each going on from the checkpoint of the one before, and writes what was seen to
FOLDER/seen.json (rank 0) and the weights after every layout's steps.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from rolecall.errors import ConfigError
from rolecall.settings import LoraSection, OptimizerSection, ParallelSection
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.fsdp.layout import Box
from rolecall.training.objective.objectives import SftObjective
from rolecall.training.options import EngineOptions
from rolecall.training.packing.pack import local_counts, pack, plan_batch
from rolecall.training.ranks.command_group import CommandGroup
from rolecall.training.ranks.device import RankSpec, start_rank, stop_rank
from tests.checkpoint_rig import load, save
from tests.integration.fsdp_ranks import make_rows

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
    options = EngineOptions(
        path=model, head="policy", dtype="float32", optimizer=SECTION, parallel=ParallelSection(**parallel), **more
    )
    return FsdpEngine(options, device=torch.device("cpu"))


def train(engine: FsdpEngine, first_step: int, num_steps: int) -> list[float]:
    """Gradient norms of `num_steps` SFT steps over the same rows."""
    rows = make_rows(NUM_ROWS)
    norms = []
    for step in range(first_step, first_step + num_steps):
        lengths = [len(row["token_ids"]) for row in rows]
        layout = engine.layout
        plans = plan_batch(
            lengths,
            num_minibatches=1,
            token_budget=40,
            world_size=layout.data_size,
            cost=engine.flops.forward,
            seed=step,
        )
        packed = [
            pack([rows[i] for i in part], ["loss_mask"], temperature=0.7, device=engine.device)
            for part in plans[layout.data_rank].microbatches
        ]
        engine.forward_backward(packed, SftObjective(local_counts(rows)))
        norms.append(engine.step().grad_norm)
    return norms


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
    group = CommandGroup.of_default(slot_size=2)
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
        weights = {name: tensor.clone() for name, tensor in engine.named_weights()}
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


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
    os._exit(0)  # Gloo's threads, ended by the interpreter's teardown, now and then abort the process after all is done
