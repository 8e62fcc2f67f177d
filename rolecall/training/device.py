"""The one place that knows devices: which one a rank computes on, its collectives, threads, seeds and memory.

    device = start_rank(RankSpec(rank=0, world_size=1, local_rank=0, devices=(), rendezvous=None, num_threads=2, timeout_s=60.0))

Owns the process-wide settings of torch in a trainer process. Not the weight channel's communicator (rolecall/weights).
"""

from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from rolecall.errors import ConfigError, NotOnThisDeviceError


@dataclass(frozen=True)
class RankSpec:
    """One process of an SPMD group."""

    rank: int
    world_size: int
    local_rank: int
    """Index among the ranks of this machine; picks the entry of `devices`."""
    devices: tuple[int, ...]
    """GPU indices of this machine given to the group; empty: CPU."""
    rendezvous: str | None
    """A torch.distributed init_method ("tcp://host:port", "env://", "file:///path"); None only for a group of one."""
    num_threads: int | None
    """Intra-op threads on CPUs; None leaves torch's own choice."""
    timeout_s: float
    """Deadline of forming the group and of each collective in it."""


def start_rank(spec: RankSpec) -> torch.device:
    """Sets threads, picks the device and forms the default process group (Gloo on CPUs, NCCL on GPUs). Once per process."""
    if spec.num_threads is not None:
        torch.set_num_threads(spec.num_threads)
    device = pick_device(spec.devices, spec.local_rank)
    if spec.rendezvous is None and spec.world_size > 1:
        raise ConfigError(f"a group of {spec.world_size} ranks needs a rendezvous; start the ranks with torchrun or give its address")
    timeout = timedelta(seconds=spec.timeout_s)
    if spec.rendezvous is None:
        dist.init_process_group(backend_of(device), store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)  # type: ignore[attr-defined]
    else:
        dist.init_process_group(backend_of(device), init_method=spec.rendezvous, rank=spec.rank, world_size=spec.world_size, timeout=timeout)
    return device


def stop_rank() -> None:
    """Leaves the default process group."""
    dist.destroy_process_group()


def pick_device(devices: tuple[int, ...], local_rank: int) -> torch.device:
    """CPU when no GPU is given, else the local rank's. Makes it the process's current device. NotOnThisDeviceError when it is not there."""
    if not devices:
        return torch.device("cpu")
    if local_rank >= len(devices):
        raise ConfigError(f"local rank {local_rank} has no GPU: `devices` lists {len(devices)}; list one per rank of this machine")
    if devices[local_rank] >= torch.cuda.device_count():
        raise NotOnThisDeviceError(f"GPU {devices[local_rank]} is not on this machine, which has {torch.cuda.device_count()}; change `devices`")
    device = torch.device("cuda", devices[local_rank])
    torch.cuda.set_device(device)
    return device


def backend_of(device: torch.device) -> str:
    """Name of the collectives for tensors on `device`."""
    return "nccl" if device.type == "cuda" else "gloo"


def seed_rank(seed: int, rank: int) -> None:
    """Seeds torch on every device; each rank draws its own numbers."""
    torch.manual_seed(seed * 100_003 + rank)


def rng_state(device: torch.device) -> dict[str, torch.Tensor]:
    """uint8 tensors by device kind, for a checkpoint."""
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_rng_state(state: dict[str, torch.Tensor], device: torch.device) -> None:
    """Restores rng_state(); a kind that was not saved keeps what it has."""
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def free_cached_memory(device: torch.device) -> None:
    """Gives unused device memory back, so that another process on the device can have it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def peak_memory_bytes(device: torch.device) -> int:
    """Most device memory that tensors took since the start; 0 on CPUs, where torch does not count."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
