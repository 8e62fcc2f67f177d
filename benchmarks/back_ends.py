"""FSDP2 beside Megatron-Core on the same two ranks: tokens per second and memory per rank of every layout that both
have, and of pipelines; one table from one run. See README.md.

Each measurement is two processes of its own over Gloo, one thread each; the back ends take turns.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.machine import describe
from benchmarks.training_measures import make_row, memory
from rolecall.settings import OptimizerSection, ParallelSection, TrainingBackend
from rolecall.training.account.memory import PhaseMemory
from rolecall.training.backends import make_engine
from rolecall.training.model.box import local_part
from rolecall.training.objective.objectives import SftObjective
from rolecall.training.options import EngineOptions
from rolecall.training.packing.pack import local_counts, pack
from rolecall.training.packing.plan import plan_batch
from rolecall.training.ranks.command_group import CommandGroup
from rolecall.training.ranks.device import RankSpec, start_rank

NUM_RANKS = 2
TIMEOUT_S = 1200.0
"""Of the ranks of one measurement; a hang ends there."""
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
MIDDLE = {"vocab_size": 8192, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, **HEADS}
SMALL = {"vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, **HEADS}
CASES: list[tuple[TrainingBackend, dict[str, int]]] = [
    ("fsdp", {}),
    ("megatron", {}),
    ("fsdp", {"tensor": 2}),
    ("megatron", {"tensor": 2}),
    ("fsdp", {"sequence": 2}),
    ("megatron", {"sequence": 2}),
    ("megatron", {"pipeline": 2}),
]
QUICK = [CASES[0], CASES[-1]]


def measured(folder: str, rank: int, backend: TrainingBackend, parallel: Mapping[str, int], quick: bool) -> None:
    """Prints what one rank saw of some steps, the first of which is not counted."""
    device = start_rank(RankSpec(rank, NUM_RANKS, rank, (), f"file://{folder}/rendezvous", 1, TIMEOUT_S))
    options = EngineOptions(
        path=Path(folder).parent / "model",
        head="policy",
        dtype="float32",
        optimizer=OptimizerSection(learning_rate=1e-6),
        parallel=ParallelSection(**parallel),
    )
    accounts = PhaseMemory(device)
    find_libraries(backend)  # what these take is told apart from what the model takes
    before = memory("VmRSS")
    engine, _ = make_engine(backend, options, device=device, memory=accounts, progressed=lambda: None)
    rng = np.random.default_rng(0)
    rows = [make_row(rng, int(n), 256) for n in rng.integers(8 if quick else 64, 16 if quick else 256, 16)]
    lengths = [len(row["token_ids"]) for row in rows]
    group = CommandGroup.of_default(parallel=ParallelSection(**parallel))
    plan = plan_batch(
        lengths,
        num_minibatches=1,
        token_budget=32 if quick else 512,
        world_size=group.num_slots,
        cost=engine.flops.forward,
        seed=0,
    )[group.slot]
    packed = [
        pack([rows[i] for i in members], ["loss_mask"], temperature=1.0, device=device) for members in plan.microbatches
    ]
    seconds, losses, held = list[float](), list[float](), dict[str, int]()
    for _ in range(2 if quick else 4):
        dist.barrier()
        started = time.perf_counter()
        metrics = engine.forward_backward(packed, SftObjective(local_counts(rows)))
        held = {kind: sum(map(_num_bytes, tensors.values())) for kind, tensors in accounts.holdings().items()}
        engine.step()
        seconds.append(time.perf_counter() - started)
        losses.append(float(group.sum_over_slots(np.array([metrics.values().get("sft/loss", 0.0)]))[0]))
    found = {
        "tokens_per_s": sum(lengths) / median(seconds[1:]),
        "loss": losses[0],
        "held": held,
        "peak": memory("VmHWM") - before,
        "libraries": before,
        "num_parameters": engine.num_parameters,
    }
    print(json.dumps(found), flush=True)


def find_libraries(backend: TrainingBackend) -> None:
    """Imports what an engine of `backend` is made of."""
    names = {"fsdp": ("fsdp.engine",), "megatron": ("megatron.engine", "megatron.on_cpu")}
    for name in names[backend]:
        import_module(f"rolecall.training.{name}")


def _num_bytes(tensor: torch.Tensor) -> int:
    return local_part(tensor).nbytes


def together(folder: Path, backend: TrainingBackend, parallel: Mapping[str, int], quick: bool) -> list[dict[str, Any]]:
    """What the ranks of one measurement print. SystemExit with the end of what they said when one fails."""
    folder.mkdir()
    command = [sys.executable, "-m", "benchmarks.back_ends", "--backend", backend, "--parallel", json.dumps(parallel)]
    ranks = [
        subprocess.Popen(
            [*command, "--folder", str(folder), "--rank", str(rank), *(["--quick"] if quick else [])],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(NUM_RANKS)
    ]
    try:
        said = [rank.communicate(timeout=TIMEOUT_S)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, text in zip(ranks, said, strict=True):
        if rank.returncode:
            raise SystemExit(f"{text[-4000:]}\n\n{backend} {parallel} failed with {rank.returncode}")
    return [json.loads([line for line in text.splitlines() if line.startswith('{"tokens')][-1]) for text in said]


def table(rounds: int, quick: bool) -> None:
    """Prints the table."""
    with tempfile.TemporaryDirectory() as name:
        torch.manual_seed(0)
        config = Qwen3Config(**(SMALL if quick else MIDDLE), max_position_embeddings=1024, tie_word_embeddings=True)
        Qwen3ForCausalLM(config).save_pretrained(Path(name) / "model")
        cases = QUICK if quick else CASES
        found: dict[int, list[list[dict[str, Any]]]] = {case: [] for case in range(len(cases))}
        for number in range(rounds):
            for case, (backend, parallel) in enumerate(cases):
                found[case].append(together(Path(name) / f"{number}-{case}", backend, parallel, quick))
                print(backend, parallel, found[case][-1][0], file=sys.stderr, flush=True)
    first = found[0][0][0]
    print(f"{first['num_parameters'] / 1e6:.1f}M parameters, float32, {NUM_RANKS} ranks of one thread; MB per rank\n")
    print(f"{'layout':<14}{'back end':<10}{'tokens/s':>9}{'parameters':>11}{'gradients':>11}{'moments':>11}{'peak':>7}")
    for case, (backend, parallel) in enumerate(cases):
        ranks = [rank for each in found[case] for rank in each]
        if abs(ranks[0]["loss"] - first["loss"]) > 1e-4 * abs(first["loss"]):
            raise SystemExit(f"{backend} {parallel} does not compute the same: {ranks[0]['loss']}, {first['loss']}")
        layout = " ".join(f"{key} {value}" for key, value in parallel.items()) or "data"
        held = {kind: max(rank["held"].get(kind, 0) for rank in ranks) / 1e6 for kind in KINDS}
        peak = max(rank["peak"] for rank in ranks) / 1e6
        rate = median(rank["tokens_per_s"] for rank in ranks)
        print(f"{layout:<14}{backend:<10}{rate:>9.0f}" + "".join(f"{held[kind]:>11.0f}" for kind in KINDS), end="")
        print(f"{peak:>7.0f}", flush=True)
    taken = {backend: found[case][0][0]["libraries"] / 1e6 for case, (backend, _) in enumerate(cases)}
    print("\nbefore the model: " + ", ".join(f"{backend} {each:.0f} MB" for backend, each in taken.items()))


KINDS = ("parameters", "gradients", "optimizer states")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="tiny sizes, fewer layouts: does it still run?")
    parser.add_argument("--rounds", type=int, default=2, help="of each measurement")
    for word in ("--folder", "--backend", "--parallel"):
        parser.add_argument(word, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    words = parser.parse_args()
    if words.rank is not None:
        measured(words.folder, words.rank, words.backend, json.loads(words.parallel), words.quick)
        return
    print(*describe(), f"torch {torch.__version__}", "", sep="\n")
    table(1 if words.quick else words.rounds, words.quick)


if __name__ == "__main__":
    main()
