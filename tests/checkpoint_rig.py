"""Checkpoints of an engine by itself, without a trainer around it: taken and written in one go, restored, exported."""

import hashlib
from pathlib import Path

import torch.distributed as dist

from rolecall.checkpoint.manifest import StoredFile
from rolecall.checkpoint.storage import open_storage
from rolecall.training.engine import EngineState
from rolecall.training.export.export import export
from rolecall.training.ranks.command_group import CommandGroup
from rolecall.training.state.checkpoint import read_index


def save(engine: EngineState, path: Path) -> tuple[StoredFile, ...]:
    """Writes the engine's state to `path`; a collective, after which it is whole. What was written, on rank 0."""
    files = engine.snapshot().write(open_storage(str(path)), CommandGroup.of_default(), {})
    dist.barrier()
    return files


def load(engine: EngineState, path: Path) -> None:
    """Restores it."""
    storage = open_storage(str(path))
    engine.load(storage, read_index(storage))


def exported(path: Path, dtype: str | None = None) -> Path:
    """A model directory made of the checkpoint in `path`, in `dtype` or the run's own."""
    storage, model = open_storage(str(path)), path.with_name(f"{path.name}-model")
    export(
        storage,
        [
            StoredFile(name, size, hashlib.sha256(storage.read(name)).hexdigest())
            for name, size in storage.files().items()
        ],
        model,
        dtype=dtype,
    )
    return model
