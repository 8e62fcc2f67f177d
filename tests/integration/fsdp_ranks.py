"""One rank of an FSDP group, as a process of its own. What test_fsdp_engine.py runs on two ranks.

The job trains on the synthetic batch of `make_rows` and writes, from rank 0, the weights after every step, the
outcomes, and the rows' logprobs.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from rolecall.settings import OptimizerSection, ParallelSection
from rolecall.training.engine import TokenOutputs
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.model.packed_model import Head
from rolecall.training.objective.objectives import SftObjective
from rolecall.training.options import EngineOptions
from rolecall.training.packing.pack import Row, local_counts, pack
from rolecall.training.packing.plan import plan_batch
from rolecall.training.ranks.device import RankSpec, start_rank, stop_rank
from rolecall.training.serving.hooks import nothing
from tests.checkpoint_rig import save

VOCAB = 150


def make_rows(num_rows: int, seed: int = 0) -> list[Row]:
    """Random rows of 2 to 30 tokens whose first third is the prompt."""
    rng = np.random.default_rng(seed)
    rows: list[Row] = []
    for _ in range(num_rows):
        length = int(rng.integers(2, 31))
        mask = (np.arange(length) >= length // 3).astype(np.uint8)
        ids = rng.integers(0, VOCAB, length, dtype=np.int32)
        noise = {name: rng.normal(size=length).astype(np.float32) * 0.3 for name in ("advantages", "values", "returns")}
        logprobs = {
            name: (-5 + rng.normal(size=length) * 0.3).astype(np.float32)
            for name in ("rollout_logprobs", "old_logprobs")
        }
        rows.append({"token_ids": ids, "response_mask": mask, "loss_mask": mask, **noise, **logprobs})
    return rows


def make_engine(
    path: Path,
    *,
    head: Head = "policy",
    optimizer: OptimizerSection | None = None,
    progressed: Callable[[], None] = nothing,
    **more: Any,
) -> FsdpEngine:
    """A float32 engine of the model in `path`, over the default group."""
    options = EngineOptions(path=path, head=head, optimizer=optimizer, **{"dtype": "float32", "total_steps": 8, **more})
    return FsdpEngine(options, device=torch.device("cpu"), progressed=progressed)


def my_rows(engine: FsdpEngine, rows: list[Row], token_budget: int, seed: int) -> list[list[Row]]:
    """This rank's share of a mini-batch of all rows, by microbatch."""
    plan = plan_batch(
        [len(row["token_ids"]) for row in rows],
        num_minibatches=1,
        token_budget=token_budget,
        world_size=engine.layout.data_size,
        cost=engine.flops.forward,
        seed=seed,
    )[engine.layout.data_rank]
    return [[rows[i] for i in indices] for indices in plan.microbatches]


def train_step(engine: FsdpEngine, rows: list[Row], *, token_budget: int, seed: int) -> dict[str, float]:
    """One optimizer step of the SFT loss over all rows."""
    microbatches = [
        pack(part, ["loss_mask"], temperature=0.7, device=engine.device)
        for part in my_rows(engine, rows, token_budget, seed)
    ]
    metrics = engine.forward_backward(microbatches, SftObjective(local_counts(rows)))
    outcome = engine.step()
    loss = torch.tensor(metrics.values().get("sft/loss", 0.0) * engine.layout.is_slot_leader)
    torch.distributed.all_reduce(loss)
    return {"loss": float(loss), "grad_norm": outcome.grad_norm, "learning_rate": outcome.learning_rate}


def weights_of(engine: FsdpEngine) -> dict[str, torch.Tensor]:
    """All published weights, copied."""
    return {name: tensor.clone() for name, tensor in engine.named_weights()}


def assert_same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], atol: float) -> None:
    """Holds two sets of tensors to the same names and, up to `atol`, values."""
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(
            ours[name], theirs[name], rtol=0, atol=atol, msg=f"{name} differs by more than {atol}"
        )


def main(job: dict[str, Any], rank: int) -> None:
    """Runs the rank."""
    start_rank(RankSpec(rank, job["world_size"], rank, (), f"file://{job['rendezvous']}", 1, 60.0))
    section, checkpointing = OptimizerSection(**job["optimizer"]), job["gradient_checkpointing"]
    parallel = ParallelSection(**job["parallel"])
    engine = make_engine(Path(job["model"]), optimizer=section, gradient_checkpointing=checkpointing, parallel=parallel)
    rows = make_rows(job["num_rows"])
    outcomes = []
    for step in range(job["num_steps"]):
        # a pass without gradients in between must leave training untouched
        parts = my_rows(engine, rows, 64, 0)
        outputs = engine.forward([pack(part, [], temperature=0.7, device=engine.device) for part in parts])
        assert all(isinstance(output, TokenOutputs) for output in outputs)
        outcomes.append(train_step(engine, rows, token_budget=job["token_budget"], seed=step))
        if step + 1 == job["save_after"]:
            save(engine, Path(job["out"]) / "checkpoint")
    weights = weights_of(engine)
    if rank == 0:
        save_file(weights, Path(job["out"]) / "weights.safetensors")
        (Path(job["out"]) / "outcomes.json").write_text(json.dumps(outcomes))
    stop_rank()
