"""Tiny random models of further families, by the model_type of their config.json."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from tests.tiny_tokenizer import EOS_TOKEN_ID

_SHAPE = {
    "vocab_size": 152,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": None,
    "initializer_range": 0.2,
    "max_position_embeddings": 256,
}
_LATENT = {
    "initializer_range": 0.1,
    "num_hidden_layers": 3,
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "n_routed_experts": 8,
    "num_experts_per_tok": 4,
    "n_shared_experts": 1,
    "moe_intermediate_size": 32,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
_MORE: dict[str, dict[str, Any]] = {
    "qwen3": {"rope_parameters": {key: value for key, value in _YARN.items() if not key.startswith("mscale")}},
    "mistral": {"sliding_window": 8},
    "qwen2": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
    "seed_oss": {},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": None},
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "mlp_only_layers": [1],
        "num_hidden_layers": 3,
    },
    "deepseek_v3": _LATENT | {"n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "rope_parameters": _YARN},
    "glm4_moe_lite": _LATENT | {"n_group": 1, "topk_group": 1, "mlp_layer_types": ["dense", "sparse", "sparse"]},
}


def write_family(path: Path, model_type: str, *, seed: int = 0) -> Path:
    """A random model of a few layers, in float32, whose biases are no zeros. No tokenizer. Returns `path`."""
    more = _MORE[model_type]
    shape = {key: value for key, value in _SHAPE.items() if key != "head_dim" or "kv_lora_rank" not in more}
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **(shape | more))).float()
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith("bias"):
                tensor.add_(0.3 * torch.arange(tensor.numel()).add(seed).sin())
    model.save_pretrained(path)
    return path
