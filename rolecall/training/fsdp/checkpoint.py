"""Sharded checkpoints without pickle: one safetensors file per rank and an index that is written last.

    <path>/rank-00000.safetensors   rows this rank keeps: model/<name>, exp_avg/<name>, exp_avg_sq/<name>; rng/<device kind>; metadata `rows` says which
    <path>/index.json               {"format": 1, "world_size", "counters", "shapes"}; a directory without it is no checkpoint

Loading works at any world size: a rank reads the rows it keeps from whichever files hold them. Random state is restored at the same world size only.
torch.distributed.checkpoint is not used because its index (.metadata) is a pickle.
"""

import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch.distributed.tensor import DTensor

from rolecall.errors import CheckpointMismatchError, CheckpointMissingError, DiskFullError
from rolecall.training.device import rng_state, set_rng_state
from rolecall.training.fsdp.load import rows_of
from rolecall.training.huggingface import is_disk_full

INDEX = "index.json"
FORMAT = 1
MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class State:
    """What is kept."""

    parameters: dict[str, torch.nn.Parameter]
    """By Hugging Face name; DTensors sharded along their first dimension."""
    optimizer: torch.optim.AdamW | None
    counters: dict[str, int]
    """At least num_updates: optimizer steps applied."""


def save(path: Path, state: State, device: torch.device, group: dist.ProcessGroup) -> int:
    """Writes and syncs this rank's file, then (rank 0, when all have) the index. Returns this rank's bytes. A collective; DiskFullError on every rank."""
    rank = dist.get_rank(group)
    tensors, rows = {}, {}
    for key, tensor in _sharded(state).items():
        start, end = rows_of(tensor)
        if end > start:
            tensors[key], rows[key] = tensor.to_local().detach().contiguous(), (start, end)
    tensors.update({f"rng/{kind}": value for kind, value in rng_state(device).items()})
    shortage = _write(path, f"rank-{rank:05d}.safetensors", tensors, {"rows": json.dumps(rows)})
    raise_together(shortage, device, group)
    if rank == 0:
        shapes = {key: list(tensor.shape) for key, tensor in _sharded(state).items()}
        index = {"format": FORMAT, "world_size": dist.get_world_size(group), "counters": state.counters, "shapes": shapes}
        _write_index(path, index)
    dist.barrier(group)
    return sum(tensor.nbytes for tensor in tensors.values())


def load(path: Path, state: State, device: torch.device, group: dist.ProcessGroup) -> dict[str, int]:
    """Restores parameters, moments and random state in place; returns the counters. CheckpointMissingError, CheckpointMismatchError."""
    if not (path / INDEX).is_file():
        raise CheckpointMissingError(f"{path} holds no complete checkpoint: {INDEX} is missing; name an earlier one")
    index = json.loads((path / INDEX).read_text())
    if index["format"] != FORMAT:
        raise CheckpointMismatchError(f"{path} has checkpoint format {index['format']}, this release reads {FORMAT}")
    counters: dict[str, int] = index["counters"]
    if state.optimizer is not None:
        _make_moments(state, counters["num_updates"])
    wanted = _sharded(state)
    shapes = {key: list(tensor.shape) for key, tensor in wanted.items()}
    if shapes != index["shapes"]:
        differing = sorted(key for key in shapes.keys() | index["shapes"].keys() if shapes.get(key) != index["shapes"].get(key))
        raise CheckpointMismatchError(
            f"{path} was saved from another model: {len(differing)} tensors differ, first {differing[0]!r}; use the model it was made with"
        )
    for rank in range(index["world_size"]):
        _read(path / f"rank-{rank:05d}.safetensors", wanted)
    if index["world_size"] == dist.get_world_size(group):
        with safe_open(path / f"rank-{dist.get_rank(group):05d}.safetensors", framework="pt") as file:
            keys: list[str] = file.keys()
            set_rng_state({key.removeprefix("rng/"): file.get_tensor(key) for key in keys if key.startswith("rng/")}, device)
    return counters


def _sharded(state: State) -> dict[str, DTensor]:
    tensors: dict[str, DTensor] = {}
    for name, parameter in state.parameters.items():
        assert isinstance(parameter, DTensor)
        tensors[f"model/{name}"] = parameter
        if state.optimizer is not None and parameter in state.optimizer.state:
            tensors.update({f"{moment}/{name}": state.optimizer.state[parameter][moment] for moment in MOMENTS})
    return tensors


def _make_moments(state: State, num_updates: int) -> None:
    """AdamW makes its moments at the first step; a restored one needs them before."""
    assert state.optimizer is not None
    state.optimizer.state.clear()
    if num_updates:
        for parameter in state.parameters.values():
            moments = {moment: torch.zeros_like(parameter) for moment in MOMENTS}
            state.optimizer.state[parameter] = {"step": torch.tensor(float(num_updates), device=parameter.device), **moments}


def _read(path: Path, wanted: dict[str, DTensor]) -> None:
    """Copies what `path` holds of the rows this rank keeps."""
    with safe_open(path, framework="pt") as file, torch.no_grad():
        rows: dict[str, tuple[int, int]] = json.loads(file.metadata()["rows"])
        for key, (start, end) in rows.items():
            mine_start, mine_end = rows_of(wanted[key])
            first, last = max(start, mine_start), min(end, mine_end)
            if first < last:
                part = file.get_slice(key)[first - start : last - start]
                wanted[key].to_local()[first - mine_start : last - mine_start].copy_(part)


def _write(path: Path, name: str, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> str | None:
    """Writes and syncs one file; returns what is wrong when the disk is full."""
    try:
        path.mkdir(parents=True, exist_ok=True)
        save_file({key: tensor.to("cpu") for key, tensor in tensors.items()}, path / name, metadata)
        _sync(path / name)
    except (OSError, SafetensorError) as error:
        if not is_disk_full(error):
            raise
        return f"no space for {path / name}: {error}; free some, or keep fewer checkpoints"
    return None


def _write_index(path: Path, index: dict[str, object]) -> None:
    temporary = path / f"{INDEX}.partial"
    temporary.write_text(json.dumps(index, indent=1))
    _sync(temporary)
    os.replace(temporary, path / INDEX)
    _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def raise_together(shortage: str | None, device: torch.device, group: dist.ProcessGroup) -> None:
    """All ranks fail when one does: nobody waits at a barrier for a rank that gave up."""
    failed = torch.tensor([int(shortage is not None)], device=device)
    dist.all_reduce(failed, group=group)
    if int(failed):
        raise DiskFullError(shortage or f"another rank found no space for its share of the checkpoint ({int(failed)} of {dist.get_world_size(group)})")
