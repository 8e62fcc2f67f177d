"""Checks of the trainers by their back end: the dtypes, layouts and adapters that each has."""

from typing import TYPE_CHECKING

from rolecall.settings.data import Dtype

if TYPE_CHECKING:
    from rolecall.settings.trainers import ActorSection, LayoutSection, LoraSection

_GATE = "shared_expert_gate"
"""Name of the matrix by which Qwen2-MoE weighs the expert that all tokens go to."""


def check_dtype(actor: "ActorSection", dtype: Dtype) -> None:
    """Raises ValueError when the back end does not train a model in `dtype`."""
    if actor.backend == "megatron" and dtype == "float16":
        raise ValueError(
            "model.dtype float16 is not there with actor.backend megatron; set bfloat16, or use backend fsdp"
        )


def check_adapters(actor: "ActorSection", lora: "LoraSection | None", parallel: "LayoutSection", setting: str) -> None:
    """Raises ValueError when the back end does not split matrices with adapters, or gives experts none. `setting` names
    `parallel`.
    """
    if lora is not None and lora.experts and actor.backend == "megatron":
        raise ValueError(
            f"{setting.removesuffix('parallel')}lora.experts is not there with actor.backend megatron; leave it out, "
            "or use backend fsdp"
        )
    if lora is not None and _GATE in lora.target_modules and actor.backend == "megatron":
        raise ValueError(
            f"{setting.removesuffix('parallel')}lora.target_modules: {_GATE} gets no adapter with actor.backend "
            "megatron; leave it out, or use backend fsdp"
        )
    if lora is not None and lora.experts and actor.activation_offload and not actor.gradient_checkpointing:
        raise ValueError(
            f"{setting.removesuffix('parallel')}lora.experts: actor.activation_offload would move the experts of every "
            "layer to the host and back; set actor.gradient_checkpointing, too, or leave it out"
        )
    if lora is not None and parallel.tensor > 1 and actor.backend == "fsdp":
        raise ValueError(
            f"{setting}.tensor: matrices with adapters (lora) are not split over ranks; leave it at 1 and raise "
            "num_ranks, which shards them, or use backend megatron"
        )


def check_backend(actor: "ActorSection", parallel: "LayoutSection", setting: str) -> None:
    """Raises ValueError when the back end has no such layout. `setting` names `parallel`."""
    if actor.torch_compile and parallel.tensor > 1:
        raise ValueError(
            f"{setting}.tensor: matrices that are split over ranks are not compiled (actor.torch_compile); leave it at "
            "1, or do not compile"
        )
    if actor.backend == "fsdp" and (parallel.pipeline > 1 or parallel.expert > 1):
        raise ValueError(
            f"{setting}: pipeline and expert are there with actor.backend megatron only; leave them at 1, or use it"
        )
    if actor.backend == "megatron" and parallel.replicate > 1:
        raise ValueError(
            f"{setting}.replicate is not there with actor.backend megatron; leave it at 1: num_ranks may be any "
            "multiple of a slot"
        )
    if actor.backend == "megatron" and actor.megatron.virtual_stages > 1 and parallel.pipeline == 1:
        raise ValueError(
            f"actor.megatron.virtual_stages is {actor.megatron.virtual_stages}, and {setting}.pipeline 1; virtual "
            "stages are of a pipeline: leave them at 1, or set pipeline"
        )
