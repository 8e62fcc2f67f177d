"""Megatron's configuration of a model."""

from typing import Any

import torch
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from torch.nn.functional import silu
from transformers import PretrainedConfig

from rolecall.data.megatron.limits import BY_SIGMOID, has_normalized_weights, shared_experts_width
from rolecall.data.megatron.stages import split_layers
from rolecall.data.model.files import num_experts
from rolecall.training.model.lora import checkpoint_name
from rolecall.training.model.packed_model import PackedModel, layers
from rolecall.training.options import DTYPES, EngineOptions


def transformer_config(model: PackedModel, options: EngineOptions) -> TransformerConfig:
    """Megatron's configuration of `model`, whose limits were looked at (data/megatron/limits.py)."""
    hf, parallel, section = model.hf.config, options.parallel, options.megatron
    dtype = DTYPES[options.dtype]
    recompute: dict[str, Any] = {}
    if options.gradient_checkpointing:
        recompute = (
            {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
            if section.recompute == "layers"
            else {"recompute_granularity": "selective"}
        )
    blocks = [{checkpoint_name(name) for name, _ in layer.named_parameters()} for layer in layers(model)]
    is_latent = bool(getattr(hf, "kv_lora_rank", None))
    head_dim = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    return (MLATransformerConfig if is_latent else TransformerConfig)(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        ffn_hidden_size=hf.intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=head_dim,
        # yarn makes queries and keys longer, by the same factor each
        softmax_scale=None if is_latent else rotary(model).attention_scaling ** 2 / head_dim**0.5,
        **(_latent(hf) if is_latent else {}),
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=silu,
        add_bias_linear=False,
        add_qkv_bias="self_attn.q_proj.bias" in blocks[0],
        qk_layernorm="self_attn.q_norm.weight" in blocks[0],
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
        pipeline_model_parallel_layout=_stages(options),
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
        **_mixture(hf, [int("mlp.gate.weight" in block) for block in blocks]),
    )


def rotary(model: PackedModel) -> Any:
    """Returns a module of transformers' that knows the model's rotary positions; not on the meta device."""
    return type(model.hf.base_model.rotary_emb)(model.hf.config)


def _stages(options: EngineOptions) -> list[list[str]]:
    """Megatron's words for the layers of each stage, those of every rank's first stage before those of its second."""
    counts = split_layers(options.path, options.parallel, options.megatron, head=options.head)
    stages = [["decoder"] * count for count in counts]
    stages[0].insert(0, "embedding")
    stages[-1].append("loss")
    return stages


def _mixture(hf: PretrainedConfig, layers_with_experts: list[int]) -> dict[str, Any]:
    if not any(layers_with_experts):
        return {}
    return {
        "num_moe_experts": num_experts(hf.to_dict()),
        "moe_layer_freq": layers_with_experts,
        "moe_router_topk": hf.num_experts_per_tok,
        "moe_ffn_hidden_size": getattr(hf, "moe_intermediate_size", hf.intermediate_size),
        **_routing(hf),
        "moe_router_load_balancing_type": "none",
        "moe_router_dtype": "fp32",
        "moe_grouped_gemm": False,
        "expert_tensor_parallel_size": 1,
        "moe_shared_expert_intermediate_size": shared_experts_width(hf.to_dict()) or None,
        "moe_shared_expert_gate": hf.model_type == "qwen2_moe",
    }


def _routing(hf: PretrainedConfig) -> dict[str, Any]:
    """Megatron's settings of how a token's experts are chosen and weighed."""
    factor = getattr(hf, "routed_scaling_factor", None)
    if hf.model_type not in BY_SIGMOID:
        is_normalized = has_normalized_weights(hf.to_dict())
        return {"moe_router_pre_softmax": not is_normalized, "moe_router_topk_scaling_factor": factor}
    in_groups = {"moe_router_num_groups": hf.n_group, "moe_router_group_topk": hf.topk_group}
    return {
        "moe_router_score_function": "sigmoid",
        "moe_router_topk_scaling_factor": factor,
        **(in_groups if hf.n_group > 1 else {}),
    }


def _latent(hf: PretrainedConfig) -> dict[str, Any]:
    # by its factor and mscale_all_dim alone yarn changes the scale of products; its angles are transformers' own
    scaled = {} if hf.rope_parameters["rope_type"] == "default" else hf.rope_parameters
    return {
        "q_lora_rank": hf.q_lora_rank,
        "kv_lora_rank": hf.kv_lora_rank,
        "qk_head_dim": hf.qk_nope_head_dim,
        "qk_pos_emb_head_dim": hf.qk_rope_head_dim,
        "v_head_dim": hf.v_head_dim,
        "rope_type": "rope",
        "rotary_scaling_factor": scaled.get("factor", 1.0),
        "mscale_all_dim": scaled.get("mscale_all_dim") or 0.0,
    }


def has_experts(config: TransformerConfig, layer: int) -> bool:
    """Whether the layer, counted from the model's first, has experts."""
    return config.num_moe_experts is not None and bool(config.moe_layer_freq[layer])
