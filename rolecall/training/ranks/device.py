"""The one place that knows devices: which one a rank computes on, its collectives, threads, cores, seeds and memory.

    spec = RankSpec(rank=0, world_size=1, local_rank=0, devices=(), rendezvous=None, num_threads=2, timeout_s=60.0)
    device = start_rank(spec)

Owns the process-wide settings of torch in a trainer process, and every question that CPUs and GPUs answer differently:
nothing else names a kind of device but the weight channel's NCCL communicator (rolecall/weights/nccl.py) and its memory
on a GPU (rolecall/weights/shared_memory/device_slots.py), which are CUDA's own. Streams and events need no word here:
torch's are of any device.
"""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from rolecall.errors import ConfigError, DeviceFullError, NotOnThisDeviceError

logger = logging.getLogger(__name__)

ROOM_TIMEOUT_S = 5.0
"""Longest wait for memory that a process which has just ended is yet to give back."""
_CPU_IS_FULL = "DefaultCPUAllocator: can't allocate memory"
"""How torch says it of host memory: in a RuntimeError."""
COLLECTIVE_TIMEOUT_S = 300.0
"""Deadline of one collective of the model: more than one microbatch takes, since ranks meet at every layer. Lost ranks
are noticed sooner (watch.py).
"""
FLASH_HEAD_SIZE = 256
"""Widest head of flash attention."""


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
    deterministic: bool = False
    """Whether torch may take only what computes the same bits from the same numbers."""


def start_rank(spec: RankSpec) -> torch.device:
    """Sets threads, picks the device, stays on the cores near it and forms the default process group (Gloo on CPUs,
    NCCL on GPUs). Once per process.

    The calling thread and those it will start keep to these cores: call it in the thread that does the device's work.
    """
    if spec.num_threads is not None:
        torch.set_num_threads(spec.num_threads)
    if spec.deterministic:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # cuBLAS reads it at its first product, torch insists on it
        torch.use_deterministic_algorithms(True)
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # it is a property
    device = pick_device(spec.devices, spec.local_rank)
    stay_near(device)
    if spec.rendezvous is None and spec.world_size > 1:
        raise ConfigError(
            f"a group of {spec.world_size} ranks needs a rendezvous; start the ranks with torchrun or give its address"
        )
    timeout = timedelta(seconds=spec.timeout_s)
    if spec.rendezvous is None:
        dist.init_process_group(backend_of(device), store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)  # type: ignore[attr-defined]
    else:
        dist.init_process_group(
            backend_of(device), init_method=spec.rendezvous, rank=spec.rank, world_size=spec.world_size, timeout=timeout
        )
    return device


def stop_rank() -> None:
    """Leaves the default process group."""
    dist.destroy_process_group()


def pick_device(devices: tuple[int, ...], local_rank: int) -> torch.device:
    """CPU when no GPU is given, else the local rank's. Makes it the calling thread's current device.
    NotOnThisDeviceError when it is not there.
    """
    if not devices:
        return torch.device("cpu")
    if local_rank >= len(devices):
        raise ConfigError(
            f"local rank {local_rank} has no GPU: `devices` lists {len(devices)}; list one per rank of this machine"
        )
    if devices[local_rank] >= torch.cuda.device_count():
        raise NotOnThisDeviceError(
            f"GPU {devices[local_rank]} is not on this machine, which has {torch.cuda.device_count()}; change `devices`"
        )
    device = torch.device("cuda", devices[local_rank])
    use_in_thread(device)
    return device


def use_in_thread(device: torch.device) -> None:
    """Makes `device` the calling thread's. A thread begins with GPU 0: whatever it asked of CUDA would take half a GiB
    there, of each rank.
    """
    if device.type == "cuda":
        torch.cuda.set_device(device)


def backend_of(device: torch.device) -> str:
    """Name of the collectives for tensors on `device`."""
    return "nccl" if device.type == "cuda" else "gloo"


def seed_rank(seed: int, rank: int) -> None:
    """Seeds torch on every device; each rank draws its own numbers."""
    torch.manual_seed(torch_seed(seed, rank))


def torch_seed(seed: int, part: int) -> int:
    """A seed of a run's part `part`, in the 64 bits that torch takes."""
    return (seed * 100_003 + part) % 2**64


def name_of(device: torch.device) -> str | None:
    """The device's name as its driver says it; None for CPUs, which torch does not name."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else None


def attends_packed(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether torch has variable-length flash attention there for tensors of `dtype`, whose heads are no wider than
    FLASH_HEAD_SIZE.
    """
    return device.type == "cuda" and dtype in (torch.float16, torch.bfloat16)


def groups_heads(device: torch.device) -> bool:
    """Whether scaled_dot_product_attention takes fewer key heads than query heads there without a matrix of all scores.

    Not on GPUs: of their kernels flash attention alone groups heads, and it is not what buckets are computed by
    (float32, or wide heads).
    """
    return device.type != "cuda"


def runs_kernels(device: torch.device) -> bool:
    """Whether our own kernels, which are in Triton, run there."""
    return device.type == "cuda"


def float32_product(a_MK: torch.Tensor, b_KN: torch.Tensor) -> torch.Tensor:
    """float32 [M, N]: the product of matrices in half precision, not rounded to it. On GPUs neither matrix is
    copied.
    """
    if a_MK.device.type == "cuda":
        return torch.mm(a_MK, b_KN, out_dtype=torch.float32)
    return a_MK.float() @ b_KN.float()


def add_product_(sum_MN: torch.Tensor, a_MK: torch.Tensor, b_KN: torch.Tensor) -> None:
    """Adds the product of matrices of any float dtype to sum_MN, float32 or double; on GPUs without rounding it to half
    precision in between.
    """
    if a_MK.device.type == "cuda" and a_MK.dtype != sum_MN.dtype:
        torch.addmm(sum_MN, a_MK, b_KN, out_dtype=sum_MN.dtype, out=sum_MN)
    else:
        sum_MN += a_MK @ b_KN


def wait_for(device: torch.device) -> None:
    """Returns when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def mark_of(device: torch.device) -> Callable[[], bool] | None:
    """Whether the device has done what it was given on the current stream so far; None where it has when the call that
    gave it returns.
    """
    return None if device.type == "cpu" else torch.accelerator.current_stream(device).record_event().query


def stay_near(device: torch.device) -> None:
    """Keeps the calling thread, and those it starts, on the cores of the GPU's NUMA node, as far as it may use them.
    CPU ranks stay where they are.

    Without it pinned memory may lie on another socket, and every copy to the GPU crosses between them.
    """
    if device.type != "cuda":
        return
    properties: Any = torch.cuda.get_device_properties(device)
    near = near_cores(
        f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    ) & os.sched_getaffinity(0)
    if near:
        os.sched_setaffinity(0, near)
        logger.info("staying on the %s cores near %s", len(near), device)


def near_cores(pci_address: str, sysfs: Path = Path("/sys")) -> set[int]:
    """Cores of the NUMA node that the PCI device hangs on; empty where the machine does not say, or has one node."""
    node_file = sysfs / "bus" / "pci" / "devices" / pci_address / "numa_node"
    node = int(node_file.read_text()) if node_file.is_file() else -1  # the kernel says -1 where it does not know
    cores_file = sysfs / "devices" / "system" / "node" / f"node{node}" / "cpulist"
    return set(_parse_cores(cores_file.read_text())) if cores_file.is_file() else set()


def _parse_cores(listed: str) -> Iterator[int]:
    """The kernel's list format: "0-3,8,10-11"."""
    for part in listed.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            yield from range(int(first), int(last or first) + 1)


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


def take_peak_bytes(device: torch.device) -> int:
    """Most memory in use since the last call: by tensors on a GPU, else by the whole process (its resident set). 50 to
    100 microseconds.

    Where the kernel does not let a process begin its peak anew (/proc/self/clear_refs), what is in use now.
    """
    if device.type == "cuda":
        torch.cuda.init()  # type: ignore[no-untyped-call]  # nothing the second time; before it there are no counters to begin anew
        peak = torch.cuda.max_memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        return peak
    peak = _resident_bytes("VmHWM")
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return _resident_bytes("VmRSS")
    return peak


def memory_bytes(device: torch.device) -> tuple[int, int]:
    """(in use, in all): of the GPU, by whichever process; or of this process and its machine."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return total - free, total
    return _resident_bytes("VmRSS"), os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def held_bytes(device: torch.device) -> int:
    """Memory in use now, counted as take_peak_bytes counts it."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else _resident_bytes("VmRSS")


def bytes_above(device: torch.device, peak_bytes: int) -> int:
    """Bytes that a rank could take beyond `peak_bytes`, the most that it has (take_peak_bytes), as far as others use
    the device as they do now. Of a host each rank counts its even share.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - peak_bytes
    return _available_bytes() // dist.get_world_size() - (peak_bytes - _resident_bytes("VmRSS"))


def require_room(device: torch.device, num_bytes: int) -> None:
    """DeviceFullError when a GPU has no room for `num_bytes` more, nor gets it within ROOM_TIMEOUT_S. Of a host nothing
    is asked: its memory is paged.
    """
    give_up_at = time.monotonic() + ROOM_TIMEOUT_S
    while device.type == "cuda" and (missing := num_bytes - torch.cuda.mem_get_info(device)[0]) > 0:
        if time.monotonic() > give_up_at:
            raise DeviceFullError(
                f"{device} lacks {missing:,} of the {num_bytes:,} bytes that this role's state takes there, beside "
                "what other roles keep; leave references.<name>.offload out, move references to other devices, set "
                "optimizer.offload, or use a smaller model (`rolecall check` says what each takes)"
            )
        time.sleep(0.1)


def allocator_state(device: torch.device) -> dict[str, Any]:
    """Counters and segments of the GPU's allocator, plain data; empty on CPUs, which have none."""
    if device.type != "cuda":
        return {}
    return {"statistics": dict(torch.cuda.memory_stats(device)), "segments": torch.cuda.memory_snapshot()}  # type: ignore[no-untyped-call]


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that the device or the host has no memory left."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError) and _CPU_IS_FULL in str(error)
    )


def _resident_bytes(field: str) -> int:
    return _kernel_says(Path("/proc/self/status"), field)


def _available_bytes() -> int:
    """Memory of this machine that can be had now, or what its control group leaves of it."""
    cgroup = Path("/sys/fs/cgroup")
    found = [_kernel_says(Path("/proc/meminfo"), "MemAvailable")]
    with suppress(OSError, ValueError):  # no control group of its own, or "max"
        found.append(int((cgroup / "memory.max").read_text()) - int((cgroup / "memory.current").read_text()))
    return min(found)


def _kernel_says(path: Path, field: str) -> int:
    """Bytes, which the kernel writes as kB."""
    lines = path.read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))
