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
from rolecall.data.engine_limits import num_cached_per_token
from rolecall.data.megatron.stages import rank_parameters
from rolecall.data.model_files import ModelFacts, max_model_tokens
from rolecall.data.parameter_counts import ParameterCounts, actor_parameters, critic_parameters, reference_held
from rolecall.data.shift_plan import gpu_memory_bytes, plan_shifts, received_bytes, trains_nothing
from rolecall.errors import ConfigError
from rolecall.settings import OptimizerSection, RunSettings, TrainerSection, require_visible
from rolecall.settings.deadlines import model_bytes
from rolecall.settings.services import CPU_CACHE_BYTES

PROCESS_BYTES = 2**28
"""The least memory of a process with torch."""
_CGROUP_LIMITS = ("memory.max", "memory/memory.limit_in_bytes")


LEAST_MOMENT_BYTES = {"adamw": 8, "muon": 4}
"""Bytes of a parameter's moments, at least, by the kind of the optimizer."""


@dataclass(frozen=True)
class Need:
    """The least memory that one process needs where it computes."""

    who: str
    num_bytes: float
    devices: tuple[int, ...]
    """The GPU it computes on; empty: CPUs."""
    lighter: str = ""
    """A setting by which it would need less, and a comma."""


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


def check_capacity(settings: RunSettings, facts: ModelFacts) -> Iterator[str]:
    """ConfigError with figures when the local roles cannot fit; a line for what they have."""
    host, gpus, num_cores = host_memory_bytes(), gpu_memory_bytes(), len(os.sched_getaffinity(0))
    rollout = settings.rollout
    if not rollout.devices and rollout.workers_per_replica > num_cores:
        raise ConfigError(
            f"rollout.tensor_parallel_size {rollout.tensor_parallel_size} x pipeline_parallel_size "
            f"{rollout.pipeline_parallel_size}: each worker of a replica needs a core of its own, and this machine has "
            f"{num_cores}; lower one of them"
        )
    needs = _needs(settings, facts)
    _check_host(needs, host)
    # of them all: CUDA may number GPUs of several kinds otherwise than nvidia-smi
    largest = max(gpus.values(), default=0)
    for need in needs:
        if gpus and need.devices and need.num_bytes > largest:
            raise ConfigError(
                f"{need.who} needs at least {in_bytes(need.num_bytes)} on GPU {need.devices[0]}, and no GPU of this "
                f"machine has more than {in_bytes(largest)}; "
                f"use more GPUs for it, {need.lighter}a smaller model or dtype, or lower rollout.kv_cache_bytes"
            )
    if settings.takes_shifts and settings.actor.devices:
        plan_shifts(settings, facts, gpus).require_room()
    is_derived = any(size.setting == "store.max_bytes" for size in settings.derived_sizes)
    if settings.store.url is None and settings.store.max_bytes > host and not is_derived:
        raise ConfigError(
            f"store.max_bytes {in_bytes(settings.store.max_bytes)} exceeds the {in_bytes(host)} of this machine; "
            "lower it, or set store.url"
        )
    named = ", ".join(f"GPU {device} {in_bytes(num_bytes)}" for device, num_bytes in gpus.items())
    if not rollout.devices and rollout.num_replicas * rollout.workers_per_replica > num_cores:
        yield (
            f"{NOTE} rollout.num_replicas {rollout.num_replicas}: they take turns on the {num_cores} cores of "
            "this machine"
        )
    yield f"machine: {num_cores} cores, {in_bytes(host)} of memory" + (f", {named}" if named else "")


def check_cache(settings: RunSettings) -> None:
    """ConfigError when a rollout's cache could not hold one response, as vLLM says once it has loaded the model."""
    rollout, path = settings.rollout, settings.model.path
    if rollout.cache_bytes is None or "kv_cache_dtype" in rollout.engine:
        return
    num_tokens = min(max_model_tokens(path), settings.longest_trajectory)
    cached = num_cached_per_token(path, rollout.tensor_parallel_size, rollout.pipeline_parallel_size)
    least = num_tokens * cached * (4 if settings.model.dtype == "float32" else 2)
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
        raise ConfigError(
            f"the roles on CPUs need at least {in_bytes(sum(least.values()))} of memory, and this machine has "
            f"{in_bytes(host)}: {parts}; lower "
            "rollout.kv_cache_bytes or rollout.num_replicas, use a smaller model, or place roles on GPUs or other "
            "machines"
        )


def _needs(settings: RunSettings, facts: ModelFacts) -> list[Need]:
    size = 4 if settings.model.dtype == "float32" else 2
    weights = facts.num_parameters * size
    received = received_bytes(settings, facts)
    needs: list[Need] = []
    if settings.actor.address is None:
        counts = actor_parameters(settings, facts)
        acting = _trained_bytes(settings, settings.actor, settings.actor.optimizer, counts, "model.path", None)
        needs += _ranks("actor", settings.actor, acting, _lighter(settings, settings.actor.optimizer, "actor"))
    if settings.critic is not None and settings.critic.address is None and (own := settings.critic_optimizer):
        counts, path = critic_parameters(settings, facts), settings.critic.path
        valuing = _trained_bytes(settings, settings.critic, own, counts, "critic.path", path)
        needs += _ranks("critic", settings.critic, valuing, _lighter(settings, own, "critic"))
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
                    "rollout",
                    weights / rollout.workers_per_replica + cache + (received if device else PROCESS_BYTES),
                    device,
                )
            )
    return needs


def _lighter(settings: RunSettings, optimizer: OptimizerSection, role: str) -> str:
    return f"{role}.optimizer.offload, " if settings.actor.backend == "fsdp" and not optimizer.offload else ""


def _ranks(who: str, section: TrainerSection, per_rank: float, lighter: str = "") -> list[Need]:
    devices: list[tuple[int, ...]] = [(device,) for device in section.devices] or [()] * section.num_ranks
    return [Need(who, per_rank + (0 if device else PROCESS_BYTES), device, lighter) for device in devices]


def _trained_bytes(
    settings: RunSettings,
    section: TrainerSection,
    optimizer: OptimizerSection,
    counts: ParameterCounts,
    setting: str,
    path: Path | None,
) -> float:
    """The least bytes on a rank, over Megatron-Core on the fullest: of a base in model.dtype and of float32 weights,
    gradients and moments. Muon has half as many moments at the least, and where they live in host memory a step has
    some of them at a time.
    """
    size = 4 if settings.model.dtype == "float32" else 2
    if settings.actor.backend == "megatron":
        fullest = rank_parameters(path or settings.model.path, section, settings.actor.megatron, setting)
        return fullest.trained_bytes(size)
    num_moments = counts.at_a_time if optimizer.offload else counts.trained
    moments = num_moments * LEAST_MOMENT_BYTES[optimizer.kind]
    trained = counts.trained * 4 if trains_nothing(settings) else counts.trained * 8 + moments
    return (counts.frozen * size + trained) / section.num_shards


def in_bytes(num_bytes: float) -> str:
    """`num_bytes` for people."""
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**30 else f"{num_bytes / 2**20:,.1f} MiB"
