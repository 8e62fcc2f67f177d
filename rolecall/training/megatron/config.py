"""Megatron's configuration of a model."""

from typing import Any

import torch
from megatron.core.transformer import TransformerConfig
from torch.nn.functional import silu
from transformers import PretrainedConfig

from rolecall.training.model.packed_model import PackedModel
from rolecall.training.options import DTYPES, EngineOptions


def transformer_config(model: PackedModel, options: EngineOptions) -> TransformerConfig:
    """Megatron's configuration of `model`, whose limits were looked at (data/megatron_limits.py)."""
    hf, parallel, section = model.hf.config, options.parallel, options.megatron
    dtype = DTYPES[options.dtype]
    recompute: dict[str, Any] = {}
    if options.gradient_checkpointing:
        recompute = (
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
            if section.recompute == "layers"
            else {"recompute_granularity": "selective"}
        )
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        add_qkv_bias=hf.model_type == "qwen2",
        qk_layernorm=hf.model_type.startswith("qwen3"),
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        perform_initialization=False,
        tensor_model_parallel_size=parallel.tensor,
        sequence_parallel=parallel.tensor > 1 and section.sequence_parallel,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=section.virtual_stages if section.virtual_stages > 1 else None,
        context_parallel_size=parallel.sequence,
        expert_model_parallel_size=parallel.expert,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        variable_seq_lengths=True,
        # batched sends give wrong gradients, silently, where a rank has several stages
        batch_p2p_comm=section.virtual_stages == 1,
        overlap_p2p_comm=section.virtual_stages > 1,
        # losses hold global counts: nothing is to be divided by anything
        calculate_per_token_loss=True,
        moe_token_dispatcher_type="alltoall",  # the one that takes microbatches of any length
        **recompute,
        **_mixture(hf),
    )


def _mixture(hf: PretrainedConfig) -> dict[str, Any]:
    if not num_experts(hf):
        return {}
    return {
        "num_moe_experts": num_experts(hf),
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_ffn_hidden_size": hf.moe_intermediate_size,
        "moe_router_pre_softmax": not hf.norm_topk_prob,
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": False,
        "expert_tensor_parallel_size": 1,
    }


def num_experts(config: PretrainedConfig) -> int:
    """The experts of a layer; 0 in a dense model."""
    found: int | None = getattr(config, "num_experts", None)
    return found or 0
