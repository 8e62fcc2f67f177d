"""The arguments that vLLM is started with, and what it makes of them before anything is started. Also the class of
the model, which vLLM is given with them.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from vllm import AsyncEngineArgs
from vllm.config import VllmConfig, WeightTransferConfig
from vllm.model_executor.models import ModelRegistry
from vllm.usage.usage_lib import UsageContext

from rolecall.data.model.files import text_config
from rolecall.errors import ConfigError
from rolecall.settings import LoraSection
from services.rollout.config import RolloutConfig

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Sizes of vLLM's adapter memory; a smaller adapter is padded with zeros."""


def engine_config(arguments: AsyncEngineArgs) -> VllmConfig:
    """Returns the configuration that vLLM makes of its arguments, before anything is started. ConfigError, in one line,
    when it refuses them: it would again at each restart.
    """
    try:
        return arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
    except ValidationError as error:
        said = "; ".join(part["msg"] for part in error.errors())
        raise ConfigError(_refusal(said)) from error
    except ValueError as error:
        raise ConfigError(_refusal(str(error))) from error


def _refusal(said: str) -> str:
    return f"vLLM refuses what rollout and rollout.engine ask of it: {' '.join(said.split())}"


def engine_args(config: RolloutConfig) -> AsyncEngineArgs:
    """Returns the arguments that vLLM is started with."""
    arguments = AsyncEngineArgs(
        model=str(config.model_path),
        skip_tokenizer_init=True,
        generation_config="vllm",
        load_format="dummy",
        dtype=config.dtype,
        hf_overrides={
            **({"head_dtype": "float32"} if config.float32_head else {}),
            **_as_transformers(text_config(config.model_path)),
        },
        max_model_len=config.max_model_tokens,
        max_num_seqs=config.max_num_seqs + config.keeps_cache,  # the probe's place
        max_num_batched_tokens=config.step_tokens,
        tensor_parallel_size=config.tensor_parallel_size,
        pipeline_parallel_size=config.pipeline_parallel_size,
        distributed_executor_backend="uni" if config.in_one_process else "mp",
        kv_cache_memory_bytes=config.kv_cache_bytes,
        gpu_memory_utilization=config.gpu_memory_utilization,
        enforce_eager=config.enforce_eager,
        enable_sleep_mode=config.sleep_mode,
        scheduling_policy="priority",
        scheduler_cls="services.rollout.scheduler.scheduler",
        logprobs_mode="processed_logprobs",
        # With states vLLM keeps its cache another way, which needs prompts that are cut.
        enable_prefix_caching=not config.is_recurrent,
        # Of a prompt cut in two vLLM draws a token too early and takes it back from the request's seeded generator,
        # which CPU generators cannot do.
        enable_chunked_prefill=None if config.devices else False,
        disable_log_stats=True,  # vLLM's own, in its log; UseLog gets them
        weight_transfer_config=WeightTransferConfig(backend="rolecall"),
        worker_extension_cls="services.rollout.vllm.worker.RolloutWorker",
        enable_return_routed_experts=config.mixture is not None,
    )
    if config.image_token_id is not None:
        arguments = replace(arguments, **_for_images(config))
    arguments = replace(arguments, **config.engine, **(_for_adapters(config.lora) if config.lora is not None else {}))
    if config.batch_invariant and not config.devices:
        # No kernel on CPUs is batch-invariant: the batch is one response, whose prompt is computed like any other's.
        return replace(arguments, max_num_seqs=1, enable_prefix_caching=False)
    return arguments


def _as_transformers(text: dict[str, Any]) -> dict[str, Any]:
    """Changes to a model's configuration by which vLLM computes what transformers does, late in a sequence, where no
    probe looks: it lets a window of Cohere's see one token more, and does not read Ministral 3's scale of late queries.
    """
    rope = text.get("rope_parameters") or {}
    if text.get("model_type") in ("cohere2", "cohere2_moe") and text.get("sliding_window"):
        return {"sliding_window": text["sliding_window"] - 1}
    if text.get("model_type") == "ministral3" and rope.get("llama_4_scaling_beta"):
        start = rope["original_max_position_embeddings"]
        return {"llama_4_scaling": {"beta": rope["llama_4_scaling_beta"], "original_max_position_embeddings": start}}
    return {}


def know_the_model(path: Path) -> None:
    """Gives vLLM the class of the model in directory `path`, which this process will hold itself. Else vLLM looks at it
    in a process of its own, which imports torch and all of vLLM once more: ten seconds of a core, wherever its cache is
    new, as in every container.
    """
    for name in json.loads((path / "config.json").read_text()).get("architectures") or ():
        if name in ModelRegistry.models:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())


def _for_images(config: RolloutConfig) -> dict[str, Any]:
    """vLLM's processor of images needs a tokenizer, for texts that it is never given here. Its cache of processed
    images stays off: it has a half in either process, and a pause clears the core's alone. On CPUs a trial of the
    largest image that the model takes would cost minutes at the start, to size a cache that has its size. Pixels are
    scaled in this process: the worker would do it by numbers that its dummy weights are drawn over.
    """
    return {
        "skip_tokenizer_init": False,
        "limit_mm_per_prompt": {"video": 0},
        "mm_processor_cache_gb": 0,
        "mm_device_do_normalize": False,
        "skip_mm_profiling": not config.devices,
    }


def _for_adapters(lora: LoraSection) -> dict[str, Any]:
    """The modules are named, because vLLM would give the head one too, and then fails at the probe: its prompt has more
    logits than the batch has requests.
    """
    return {
        "load_format": "auto",
        "enable_lora": True,
        "max_lora_rank": next(size for size in LORA_RANKS if size >= lora.rank),
        "lora_target_modules": list(lora.target_modules),
    }
