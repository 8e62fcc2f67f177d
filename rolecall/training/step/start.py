"""Starts a rank: process group, model and the store, from the settings and what torchrun left in the environment.

Called once per process, in the thread that does all device work. Rank 0 and its followers do exactly the same here: it
is a collective.
"""

import os
import socket
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Literal

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # exported, though not in __all__
from torch.distributed.rendezvous import rendezvous

from rolecall.contract import contract_version
from rolecall.data.images.tokens import read_processor_digest
from rolecall.data.model.adapters import with_modules
from rolecall.data.model.engine_limits import engine_tokens
from rolecall.data.model.files import num_experts, text_config
from rolecall.data.tokenizer import read_template
from rolecall.errors import ConfigError, VersionMismatchError
from rolecall.settings import (
    ActorSection,
    LoraSection,
    MoeSection,
    OptimizerSection,
    RunSettings,
    TrainerSection,
    rank_of_process,
    require_visible,
    visible_gpus,
)
from rolecall.store.connection import Connection
from rolecall.store.rows import Rows
from rolecall.training.account.memory import PhaseMemory
from rolecall.training.account.peaks import peak_flops
from rolecall.training.backends import make_engine
from rolecall.training.options import DTYPES, EngineOptions
from rolecall.training.packing.images import ImageReader
from rolecall.training.ranks.command_group import CommandGroup
from rolecall.training.ranks.device import COLLECTIVE_TIMEOUT_S, RankSpec, name_of, start_rank
from rolecall.training.ranks.watch import RankWatch
from rolecall.training.serving.hooks import ProcessHooks
from rolecall.training.step.rank_context import RankContext, StoreRankContext
from rolecall.training.step.recorder import StepRecorder


def start_store_context(
    settings: RunSettings,
    section: TrainerSection,
    connection: Connection,
    *,
    path: Path,
    head: Literal["policy", "value"],
    optimizer: OptimizerSection | None,
    total_steps: int,
    hooks: ProcessHooks,
    lora: LoraSection | None = None,
    moe: MoeSection | None = None,
    router_replay: bool = False,
) -> StoreRankContext:
    """Starts a rank of a run's role, its model loaded. ConfigError when the ranks or devices are not as configured."""
    actor, shows_images = settings.actor, settings.shows_images
    options = EngineOptions(
        path=path,
        chat_template=read_template(settings.model.chat_template) if optimizer is not None else None,
        head=head,
        dtype=settings.model.dtype,
        float32_logits=settings.model.head_dtype == "float32",
        optimizer=optimizer,
        lora=lora,
        merges_adapters=settings.weights.merge_adapters,
        total_steps=total_steps,
        parallel=actor.parallel.model_copy(update=section.parallel.model_dump()),
        megatron=actor.megatron,
        gradient_checkpointing=actor.gradient_checkpointing and optimizer is not None,
        activation_offload=actor.activation_offload and optimizer is not None,
        torch_compile=actor.torch_compile,
        routers=moe is not None,
        router_replay=router_replay,
        freeze_vision_tower=settings.freezes_vision_tower,
        freeze_routers=settings.model.freeze_routers and num_experts(text_config(path)) > 0,
        max_sequence_tokens=engine_tokens(settings),
        shows_images=shows_images,
        deterministic=settings.run.deterministic,
        seed=settings.run.seed,
    )
    context = start_context(options, section, actor, settings.run.dir, settings.controller.start_timeout_s, hooks)
    rows = Rows(connection, settings.run.name, settings.store.num_shards)
    images = ImageReader(path, DTYPES[options.dtype], hooks.progressed) if shows_images else None
    return StoreRankContext(**vars(context), rows=rows, images=images)


def start_context(
    options: EngineOptions,
    section: TrainerSection,
    actor: ActorSection,
    run_dir: Path,
    timeout_s: float,
    hooks: ProcessHooks,
) -> RankContext:
    """Starts a rank that has no store, its model loaded. `timeout_s` bounds the time until all ranks have met."""
    rank, world_size, local_rank = rank_of_process()
    if world_size != section.num_ranks:
        raise ConfigError(
            f"num_ranks is {section.num_ranks}, but {world_size} ranks were started; use torchrun --nproc-per-node "
            f"{section.num_ranks}"
        )
    spec = RankSpec(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        devices=_as_torch_counts(section.devices),
        rendezvous="env://" if world_size > 1 else None,
        num_threads=actor.num_threads or max(1, len(os.sched_getaffinity(0)) // world_size),
        timeout_s=COLLECTIVE_TIMEOUT_S,
        deterministic=options.deterministic,
    )
    if options.lora is not None:
        options = replace(options, lora=with_modules(options.lora, options.path, options.lora_setting))
    # Held until the ranks have met: without torchrun rank 0 is its server, and a rank may ask it after rank 0 went on.
    store = _meeting_store(rank, world_size, timeout_s) if world_size > 1 else None
    watch = None if store is None else _watch_ranks(hooks, rank, world_size, store, timeout_s)
    if store is not None:
        require_one_release(store, rank)  # the watch has the others end with a rank that is refused
        if options.shows_images:
            require_one_processor(store, rank, options.path)
    device = start_rank(spec)
    memory = PhaseMemory(device, role=hooks.role, rank=rank, folder=run_dir / "memory")
    engine, state = make_engine(actor.backend, options, device=device, memory=memory, progressed=hooks.progressed)
    return RankContext(
        engine=engine,
        state=state,
        group=CommandGroup.of_default(watch, section.parallel),
        device=device,
        token_budget=section.token_budget,
        memory=memory,
        recorder=StepRecorder(
            memory, role=hooks.role, rank=rank, folder=run_dir / "profiles", progressed=hooks.progressed
        ),
        peak_flops=peak_flops(name_of(device), DTYPES[options.dtype]),
        progressed=hooks.progressed,
    )


def _meeting_store(rank: int, world_size: int, timeout_s: float) -> Store:
    """The store in which the ranks find each other: torchrun's, or rank 0's at MASTER_ADDR and MASTER_PORT."""
    store: Store = next(rendezvous("env://", rank, world_size, timeout=timedelta(seconds=timeout_s)))[0]
    return store


def require_one_release(store: Store, rank: int) -> None:
    """VersionMismatchError on each rank that was installed from another release than rank 0: they would meet in other
    collectives, and wait for each other.
    """
    mine = contract_version()
    if (first := _of_rank_0(store, rank, "contracts", mine)) != mine:
        raise VersionMismatchError(
            f"rank {rank} was built with contracts {mine}, rank 0 with {first}; install one release on all nodes (from "
            "a checkout: the same commit)"
        )


def require_one_processor(store: Store, rank: int, path: Path) -> None:
    """ConfigError on each rank whose model directory `path` has another image processor than rank 0's, and would make
    other pixels.
    """
    mine = read_processor_digest(path, "this role's model")
    if _of_rank_0(store, rank, "image_processor", mine) != mine:
        raise ConfigError(
            f"rank {rank} makes other pixels or tokens of an image than rank 0: its {path} has another "
            "preprocessor_config.json, processor_config.json or config.json; copy them from rank 0's machine"
        )


def _of_rank_0(store: Store, rank: int, what: str, mine: str) -> str:
    """Returns what rank 0 says of `what`; on rank 0 that is `mine`. Ranks of two releases meet here: names stay as they
    are for good.
    """
    notes = PrefixStore("release", store)
    if rank == 0:
        notes.set(what, mine)
    said: str = notes.get(what).decode()
    return said


def _watch_ranks(hooks: ProcessHooks, rank: int, world_size: int, store: Store, timeout_s: float) -> RankWatch:
    """Starts a watch over the ranks, before the first collective, which may already hang."""
    notes, watch = PrefixStore("rank-watch", store), RankWatch(hooks, rank, world_size)
    if rank == 0:
        notes.set("address", watch.listen(_host_towards(store)))
    else:
        watch.connect(notes.get("address").decode(), timeout_s)
    return watch


def _host_towards(store: Store) -> str:
    """The address of this machine on the network of `store`: where the other ranks, who reach the store, reach this
    one.
    """
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    assert isinstance(store, TCPStore)
    family, kind, _, _, address = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as probe:
        # bounded: a datagram socket sends nothing here
        probe.connect(address)  # sends nothing: asks the kernel for the route
        return str(probe.getsockname()[0])


def _as_torch_counts(devices: tuple[int, ...]) -> tuple[int, ...]:
    """The machine's indices of GPUs as torch numbers them in this process, which may see only some."""
    require_visible(devices, "this role")
    visible = visible_gpus() if devices else None
    return devices if visible is None else tuple(visible.index(device) for device in devices)
