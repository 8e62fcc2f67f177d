"""The arguments of vLLM's engine that `rollout.engine` may give, and those that it may not.

Owns the reasons of the refusals. Which names vLLM knows is seen where it is installed (rolecall/data/vllm_files.py).
"""

from typing import Annotated, TypeAlias

from pydantic import AfterValidator, JsonValue

_BY_SETTING = {
    "model": "model.path",
    "model_weights": "model.path",
    "hf_config_path": "model.path",
    "dtype": "model.dtype",
    "hf_overrides": "model.head_dtype",
    "seed": "run.seed",
    "max_model_len": "data.max_prompt_tokens and sampling.max_tokens",
    "max_num_seqs": "rollout.max_num_seqs",
    "max_num_active_seqs": "rollout.max_num_seqs",
    "tensor_parallel_size": "rollout.tensor_parallel_size",
    "pipeline_parallel_size": "rollout.pipeline_parallel_size",
    "device_ids": "rollout.devices",
    "kv_cache_memory_bytes": "rollout.kv_cache_bytes",
    "gpu_memory_utilization": "rollout.gpu_memory_utilization",
    "enforce_eager": "rollout.enforce_eager",
    "enable_sleep_mode": "rollout.sleep_mode",
    "enable_lora": "actor.lora",
    "max_lora_rank": "actor.lora",
    "lora_target_modules": "actor.lora",
    "enable_return_routed_experts": "actor.router_replay",
}
"""Arguments that follow from a setting of the run."""

_BECAUSE = {
    "replicas are the data parallelism of a run, each with weights that are attested by themselves; run more of them "
    "(rollout.num_replicas)": ("data_parallel_size",),
    "vLLM's kernels on CPUs compute as if each worker had every expert, so that nothing shows whether experts that lie "
    "on one worker alone are the actor's; split each of them, with rollout.tensor_parallel_size": (
        "enable_expert_parallel",
        "enable_eplb",
    ),
    "a replica takes one rank of the weight channel for each of its tensor x pipeline workers, which are processes of "
    "its machine, and has no others; set rollout.tensor_parallel_size and rollout.pipeline_parallel_size": (
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
        "nnodes",
        "distributed_executor_backend",
    ),
    "the weights come over the weight channel, as the actor holds them": (
        "load_format",
        "quantization",
        "quantization_config",
        "weight_transfer_config",
        "worker_cls",
        "worker_extension_cls",
        "model_class_overrides",
    ),
    "a connector keeps keys and values past a publish and knows no versions, so that new weights would go on from what "
    "the old ones computed": (
        "kv_transfer_config",
        "kv_offloading_size",
        "kv_offloading_backend",
        "ec_transfer_config",
    ),
    "a draft model would keep the weights that it began with, and of tokens that were proposed by any means vLLM tells "
    "wrong logprobs on CPUs, 0 and not a number among them": (
        "speculative_config",
        "spec_method",
        "spec_model",
        "spec_tokens",
    ),
    "the logprobs that are trained on must be those of the distribution that was sampled from": (
        "logprobs_mode",
        "logits_processors",
        "generation_config",
        "override_generation_config",
    ),
    "prompts and responses are token ids here": (
        "tokenizer",
        "tokenizer_mode",
        "tokenizer_revision",
        "skip_tokenizer_init",
    ),
    "images are what the model directory's processor makes of them, for controller and trainers, too; change its "
    "preprocessor_config.json": ("mm_processor_kwargs", "mm_device_do_normalize", "language_model_only"),
    "vLLM would keep processed images in two processes, and a pause clears one of them": (
        "mm_processor_cache_gb",
        "mm_processor_cache_type",
    ),
    "the probe of new weights goes ahead of the requests that a publish has paused": (
        "scheduling_policy",
        "scheduler_cls",
    ),
    "on CPUs a prompt that is cut in two draws its first token twice; bound max_num_batched_tokens on GPUs": (
        "enable_chunked_prefill",
    ),
}
"""Arguments that would break a promise, by the reason."""

REFUSED = {name: f"it follows from {setting}; set that" for name, setting in _BY_SETTING.items()} | {
    name: reason for reason, names in _BECAUSE.items() for name in names
}
"""Why each argument is refused, with the remedy."""


def _none_is_refused(arguments: dict[str, JsonValue]) -> dict[str, JsonValue]:
    for name in arguments:
        if name in REFUSED:
            raise ValueError(f"{name}: {REFUSED[name]}")
    return arguments


EngineArguments: TypeAlias = Annotated[dict[str, JsonValue], AfterValidator(_none_is_refused)]
"""Arguments of vLLM's engine by name, none of which breaks a promise of the run."""
