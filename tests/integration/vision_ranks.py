"""One rank of an FSDP group that trains a model of text and images, as a process of its own."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rolecall.settings import OptimizerSection
from rolecall.training.objective.objectives import SftObjective
from rolecall.training.packing.pack import local_counts
from rolecall.training.ranks.device import RankSpec, start_rank, stop_rank
from tests.integration.fsdp_ranks import make_engine, weights_of
from tests.vision_rig import make_rows, packed

SECTION = OptimizerSection(learning_rate=1e-3, weight_decay=0.1)


def train_on_rank(job: dict[str, Any], rank: int) -> None:
    """Runs a rank: two steps, a rank's microbatches as the job says, and from rank 0 the weights."""
    start_rank(RankSpec(rank, job["world_size"], rank, (), f"file://{job['rendezvous']}", 1, 60.0))
    path, rows = Path(job["model"]), make_rows()
    engine = make_engine(path, optimizer=SECTION, **job["options"])
    counts = local_counts(rows)
    norms = []
    for _ in range(2):
        mine = [packed(path, [rows[index] for index in indices], ("loss_mask",)) for indices in job["plan"][rank]]
        engine.forward(mine)
        engine.forward_backward(mine, SftObjective(counts))
        norms.append(engine.step().grad_norm)
    weights = weights_of(engine)
    if rank == 0:
        save_file({**weights, "norms": torch.tensor(norms)}, Path(job["out"]) / "weights.safetensors")
    stop_rank()
