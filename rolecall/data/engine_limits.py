"""The limits of vLLM with a run's model on the devices of its rollouts: said before it dies as it starts, or computes
something else than was asked for.
"""

import importlib.util
from pathlib import Path

from rolecall.data.images.tokens import read_visual_tokens
from rolecall.data.mixture import check_cpu_routing
from rolecall.data.model_files import (
    check_cpu_adapters,
    check_cpu_attention,
    check_cpu_recurrence,
    check_split,
    check_stages,
    has_recurrent_layers,
    text_config,
)
from rolecall.data.shift_plan import check_cpu_sleep
from rolecall.data.vllm_files import check_engine_arguments
from rolecall.errors import ConfigError
from rolecall.settings import RunSettings


def check_engine(settings: RunSettings) -> None:
    """ConfigError when the rollouts' vLLM cannot run the model as the settings ask; reads the model's JSON files."""
    check_engine_arguments(settings.rollout.engine)
    check_split(settings.model.path, settings.rollout.tensor_parallel_size)
    check_stages(settings.model.path, settings.rollout.pipeline_parallel_size)
    _check_images(settings.model.path)
    if settings.rollout.devices:
        _check_gpus(settings)
    else:
        _check_cpus(settings)


def _check_images(path: Path) -> None:
    """ConfigError when vLLM could not start with a model of text and images here."""
    if read_visual_tokens(path) is not None and importlib.util.find_spec("torchvision") is None:
        raise ConfigError(
            f"model.path {path} is a model of text and images, whose processor in vLLM needs torchvision, which is not "
            "installed; install the version that fits torch (docs/images.md says how on CPUs)"
        )


def _check_cpus(settings: RunSettings) -> None:
    path, engine = settings.model.path, settings.rollout.engine
    check_cpu_sleep(settings)
    check_cpu_attention(path, engine.get("block_size"))
    check_cpu_recurrence(path, settings.model.dtype, engine.get("enable_prefix_caching"))
    check_cpu_routing(settings.actor)
    if settings.actor.lora is not None:
        check_cpu_adapters(path)


def _check_gpus(settings: RunSettings) -> None:
    is_recurrent, path = has_recurrent_layers(text_config(settings.model.path)), settings.model.path
    if is_recurrent and settings.actor.router_replay == "r3":
        raise ConfigError(
            f"actor.router_replay r3: model.path {path} has recurrent layers, with which prefixes are not kept, and "
            "vLLM keeps the experts it sampled with beside them; use r2"
        )
    if is_recurrent and settings.run.deterministic:
        raise ConfigError(
            f"run.deterministic: model.path {path} has recurrent layers, for which vLLM has no batch-invariant "
            "kernels; leave it out, or use another model"
        )
    if settings.run.deterministic and settings.model.head_dtype == "float32" and settings.model.dtype != "float32":
        raise ConfigError(
            f"run.deterministic: vLLM multiplies by a float32 head (model.head_dtype) of a {settings.model.dtype} "
            "model with kernels that may depend on the batch; set model.head_dtype to model, or leave it out"
        )
