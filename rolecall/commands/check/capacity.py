"""Whether the local roles fit this machine: its cores, its memory, its GPUs' memory. Reads /proc, the memory limits of
its control group and nvidia-smi.

Refuses only what cannot be: what is counted is the least that a role needs, without activations, caches and libraries.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from rolecall.commands.check.preflight import NOTE
from rolecall.commands.check.trainers import Trainer, trainers
from rolecall.data.model.cache_sizes import cache_sizes
from rolecall.data.model.engine_limits import engine_tokens
from rolecall.data.model.files import ModelFacts
from rolecall.data.model.parameter_counts import reference_held
from rolecall.data.shift_plan import (
    gpu_memory_bytes,
    plan_shifts,
    received_bytes,
    shares_gpus_here,
    trains_nothing,
)
from rolecall.errors import ConfigError
from rolecall.settings import RunSettings, SftSettings, TrainerSection, require_visible
from rolecall.settings.rollout import CPU_CACHE_BYTES
from rolecall.settings.sizes.loading import model_bytes
from rolecall.terminal import in_bytes

PROCESS_BYTES = 2**28
"""The least memory of a process with torch."""
_ROLLOUT = "rollout"
_CGROUP_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")


@dataclass(frozen=True)
class Need:
    """The least memory that one process needs where it computes."""

    who: str
    num_bytes: float
    devices: tuple[int, ...]
    """The GPU it computes on; empty: CPUs."""
    lighter: str = ""
    """Settings by which it would need less, with a comma after each."""


def host_memory_bytes(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """Memory of this machine, or what its control group leaves of it."""
    total = next(line for line in (proc / "meminfo").read_text().splitlines() if line.startswith("MemTotal:"))
    limits = [int(total.split()[1]) * 1024]
    for name in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # another kind of control groups, or "max"
            limits.append(int((cgroup / name).read_text()))
    return min(limits)


def require_gpus(name: str, devices: Sequence[int], num_ranks: int) -> None:
    """ConfigError when the GPUs `devices` of `name` are not one for each of its ranks, or not all on this machine."""
    if devices and len(devices) != num_ranks:
        raise ConfigError(f"{name} has {len(devices)} GPUs for {num_ranks} ranks; give one each")
    require_visible(devices, name)
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))
    if any(device >= present for device in devices):
        raise ConfigError(f"{name} names GPU {max(devices)}; this machine has {present}")


def check_capacity(settings: RunSettings | SftSettings, facts: ModelFacts) -> Iterator[str]:
    """ConfigError with figures when the local roles, or the ranks of a fine-tuning, cannot fit; a line for what they
    have.
    """
    host, gpus, num_cores = host_memory_bytes(), gpu_memory_bytes(), len(os.sched_getaffinity(0))
    if isinstance(settings, RunSettings):
        yield from _rollouts_on_cpus(settings, num_cores)
    needs = _trainer_needs(settings, facts)
    needs += _other_needs(settings, facts) if isinstance(settings, RunSettings) else []
    _check_host(needs, host)
    # of them all: CUDA may number GPUs of several kinds otherwise than nvidia-smi
    largest = max(gpus.values(), default=0)
    for need in needs:
        if gpus and need.devices and need.num_bytes > largest:
            raise ConfigError(
                f"{need.who} needs at least {in_bytes(need.num_bytes)} on GPU {need.devices[0]}, and no GPU of this "
                f"machine has more than {in_bytes(largest)}; use more GPUs for it, {need.lighter}or a smaller model or "
                "dtype"
            )
    if isinstance(settings, RunSettings):
        if settings.takes_shifts and settings.actor.devices:
            plan_shifts(settings, facts, gpus if shares_gpus_here(settings) else {}).require_room()
        _check_store(settings, host)
    named = ", ".join(f"GPU {device} {in_bytes(num_bytes)}" for device, num_bytes in gpus.items())
    yield f"machine: {num_cores} cores, {in_bytes(host)} of memory" + (f", {named}" if named else "")


def _rollouts_on_cpus(settings: RunSettings, num_cores: int) -> Iterator[str]:
    """A note where rollouts take turns. ConfigError where a worker of one would have no core of its own."""
    rollout = settings.rollout
    if rollout.devices:
        return
    if rollout.workers_per_replica > num_cores:
        raise ConfigError(
            f"rollout.tensor_parallel_size {rollout.tensor_parallel_size} x pipeline_parallel_size "
            f"{rollout.pipeline_parallel_size}: each worker of a replica needs a core of its own, and this machine has "
            f"{num_cores}; lower one of them"
        )
    if rollout.num_replicas * rollout.workers_per_replica > num_cores:
        yield (
            f"{NOTE} rollout.num_replicas {rollout.num_replicas}: they take turns on the {num_cores} cores of "
            "this machine"
        )


def _check_store(settings: RunSettings, host: int) -> None:
    is_derived = any(size.setting == "store.max_bytes" for size in settings.derived_sizes)
    if settings.store.url is None and settings.store.max_bytes > host and not is_derived:
        raise ConfigError(
            f"store.max_bytes {in_bytes(settings.store.max_bytes)} exceeds the {in_bytes(host)} of this machine; "
            "lower it, or set store.url"
        )


def check_cache(settings: RunSettings) -> None:
    """ConfigError when a rollout's cache could not hold one response, as vLLM says once it has loaded the model."""
    rollout = settings.rollout
    sizes = cache_sizes(settings.model.path, rollout, 4 if settings.model.dtype == "float32" else 2)
    if rollout.cache_bytes is None or sizes is None:
        return
    num_tokens = engine_tokens(settings)
    least = sizes.response_bytes(num_tokens)
    if rollout.cache_bytes < least:
        default = " (its default on CPUs)" if rollout.kv_cache_bytes is None else ""
        raise ConfigError(
            f"rollout.kv_cache_bytes {rollout.cache_bytes}{default}: keys and values of a prompt and a response, up to "
            f"{num_tokens} tokens, take {least} bytes on each worker; raise it, or lower data.max_prompt_tokens or "
            "max_tokens"
        )


def _check_host(needs: list[Need], host: int) -> None:
    least: dict[str, float] = {}
    for need in needs:
        if not need.devices:
            least[need.who] = least.get(need.who, 0.0) + need.num_bytes
    if sum(least.values()) > host:
        parts = ", ".join(
            f"{who} {in_bytes(num_bytes)}" for who, num_bytes in sorted(least.items(), key=lambda item: -item[1])
        )
        lower = "lower rollout.kv_cache_bytes or rollout.num_replicas, " if _ROLLOUT in least else ""
        raise ConfigError(
            f"the roles on CPUs need at least {in_bytes(sum(least.values()))} of memory, and this machine has "
            f"{in_bytes(host)}: {parts}; {lower}use a smaller model, or place roles on GPUs or other machines"
        )


def _trainer_needs(settings: RunSettings | SftSettings, facts: ModelFacts) -> list[Need]:
    steps = not trains_nothing(settings)
    return [
        need
        for trainer in trainers(settings, facts)
        if trainer.section.address is None
        for need in _ranks(trainer.role, trainer.section, trainer.least_bytes(steps=steps), _lighter(trainer))
    ]


def _other_needs(settings: RunSettings, facts: ModelFacts) -> list[Need]:
    size = 4 if settings.model.dtype == "float32" else 2
    weights = facts.num_parameters * size
    received = received_bytes(settings, facts)
    needs: list[Need] = []
    for name, section in settings.references.items():
        if section.address is None:
            needs += _ranks(f"reference {name}", section, reference_held(settings, name, facts) * size)
    for name, server in settings.reward.servers.items():
        if server.address is None:
            beside = 0 if server.gpus else PROCESS_BYTES + (CPU_CACHE_BYTES if server.served is None else 0)
            need = model_bytes(server.path) / server.num_workers + beside
            needs += [Need(f"server {name}", need, server.gpus[i : i + 1]) for i in range(server.num_workers)]
    rollout = settings.rollout
    cache = rollout.cache_bytes or 0
    for i in range(rollout.num_replicas):
        for rank in range(rollout.workers_per_replica):
            device = rollout.devices[i][rank : rank + 1] if rollout.devices else ()
            needs.append(
                Need(
                    _ROLLOUT,
                    weights / rollout.workers_per_replica + cache + (received if device else PROCESS_BYTES),
                    device,
                    "a lower rollout.kv_cache_bytes, " if rollout.kv_cache_bytes else "",
                )
            )
    return needs


def _lighter(trainer: Trainer) -> str:
    """Names the settings by which a trainer needs less of a GPU, with a comma after each."""
    offload = trainer.actor.backend == "fsdp" and not trainer.optimizer.offload
    adapters = trainer.lora is None
    return (f"{trainer.role}.optimizer.offload, " if offload else "") + (f"{trainer.role}.lora, " if adapters else "")


def _ranks(who: str, section: TrainerSection, per_rank: float, lighter: str = "") -> list[Need]:
    devices: list[tuple[int, ...]] = [(device,) for device in section.devices] or [()] * section.num_ranks
    return [Need(who, per_rank + (0 if device else PROCESS_BYTES), device, lighter) for device in devices]
