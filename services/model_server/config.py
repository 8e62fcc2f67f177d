"""The configuration of a model server, derived from the run's settings: what vLLM's server is started with, and the
environment that it must start in. No torch, no vLLM.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rolecall.errors import ConfigError
from rolecall.settings import ExternalScorer, RunSettings, require_visible
from rolecall.settings.rollout import CPU_CACHE_BYTES


@dataclass(frozen=True)
class ServerConfig:
    """The configuration of one server, built by `configure`."""

    name: str
    model: Path
    model_names: tuple[str, ...]
    """Names that requests may have for the model: the server's own, and those of the rubrics that ask it."""
    host: str
    port: int
    devices: tuple[int, ...]
    """GPUs; empty: CPUs."""
    num_workers: int
    engine: dict[str, Any]
    """Arguments of vLLM's engine."""


def configure(settings: RunSettings, name: str) -> ServerConfig:
    """Returns the configuration of the server called `name`. ConfigError when there is none, or it has no place."""
    section = settings.reward.servers.get(name)
    if section is None:
        raise ConfigError(
            f"there is no reward.servers.{name}; --name takes one of {', '.join(sorted(settings.reward.servers))}"
        )
    if section.model is None:
        raise ConfigError(f"reward.servers.{name} is a reward model; `rolecall serve reward-model` starts it")
    bind = section.bind or section.address
    if bind is None:
        raise ConfigError(f"reward.servers.{name} has no bind: say with it where a server that you start is to listen")
    scorers = [component.scorer for component in settings.reward.components.values()]
    rubrics = [each.asked for each in scorers if isinstance(each, ExternalScorer) and each.server == name]
    host, _, port = bind.rpartition(":")
    on_cpus = {} if section.devices else {"enforce_eager": True, "kv_cache_memory_bytes": CPU_CACHE_BYTES}
    return ServerConfig(
        name=name,
        model=section.model,
        model_names=tuple(dict.fromkeys([name, *(rubric.model for rubric in rubrics if rubric.model)])),
        host=host.strip("[]"),
        port=int(port),
        devices=section.devices,
        num_workers=section.tensor_parallel_size,
        engine={
            **on_cpus,
            "tensor_parallel_size": section.tensor_parallel_size,
            "gpu_memory_utilization": section.gpu_memory_utilization,
            **section.engine,
        },
    )


def start_environment(config: ServerConfig) -> dict[str, str]:
    """Environment of this process and its children, to be set before vLLM or torch is imported. ConfigError for a GPU
    that the caller's hides.
    """
    common = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "VLLM_HOST_IP": "127.0.0.1",  # where its own processes meet
        # Children must be spawned: a child that imports the main module is tied to its parent by it.
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, config.devices)),
    }
    if config.devices:
        require_visible(config.devices, f"reward.servers.{config.name}.devices")
        return common
    num_threads = max(1, len(os.sched_getaffinity(0)) // config.num_workers)
    on_cpus = {
        **common,
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # it knows nothing of the roles beside it and would take their cores
        "OMP_NUM_THREADS": str(num_threads),
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    if config.engine["enforce_eager"]:
        # vLLM's sampler would compile a count of logits at its first token, which takes a C++ compiler on the machine.
        on_cpus["TORCHDYNAMO_DISABLE"] = "1"
    return on_cpus
