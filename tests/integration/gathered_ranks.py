"""One rank of two, in a process of its own, that trains with parameters given back after each pass and kept. What
test_gathered.py looks at; the same functions serve one rank in the test's process.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from rolecall.settings import OptimizerSection, ParallelSection
from rolecall.training.account.memory import Phase, PhaseMemory
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.objective.objectives import SftObjective
from rolecall.training.options import EngineOptions
from rolecall.training.packing.pack import local_counts, pack
from rolecall.training.ranks.device import RankSpec, memory_bytes, start_rank, stop_rank
from tests.checkpoint_rig import load, save
from tests.integration.fsdp_ranks import make_rows, weights_of
from tests.integration.parallel_ranks import _Collectives

WORLD_SIZE = 2
CPU = torch.device("cpu")
WAYS: dict[str, dict[str, Any]] = {
    "given back": {"keep_gathered": False},
    "kept": {"keep_gathered": True},
    "as measured": {},
    "kept, unsharded gradients": {"keep_gathered": True, "accumulate": "unsharded"},
    "given back, unsharded gradients": {"keep_gathered": False, "accumulate": "unsharded"},
}


class RoomFor(PhaseMemory):
    """The accounting of a device that has a share of its memory left."""

    def __init__(self, share: float, folder: Path | None = None) -> None:
        super().__init__(CPU, folder=folder)
        self.share = share

    def room(self, *phases: Phase) -> int:
        """PhaseMemory.room."""
        return int(self.share * memory_bytes(CPU)[1])


def make_engine(
    model: Path, parallel: dict[str, Any], dtype: Any, memory: PhaseMemory | None = None, **more: Any
) -> FsdpEngine:
    """An engine that trains."""
    section = OptimizerSection(learning_rate=1e-3, weight_decay=0.1)
    options = {"head": "policy", "optimizer": section, "total_steps": 8, **more}
    return FsdpEngine(
        EngineOptions(path=model, dtype=dtype, parallel=ParallelSection(**parallel), **options),
        device=CPU,
        memory=memory,
    )


def one_step(engine: FsdpEngine, seed: int, between: Callable[[], None] = lambda: None) -> list[float]:
    """A pass over one mini-batch without gradients, then two mini-batches of three microbatches: loss, norm, and the
    bytes kept, of each.
    """
    seen = []
    minibatches = []
    for number in range(2):
        rows = make_rows(12, seed=10 * seed + number)
        mine = rows[engine.layout.data_rank :: engine.layout.data_size]
        packed = [pack(mine[i::3], ["loss_mask"], temperature=1.0, device=CPU) for i in range(3)]
        minibatches.append((packed, SftObjective(local_counts(rows))))
    engine.forward(minibatches[1][0])
    between()
    for packed, objective in minibatches:
        loss = engine.forward_backward(packed, objective).values()["sft/loss"]
        outcome = engine.step()
        seen += [loss, outcome.grad_norm, outcome.num_bytes_kept]
    return seen


def num_gathers(engine: FsdpEngine) -> int:
    """All-gathers of parameters in a step."""
    with _Collectives() as seen:
        one_step(engine, 5)
    return sum("allgather" in name for name in seen.names)


def main(folder: Path, rank: int) -> None:
    start_rank(RankSpec(rank, WORLD_SIZE, rank, (), f"file://{folder / 'rendezvous'}", 1, 100.0))
    model, seen = folder / "model", dict[str, Any]()
    for dtype in ("float32", "bfloat16"):
        for way, parallel in WAYS.items():
            engine = make_engine(model, parallel, dtype, RoomFor(0.5))
            steps = [one_step(engine, step) for step in range(2)]
            save_file(weights_of(engine), folder / f"{dtype}-{way}-{rank}.safetensors")
            seen[f"{dtype} {way}"] = {"steps": steps, "gathers": num_gathers(engine)}
    kept = make_engine(model, WAYS["kept"], "float32")
    one_step(kept, 0)
    save(kept, folder / "checkpoint")
    given_back = make_engine(model, WAYS["given back"], "float32")
    load(given_back, folder / "checkpoint")
    seen["loaded"] = [one_step(given_back, 1), one_step(kept, 1)]
    load(kept, folder / "checkpoint")
    seen["loaded"].append(one_step(kept, 1, kept.offload))
    # the last rank has less room than the first; then all have enough, and too late
    memory = RoomFor(0.5 if rank == 0 else 0.1)
    engine = make_engine(model, {}, "float32", memory)
    seen["tight"] = [one_step(engine, 0)[2::3]]
    memory.share = 0.5
    seen["tight"].append(one_step(engine, 0)[2::3])
    memory.share = 0.01 if rank else 0.5
    seen["tight"].append(one_step(engine, 0)[2::3])
    memory.share = 0.5
    seen["tight"].append(one_step(engine, 0)[2::3])
    (folder / f"seen-{rank}.json").write_text(json.dumps(seen))
    stop_rank()
