"""The configuration of a rollout replica, derived from the run's settings: its index, its cores or GPUs, its sizes, and
the environment vLLM must start in.

Owns `start_environment`, the one place that says which environment variables the process and its children see before
vLLM is imported. It reads the model's JSON files only: no torch, no vLLM.
"""

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall.data.images.tokens import read_visual_tokens
from rolecall.data.model.adapters import with_modules
from rolecall.data.model.engine_limits import check_engine, engine_tokens
from rolecall.data.model.files import eos_token_ids, has_recurrent_layers, read_model, text_config
from rolecall.data.model.mixture import Mixture, read_mixture
from rolecall.data.shift_plan import gpu_memory_bytes, plan_shifts
from rolecall.errors import ConfigError
from rolecall.settings import LoraSection, RunSettings, WeightsSection, require_visible
from rolecall.store.connection import CALL_DEADLINE_S


@dataclass(frozen=True)
class RolloutConfig:
    """The configuration of one replica, built by `configure`."""

    model_path: Path
    dtype: str
    float32_head: bool
    """Whether logits are computed in float32 whatever `dtype` is."""
    max_model_tokens: int
    """Longest prompt + response."""
    eos_token_ids: tuple[int, ...]
    """The model's own, from generation_config.json and config.json."""
    max_num_seqs: int
    step_tokens: int
    """Most tokens that the engine computes in one step."""
    max_groups: int
    """Most groups claimed at a time."""
    devices: tuple[int, ...]
    """GPUs; empty: CPUs."""
    cores: tuple[tuple[int, ...], ...]
    """CPU cores of each worker; empty on GPUs."""
    tensor_parallel_size: int
    pipeline_parallel_size: int
    num_workers: int
    """Workers of the engine, in all stages together."""
    keeps_cache: bool
    """Whether requests in flight hold their places over a publish (rollout.pause_mode keep_cache)."""
    kv_cache_bytes: int | None
    """Absent: vLLM takes gpu_memory_utilization."""
    gpu_memory_utilization: float
    enforce_eager: bool
    sleep_mode: bool
    """Whether Sleep can free the GPU's memory."""
    batch_invariant: bool
    """Whether a response may not depend on what is computed beside it, to the last bit (run.deterministic)."""
    engine: Mapping[str, Any]
    """Further arguments of vLLM's engine."""
    in_one_process: bool
    """Whether vLLM's one worker lives in its scheduler's process: a third less CPU time at the start, fewer hops per
    token.
    """
    lora: LoraSection | None
    """The adapters that the actor publishes; None: it publishes whole models."""
    is_recurrent: bool
    """Whether layers of the model hand a state from token to token."""
    image_token_id: int | None
    """The placeholder of images in prompts; None: the model sees none."""
    mixture: Mixture | None
    """The experts of the model, where each sample says which its tokens were sent to (actor.router_replay r3)."""


def configure(settings: RunSettings, worker: str, machine_cores: Sequence[int]) -> RolloutConfig:
    """The replica called `worker` ("rollout-1" is index 1) on a machine with these cores. ConfigError says what does
    not fit.
    """
    section, index = settings.rollout, replica_index(worker)
    devices = _devices(settings, index)
    path = settings.model.path
    check_engine(settings)
    visual_tokens = read_visual_tokens(path)
    longest = engine_tokens(settings)
    return RolloutConfig(
        model_path=path,
        dtype=settings.model.dtype,
        float32_head=settings.model.head_dtype == "float32",
        max_model_tokens=longest,
        eos_token_ids=eos_token_ids(path),
        max_num_seqs=section.max_num_seqs,
        step_tokens=section.step_tokens(longest),
        max_groups=section.max_groups or max(1, section.max_num_seqs // settings.responses_per_group),
        devices=devices,
        cores=() if devices else _cores(settings, index, machine_cores),
        tensor_parallel_size=section.tensor_parallel_size,
        pipeline_parallel_size=section.pipeline_parallel_size,
        num_workers=section.workers_per_replica,
        keeps_cache=section.pause_mode == "keep_cache",
        kv_cache_bytes=section.cache_bytes,
        gpu_memory_utilization=_share(settings) if devices else section.gpu_memory_utilization,
        enforce_eager=(not devices) if section.enforce_eager is None else section.enforce_eager,
        sleep_mode=settings.takes_shifts,
        batch_invariant=settings.run.deterministic,
        engine=section.engine,
        in_one_process=section.workers_per_replica == 1,
        lora=None if settings.published_adapters is None else with_modules(settings.published_adapters, path),
        is_recurrent=has_recurrent_layers(text_config(path)),
        image_token_id=None if visual_tokens is None else visual_tokens.token_id,
        mixture=read_mixture(path) if settings.actor.router_replay == "r3" else None,
    )


def keep_timeout_s(weights: WeightsSection) -> float:
    """Seconds that requests are kept for a version that nobody attests: longer than a publish may still take when this
    replica has loaded, whoever else is late, and than the next attempt takes to begin when the channel broke under it.

    One bucket's deadline for the last buckets of the others, one for their loads and probes, one call of the store that
    attests, and one more deadline for Resume.
    """
    return 3 * weights.bucket_timeout_s + CALL_DEADLINE_S


def start_environment(config: RolloutConfig) -> dict[str, str]:
    """Environment of this process and its children, to be set before vLLM or torch is imported. ConfigError for a
    GPU that the caller's hides.
    """
    common = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        # Children are spawned, but for the scheduler on CPUs (vllm/core_process.py): one that imports the main module
        # is tied to its parent by it.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if config.devices:
        require_visible(config.devices, "rollout.devices")
        invariant = {"VLLM_BATCH_INVARIANT": "1"} if config.batch_invariant else {}
        # Triton, in whose kernels vLLM attends in float32, would cut factors to TF32: the probe sees 3e-3 in logprobs.
        exact = {"TRITON_F32_DEFAULT": "ieee"} if config.dtype == "float32" else {}
        return {
            **common,
            **invariant,
            **exact,
            "CUDA_VISIBLE_DEVICES": ",".join(map(str, config.devices)),
            # It draws neither for a seed nor greedily, as all requests here are: it would be imported for nothing.
            "VLLM_USE_FLASHINFER_SAMPLER": "0",
        }
    # vLLM's "auto" knows nothing of a second engine on the machine and would give both the same cores.
    lists = [",".join(map(str, cores)) for cores in config.cores]
    on_cpus = {
        **common,
        "CUDA_VISIBLE_DEVICES": "",
        "VLLM_CPU_OMP_THREADS_BIND": "|".join(lists),
        "OMP_NUM_THREADS": str(len(config.cores[0])),
        # Idle threads sleep: the trainer shares these cores and takes turns with the engine.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    if config.enforce_eager:
        # vLLM's sampler would compile a count of logits at its first token, which takes a C++ compiler on the machine.
        on_cpus["TORCHDYNAMO_DISABLE"] = "1"
    if config.in_one_process:
        # vLLM binds only workers that are processes of their own; here OpenMP is told directly, with the same effect.
        on_cpus |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_PLACES": f"{{{lists[0]}}}", "OMP_PROC_BIND": "true"}
    return on_cpus


def replica_index(worker: str) -> int:
    """1 for "rollout-1"; 0 for a name that no launcher gave, of a replica that is alone on its machine."""
    match = re.fullmatch(r"rollout-(\d{1,4})", worker)
    return int(match[1]) if match else 0


def machine_cores() -> tuple[int, ...]:
    """Cores this process may run on, in order."""
    return tuple(sorted(os.sched_getaffinity(0)))


def _devices(settings: RunSettings, index: int) -> tuple[int, ...]:
    if not settings.rollout.devices:
        return ()
    if index >= len(settings.rollout.devices):
        raise ConfigError(
            f"rollout.devices names {len(settings.rollout.devices)} replicas; there is no entry for replica {index}"
        )
    devices = settings.rollout.devices[index]
    if len(devices) != settings.rollout.workers_per_replica:
        raise ConfigError(
            f"rollout.devices[{index}] names {len(devices)} GPUs, rollout.tensor_parallel_size x "
            f"pipeline_parallel_size is {settings.rollout.workers_per_replica}; they must agree"
        )
    return devices


def _share(settings: RunSettings) -> float:
    """rollout.gpu_memory_utilization, or what other roles leave of a GPU that they share. ConfigError when that is too
    little.
    """
    if not settings.takes_shifts:
        return settings.rollout.gpu_memory_utilization
    plan = plan_shifts(settings, read_model(settings.model.path), gpu_memory_bytes())
    plan.require_room()
    return plan.configured if plan.share is None else plan.share


def _cores(settings: RunSettings, index: int, machine: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """A slice of the machine's cores for each worker. Replicas overlap only when there are fewer cores than they ask
    for.
    """
    section = settings.rollout
    num_replicas = max(section.num_replicas, 1)
    per_replica = max(1, len(machine) // num_replicas)
    num_workers = section.workers_per_replica
    per_worker = max(1, per_replica // num_workers)
    first = index * per_worker * num_workers
    taken = [machine[(first + i) % len(machine)] for i in range(per_worker * num_workers)]
    return tuple(tuple(sorted(set(taken[rank * per_worker : (rank + 1) * per_worker]))) for rank in range(num_workers))
