"""Checks 8 and 9: snapshots taken while steps go on, and state and activations that live in host memory."""

import time
from functools import partial
from pathlib import Path
from statistics import median

import torch

from rolecall.checkpoint.storage import open_storage
from rolecall.settings import OptimizerSection
from rolecall.training.account.memory import PhaseMemory
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.objective.objectives import SftObjective
from rolecall.training.packing.pack import local_counts
from rolecall.training.ranks.command_group import CommandGroup
from rolecall.training.ranks.device import held_bytes, memory_bytes, wait_for
from rolecall.training.serving.background import in_background
from rolecall.weights.fingerprint import fingerprint
from tests.checkpoint_rig import load
from tools.gpu_acceptance.findings import Findings
from tools.gpu_acceptance.stage import (
    Stage,
    local_gradients,
    local_moments,
    local_parameters,
    make_engine,
    make_rows,
    packed,
    write_zeros,
)

_WRITE_S = 60.0
"""Deadline of one checkpoint."""
_MOVING = OptimizerSection(learning_rate=1e-3, max_grad_norm=1e30)


def check_snapshot(found: Findings, folder: Path) -> None:
    """A snapshot is taken while the device is far behind the host, and the next step changes everything at once: what
    is loaded is what was there."""
    stage = Stage.of(found, folder)
    config = stage.config("0.6B", **stage.pick({"num_hidden_layers": 2, "vocab_size": 8192}, {}))
    engine = make_engine(stage, write_zeros(folder / "model", config), optimizer=_MOVING)
    rows = make_rows(stage.pick((600, 300), (12, 9)), config.vocab_size)
    microbatch, objective = packed(rows, stage.device), SftObjective(local_counts(rows))
    group, num_rounds = CommandGroup.of_default(), stage.pick(20, 2)

    def train() -> None:
        engine.forward_backward([microbatch], objective, entropy=True)
        engine.step()

    train()
    plain_s = median(stage.seconds(train) for _ in range(3))
    blocked, num_wrong, num_bytes = [], 0, 0
    for number in range(num_rounds):
        storage = open_storage(str(folder / f"checkpoint-{number % 2}"))
        train()
        stage.hold(0.05)  # the device does not begin with what follows for a while
        engine.forward_backward([microbatch], objective, entropy=True)
        truth = {name: tensor.clone() for name, tensor in _state(engine).items()}
        num_updates = engine.num_updates
        started = time.perf_counter()
        snapshot = engine.snapshot()
        written = in_background(partial(snapshot.write, storage, group, {}), "checkpoint")
        engine.step()
        train()
        wait_for(stage.device)
        blocked.append(time.perf_counter() - started - 1.5 * plain_s)
        files = written.result(_WRITE_S)
        num_bytes = sum(file.num_bytes for file in files)
        load(engine, Path(storage.url))
        state = _state(engine)
        num_wrong += sum(not torch.equal(state[name], tensor) for name, tensor in truth.items()) + (
            engine.num_updates != num_updates
        )
        del snapshot, truth
    found.figure("checkpoint, MB", num_bytes / 1e6)
    found.figure("rounds", num_rounds)
    found.figure("steps were blocked for s (median, most)", f"{median(blocked):.3f}, {max(blocked):.3f}")
    found.require(
        f"{num_wrong} tensors of {num_rounds} checkpoints are not what they were at the snapshot", num_wrong == 0
    )


def _state(engine: FsdpEngine) -> dict[str, torch.Tensor]:
    return {**local_parameters(engine), **local_moments(engine)}


def check_offload(found: Findings, folder: Path) -> None:
    """State that goes to the host and comes back, moments that live there, activations that wait there: the same
    numbers, and the memory is free."""
    stage = Stage.of(found, folder)
    with found.attempt("state"):
        _check_state(stage)
    with found.attempt("moments"):
        _check_moments(stage)
    with found.attempt("activations"):
        _check_activations(stage)


def _check_state(stage: Stage) -> None:
    """Everything, in the middle of a step: parameters, moments, gradients."""
    config = stage.config("0.6B")
    engine = make_engine(stage, write_zeros(stage.folder / "state", config), optimizer=_MOVING)
    rows = make_rows(stage.pick((600, 300), (12, 9)), config.vocab_size)
    microbatch, objective = packed(rows, stage.device), SftObjective(local_counts(rows))
    engine.forward_backward([microbatch], objective, entropy=True)
    engine.step()
    engine.forward_backward([microbatch], objective, entropy=True)
    tensors = {**_state(engine), **{f"gradient/{name}": gradient for name, gradient in local_gradients(engine).items()}}
    before, state_bytes = (
        {name: fingerprint(tensor) for name, tensor in tensors.items()},
        sum(tensor.nbytes for tensor in tensors.values()),
    )
    del tensors
    host = torch.device("cpu")
    resident = memory_bytes(host)[0]
    first_s = stage.seconds(engine.offload)
    pinned = memory_bytes(host)[0] - resident
    engine.onload()
    full = memory_bytes(stage.device)[0]
    out_s = stage.seconds(engine.offload)
    freed = full - memory_bytes(stage.device)[0]
    in_s = stage.seconds(engine.onload)
    after = {**_state(engine), **{f"gradient/{name}": gradient for name, gradient in local_gradients(engine).items()}}
    stage.found.figure("state, GB", state_bytes / 1e9)
    stage.found.figure(
        "GB/s of the first offload, the next, onload",
        ", ".join(f"{state_bytes / s / 1e9:.1f}" for s in (first_s, out_s, in_s)),
    )
    stage.found.require(
        "what came back is not what went", {name: fingerprint(tensor) for name, tensor in after.items()} == before
    )
    stage.found.at_least("memory that offloading frees, of the state", freed / state_bytes, 0.95, on_device=True)
    # Pinned blocks are rounded up to a power of two: of one storage to twice its size at most.
    stage.found.at_most("host memory that it takes, of the state", pinned / state_bytes, 2.1, on_device=True)


def _check_moments(stage: Stage) -> None:
    """Two engines get the same gradients; the moments of one live on the host, and a step has a portion of them."""
    config, memory = stage.config("0.6B"), PhaseMemory(stage.device)
    path = write_zeros(stage.folder / "moments", config)
    here = make_engine(stage, path, optimizer=_MOVING)
    there = make_engine(stage, path, optimizer=_MOVING.model_copy(update={"offload": True}), memory=memory)
    rows = make_rows(stage.pick((600, 300), (12, 9)), config.vocab_size)
    microbatch, objective = packed(rows, stage.device), SftObjective(local_counts(rows))
    for _ in range(3):
        here.forward_backward([microbatch], objective, entropy=True)
        there.forward_backward([microbatch], objective, entropy=True)
        gradients = local_gradients(here)
        for name, gradient in local_gradients(there).items():
            gradient.copy_(gradients[name])
        here.step()
        wait_for(stage.device)
        before = held_bytes(stage.device)
        memory.take_peaks()
        step_s = stage.seconds(there.step)
        rise = memory.take_peaks()["optimizer"] - before
    num_bytes = there.num_bytes_away("optimizer")
    stage.found.require("the moments are on the device", num_bytes > 0)
    stage.found.figure("GB/s of moments to the device and back, in a step", 2 * num_bytes / step_s / 1e9)
    stage.found.at_most("moments on the device in a step, of all", rise / num_bytes, 0.5, on_device=True)
    theirs = local_parameters(there)
    stage.found.require(
        "moments on the host make other weights",
        all(torch.equal(tensor, theirs[name]) for name, tensor in local_parameters(here).items()),
    )


def _check_activations(stage: Stage) -> None:
    """One row of 32k tokens at 4B: loss and gradients as without, and the memory of the layers' inputs is free in the
    forward pass. Of a model so small for its device the backward pass ends higher, with all gradients and one layer.
    """
    config, memory = stage.config("4B"), PhaseMemory(stage.device)
    path = write_zeros(stage.folder / "4B", config)
    engine = make_engine(stage, path, gradient_checkpointing=True, activation_offload=True, memory=memory)
    rows = make_rows(stage.pick((32768,), (1200,)), config.vocab_size)
    microbatch, objective = packed(rows, stage.device), SftObjective(local_counts(rows))
    offload = engine._activations
    assert offload is not None
    seen = {}
    for way in ("kept", "kept again", "offloaded", "offloaded again"):  # the first time memory is pinned
        engine._activations = offload if way.startswith("offloaded") else None
        _drop_gradients(engine)
        wait_for(stage.device)
        memory.take_peaks()
        started = time.perf_counter()
        loss = engine.forward_backward([microbatch], objective, entropy=True).values()["sft/loss"]
        wait_for(stage.device)
        norms = torch.stack([gradient.double().norm() for gradient in local_gradients(engine).values()])
        seen[way] = loss, norms, memory.take_peaks().get("forward", 0), time.perf_counter() - started
    kept, again, moved = seen["kept"], seen["kept again"], seen["offloaded again"]
    noise = float((kept[1] - again[1]).norm() / kept[1].norm())  # the backward of flash attention adds up in any order
    stage.found.figure("activations moved, GB", offload.num_bytes / 1e9)
    stage.found.figure("peak GiB of forward kept, offloaded", f"{again[2] / 2**30:.1f}, {moved[2] / 2**30:.1f}")
    stage.found.figure("s kept, offloaded", f"{again[3]:.2f}, {moved[3]:.2f}")
    stage.found.figure("gradients' norms, two runs kept", noise)
    stage.found.at_most(
        "gradients' norms, offloaded", float((kept[1] - moved[1]).norm() / kept[1].norm()), 2 * noise + 1e-5
    )
    stage.found.require("the loss with offloaded activations is another", moved[0] == again[0])
    stage.found.at_least(
        "memory that it frees, of what it moves", (again[2] - moved[2]) / max(offload.num_bytes, 1), 0.7, on_device=True
    )


def _drop_gradients(engine: FsdpEngine) -> None:
    for parameter in engine._model.parameters():
        parameter.grad = None
