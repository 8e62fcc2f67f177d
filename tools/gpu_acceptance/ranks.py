"""Check 13: two ranks on one GPU, which NCCL takes for two hosts, train what one rank trains; checkpoints of 2 -> 1 ->
2 ranks; the weights of two ranks sent.

A rank is a process of its own: `python -m tools.gpu_acceptance.ranks FOLDER RANK [--dry]`. It writes what it saw to
FOLDER/rank-RANK.json; rank 0 also the
weights after the steps of every layout.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

from rolecall.settings import OptimizerSection, ParallelSection, child_environment
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.model.box import whole
from rolecall.training.objective.objectives import SftObjective
from rolecall.training.options import EngineOptions
from rolecall.training.packing.pack import local_counts as counts_of
from rolecall.training.packing.pack import pack
from rolecall.training.packing.plan import plan_batch
from rolecall.training.ranks.device import RankSpec, backend_of, start_rank
from rolecall.weights.fingerprint import digest, fingerprint
from rolecall.weights.manifest import build_manifest
from rolecall.weights.publisher import Publisher
from tests.checkpoint_rig import load, save
from tests.nccl_hosts import as_host
from tests.tiny_models import write_qwen3
from tools.gpu_acceptance.findings import Findings
from tools.gpu_acceptance.receiver import MEET_S, Receiver, receivers
from tools.gpu_acceptance.stage import Stage, make_rows, relative

Dtype = Literal["float32", "bfloat16"]
LAYOUTS: dict[str, dict[str, int]] = {
    "shard": {},
    "hsdp": {"replicate": 2},
    "sequence": {"sequence": 2},
    "tensor": {"tensor": 2},
}
SAVED = ("shard", "hsdp")
"""Layouts whose ranks save a checkpoint. Of hsdp's, one has nothing to write."""
NUM_STEPS = 3
BOUNDS: dict[Dtype, float] = {"float32": 1e-5, "bfloat16": 1e-2}
"""Largest relative gap of losses, gradient norms and weights."""
_SECTION = OptimizerSection(learning_rate=1e-4, max_grad_norm=1e30)
_RANKS_S = 100.0
"""Deadline of both ranks together."""
_RENDEZVOUS_S = 60.0
_VOCAB = 512


def models(folder: Path, dry: bool) -> dict[Dtype, Path]:
    """A tiny model that trains in float32, and a wider one for bfloat16 that the flash path takes; the same
    directories on every rank."""
    made: dict[Dtype, Path] = {"float32": folder / "float32"}
    if not dry:
        made["bfloat16"] = folder / "bfloat16"
    return made


def train(engine: FsdpEngine, num_steps: int, dry: bool) -> list[tuple[float, float]]:
    """(loss of the whole batch, gradient norm) of so many steps over the same rows."""
    rows = make_rows((9, 17, 5, 12, 21, 8) if dry else (300, 170, 512, 64, 90, 210), _VOCAB)
    layout = engine.layout
    said = []
    for step in range(num_steps):
        lengths = [len(row["token_ids"]) for row in rows]
        budget = 40 if dry else 600
        plans = plan_batch(
            lengths,
            num_minibatches=1,
            token_budget=budget,
            world_size=layout.data_size,
            cost=engine.flops.forward,
            seed=step,
        )
        microbatches = [
            pack([rows[i] for i in part], ["loss_mask"], temperature=0.7, device=engine.device)
            for part in plans[layout.data_rank].microbatches
        ]
        metrics = engine.forward_backward(microbatches, SftObjective(counts_of(rows))).values()
        loss = torch.tensor(
            metrics.get("sft/loss", 0.0) * layout.is_slot_leader, dtype=torch.float64, device=engine.device
        )
        dist.all_reduce(loss)
        said.append((float(loss), engine.step().grad_norm))
    return said


def make_engine(path: Path, dtype: Dtype, device: torch.device, parallel: dict[str, int]) -> FsdpEngine:
    """The engine of this rank."""
    options = EngineOptions(
        path=path, head="policy", dtype=dtype, optimizer=_SECTION, total_steps=100, parallel=ParallelSection(**parallel)
    )
    return FsdpEngine(options, device=device)


def weights_of(engine: FsdpEngine) -> dict[str, torch.Tensor]:
    """Returns what the engine trains, whole, float32, on the host; a collective."""
    parameters = engine._model.hf.named_parameters()
    return {name: whole(parameter.detach()).cpu().contiguous() for name, parameter in parameters}


def check_ranks(found: Findings, folder: Path) -> None:
    """Starts two ranks, then compares what they did with one rank's work."""
    os.environ.update(as_host("alone"))  # before this process's first communicator
    with torch.random.fork_rng():
        write_qwen3(folder / "float32", tied=True, vocab=_VOCAB, hidden=32)
    if not found.dry:
        write_qwen3(folder / "bfloat16", vocab=_VOCAB, hidden=512, num_layers=4, heads=8, kv_heads=4)  # heads of 64
    stage = Stage.of(found, folder)
    _save_alone(stage)
    with receivers(stage.device, 1) as (receiver,), ExitStack() as stack:
        seen = _run_ranks(stack, found, folder, receiver)
    for dtype, path in models(folder, found.dry).items():
        alone = make_engine(path, dtype, stage.device, {})
        said = train(alone, NUM_STEPS, found.dry)
        exact = weights_of(alone)
        for layout in LAYOUTS:
            with found.attempt(f"{dtype} {layout}"):
                theirs = load_file(folder / f"{dtype}-{layout}.safetensors")
                gaps = [
                    max(abs(a / b - 1) for a, b in zip(ours, single, strict=True))
                    for ours, single in zip(seen[f"{dtype} {layout}"], said, strict=True)
                ]
                found.at_most(f"{dtype} {layout}, loss and norm", max(gaps), BOUNDS[dtype])
                found.at_most(
                    f"{dtype} {layout}, weights",
                    max(relative(theirs[name], tensor) for name, tensor in exact.items()),
                    BOUNDS[dtype],
                )
        del alone
    with found.attempt("checkpoints"):
        _check_checkpoints(stage, seen)


def _save_alone(stage: Stage) -> None:
    """Saves what two ranks are to load: one rank's checkpoint, and its weights."""
    alone = make_engine(stage.folder / "float32", "float32", stage.device, {})
    train(alone, 1, stage.found.dry)
    save(alone, stage.folder / "one")
    save_file(weights_of(alone), stage.folder / "one.safetensors")


def _run_ranks(stack: ExitStack, found: Findings, folder: Path, receiver: Receiver) -> dict[str, Any]:
    """Returns what rank 0 saw; what the receiver got of its weights is added to it."""
    command = [sys.executable, "-m", "tools.gpu_acceptance.ranks", str(folder)]
    started = []
    for rank in range(2):
        log = stack.enter_context((folder / f"rank-{rank}.log").open("w"))
        environment = child_environment({**as_host(f"rank-{rank}"), "OMP_NUM_THREADS": "1"})
        process = subprocess.Popen(
            [*command, str(rank), *(["--dry"] if found.dry else [])],
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
        )
        stack.callback(process.wait, MEET_S)
        stack.callback(process.kill)
        started.append(process)
    try:
        arrived, codes = _receive(folder, receiver, started)
    finally:
        for rank in range(2):
            print(f"--- rank {rank}\n{(folder / f'rank-{rank}.log').read_text()[-4000:]}", flush=True)
    if codes != [0, 0]:
        raise RuntimeError(f"the ranks ended with {codes}; what they said stands above")
    seen: dict[str, Any] = json.loads((folder / "rank-0.json").read_text())
    return {**seen, "arrived": arrived}


def _receive(
    folder: Path, receiver: Receiver, started: Sequence["subprocess.Popen[bytes]"]
) -> tuple[dict[str, Any], list[int]]:
    """Returns what the receiver got of the weights that rank 0 sends, and how the ranks ended."""
    deadline = time.monotonic() + _RANKS_S
    address = folder / "address.json"
    while not address.exists() and all(process.poll() is None for process in started) and time.monotonic() < deadline:
        time.sleep(0.05)
    arrived: dict[str, Any] = {}
    if address.exists():
        receiver.ask(json.loads(address.read_text()), 1, timeout_s=MEET_S)
        arrived = receiver.answer()
    return arrived, [process.wait(max(1.0, deadline - time.monotonic())) for process in started]


def _check_checkpoints(stage: Stage, seen: dict[str, Any]) -> None:
    """One rank loads what two ranks saved, and has their weights to the bit; what two ranks sent is what this one
    would."""
    folder, found = stage.folder, stage.found
    alone = make_engine(folder / "float32", "float32", stage.device, {})
    for layout in reversed(SAVED):  # what is sent below are the first one's
        load(alone, folder / layout)
        theirs = load_file(folder / f"float32-{layout}.safetensors")
        found.require(
            f"one rank loads other weights than two ranks saved, {layout}",
            all(torch.equal(theirs[name], tensor) for name, tensor in weights_of(alone).items()),
        )
    named = dict(alone.named_weights())
    expected = digest(build_manifest(iter(named.items()), 2**20), [fingerprint(tensor) for tensor in named.values()])
    found.require("two ranks sent other weights", seen["sent"] == expected)
    found.require(f"the receiver got {seen['arrived']}", seen["arrived"].get("digest") == expected)
    found.require("two ranks load other weights than one rank, or another layout, saved", seen["back"] is True)


def main() -> None:
    """One of the two ranks."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("rank", type=int)
    parser.add_argument("--dry", action="store_true")
    arguments = parser.parse_args()
    folder, rank = arguments.folder, arguments.rank
    devices = () if arguments.dry else (0, 0)
    device = start_rank(
        RankSpec(rank, 2, rank, devices, f"file://{folder / 'rendezvous'}", 1 if arguments.dry else None, _RENDEZVOUS_S)
    )
    seen: dict[str, Any] = {}
    for dtype, path in models(folder, arguments.dry).items():
        for layout, parallel in LAYOUTS.items():
            engine = make_engine(path, dtype, device, parallel)
            seen[f"{dtype} {layout}"] = train(engine, NUM_STEPS, arguments.dry)
            weights = weights_of(engine)
            if rank == 0:
                save_file(weights, folder / f"{dtype}-{layout}.safetensors")
            if dtype == "float32" and layout in SAVED:
                save(engine, folder / layout)
            if (dtype, layout) == ("float32", SAVED[0]):
                seen["sent"] = _send(engine, folder, rank, device)
            if (dtype, layout) == ("float32", "tensor"):
                seen["back"] = _loads_back(engine, folder)
            del engine
    (folder / f"rank-{rank}.json").write_text(json.dumps(seen))


def _send(engine: FsdpEngine, folder: Path, rank: int, device: torch.device) -> str | None:
    """Rank 0 publishes what both ranks gather; the digest."""
    manifest = build_manifest(engine.named_weights(), 2**20)
    if rank:
        for _ in engine.named_weights():  # a collective
            pass
        return None
    publisher = Publisher(device)
    partial = folder / "address.partial"
    partial.write_text(
        json.dumps(publisher.open(1, 2, "127.0.0.1", "nccl" if backend_of(device) == "nccl" else "gloo", MEET_S))
    )
    partial.replace(folder / "address.json")
    sent = publisher.publish(engine.named_weights(), manifest, epoch=1, policy_version=1, bucket_timeout_s=MEET_S)
    publisher.close()
    return sent.digest


def _loads_back(engine: FsdpEngine, folder: Path) -> bool:
    """Whether these two ranks have, to the bit, the weights that other layouts of two ranks saved, and those that one
    rank saved."""
    same = []
    for name, weights in {"one": "one", **{layout: f"float32-{layout}" for layout in SAVED}}.items():
        load(engine, folder / name)
        theirs = load_file(folder / f"{weights}.safetensors")
        same += [torch.equal(theirs[key], tensor) for key, tensor in weights_of(engine).items()]
    return all(same)


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # Threads of collectives, ended by the interpreter's teardown, now and then abort the process after all is done.
    os._exit(0)
