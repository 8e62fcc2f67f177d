"""Puts a rank to work: process group, model and the store, from the settings and what torchrun left in the environment.

Called once per process, in the thread that does all device work. Rank 0 and its followers do exactly the same here: it is a collective.
"""

import os
from pathlib import Path
from typing import Literal

from rolecall.errors import ConfigError
from rolecall.settings import OptimizerSection, RunSettings, TrainerSection, rank_of_process, visible_gpus
from rolecall.store.connection import Connection
from rolecall.store.rows import Rows
from rolecall.training.device import RankSpec, start_rank
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.group import CommandGroup
from rolecall.training.packing import cost_model
from rolecall.training.share import Bench

COLLECTIVE_TIMEOUT_S = 300.0
"""Deadline of one collective of the model: more than one microbatch takes, since ranks meet at every layer."""


def start_bench(
    settings: RunSettings,
    section: TrainerSection,
    connection: Connection,
    *,
    path: Path,
    head: Literal["policy", "value"],
    optimizer: OptimizerSection | None,
    total_steps: int,
) -> tuple[FsdpEngine, Bench]:
    """The engine with its model loaded, and what its rank works with. ConfigError when the ranks or devices are not as configured."""
    rank, world_size, local_rank = rank_of_process()
    if world_size != section.num_ranks:
        raise ConfigError(f"num_ranks is {section.num_ranks}, but {world_size} ranks were started; use torchrun --nproc-per-node {section.num_ranks}")
    spec = RankSpec(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        devices=_as_torch_counts(section.devices),
        rendezvous="env://" if world_size > 1 else None,
        num_threads=section.num_threads or max(1, len(os.sched_getaffinity(0)) // world_size),
        timeout_s=COLLECTIVE_TIMEOUT_S,
    )
    device = start_rank(spec)
    engine = FsdpEngine(
        path,
        head=head,
        dtype=settings.model.dtype,
        device=device,
        optimizer=optimizer,
        total_steps=total_steps,
        gradient_checkpointing=section.gradient_checkpointing,
        seed=settings.run.seed,
    )
    rows = Rows(connection, settings.run.name, settings.store.num_shards)
    return engine, Bench(engine, CommandGroup.of_default(), rows, cost_model(engine.config), device, section.token_budget)


def _as_torch_counts(devices: tuple[int, ...]) -> tuple[int, ...]:
    """GPU indices of the machine as torch numbers them in this process, which may see only some."""
    visible = visible_gpus()
    if not devices or visible is None:
        return devices
    hidden = sorted(set(devices) - set(visible))
    if hidden:
        raise ConfigError(f"GPUs {hidden} are given to this role, but CUDA_VISIBLE_DEVICES shows only {list(visible)}")
    return tuple(visible.index(device) for device in devices)
