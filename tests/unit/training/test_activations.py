"""What a pass keeps for its backward pass is what is reckoned from config.json, and what a GPU was seen to take."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV3Config,
    Gemma3TextConfig,
    Glm4Config,
    Glm4MoeConfig,
    Glm4MoeLiteConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen2Config,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
    SeedOssConfig,
    SmolLM3Config,
)

from rolecall.settings.sizes.activations import activations
from rolecall.training.model.attention.packed import TracedAttention
from rolecall.training.model.logits.logprobs import KERNEL_BLOCK_ELEMENTS
from rolecall.training.model.packed_model import build_model, fill_buffers

NUM_TOKENS = 96
SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
}
EXPERTS: dict[str, Any] = {"moe_intermediate_size": 48, "num_experts_per_tok": 2}
LATENT: dict[str, Any] = {
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "num_key_value_heads": 4,
}
BY_SIGMOID: dict[str, Any] = {"n_group": 1, "topk_group": 1}
GLM: dict[str, Any] = {"n_routed_experts": 4, "use_qk_norm": True, "first_k_dense_replace": 0, "head_dim": 32}
MODELS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, SHAPE),
    "qwen2": (Qwen2Config, SHAPE),
    "qwen3": (Qwen3Config, SHAPE | {"head_dim": 32}),
    "qwen3_moe": (Qwen3MoeConfig, SHAPE | EXPERTS | {"head_dim": 32, "num_experts": 4}),
    "deepseek_v2": (DeepseekV2Config, SHAPE | EXPERTS | LATENT),
    "deepseek_v3": (DeepseekV3Config, SHAPE | EXPERTS | LATENT | BY_SIGMOID),
    "glm4_moe_lite": (Glm4MoeLiteConfig, SHAPE | EXPERTS | LATENT | BY_SIGMOID | {"mlp_layer_types": ["sparse"] * 3}),
    "glm4_moe": (Glm4MoeConfig, SHAPE | EXPERTS | GLM | BY_SIGMOID),
    "mistral": (MistralConfig, SHAPE),
    "seed_oss": (SeedOssConfig, SHAPE | {"head_dim": 32}),
    "phi3": (Phi3Config, SHAPE | {"pad_token_id": 0}),
    "granite": (GraniteConfig, SHAPE),
    "smollm3": (SmolLM3Config, SHAPE | {"pad_token_id": 0}),
    "glm4": (Glm4Config, SHAPE | {"head_dim": 32, "pad_token_id": 0}),
    "gemma3_text": (Gemma3TextConfig, SHAPE | {"head_dim": 32}),
    "mixtral": (MixtralConfig, SHAPE | {"num_local_experts": 4, "intermediate_size": 48}),
    "qwen2_moe": (Qwen2MoeConfig, SHAPE | EXPERTS | {"num_experts": 4, "shared_expert_intermediate_size": 96}),
}
SEEN = {
    "0.6B": (
        {"hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 16},
        0.596e9,
    ),
    "4B": (
        {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
        4.022e9,
    ),
}
"""Qwen3's shapes, and their parameters, of which an H200 was seen to train microbatches (docs/log.md, 2026-11-27)."""


class _OneKernel(torch.autograd.Function):
    """Attention that keeps what flash attention keeps."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])
        ctx.save_for_backward(query, key, value, output, torch.zeros(query.shape[1:3]))
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> None:
        raise NotImplementedError


class _Attention(TracedAttention):
    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sliding_window: int | None
    ) -> torch.Tensor:
        output: torch.Tensor = _OneKernel.apply(query, key, value)  # type: ignore[no-untyped-call]
        return output


def kept_bytes(path: Path, kind: str, num_layers: int) -> float:
    """Bytes of a token that autograd keeps of a pass, parameters left out."""
    config, shape = MODELS[kind]
    config(**shape, num_hidden_layers=num_layers).save_pretrained(path)
    model = build_model(path, "policy", torch.bfloat16)
    model.to_empty(device="cpu")
    fill_buffers(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    if model.hf._can_set_experts_implementation():
        model.hf.set_experts_implementation("grouped_mm")  # as on GPUs
    held = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        where = tensor.untyped_storage().data_ptr()
        if where not in held:
            kept.setdefault(where, tensor)
        return tensor

    ids_N = torch.arange(NUM_TOKENS) % 90
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model.hidden_NH(ids_N, ids_N, _Attention())
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / NUM_TOKENS


@pytest.mark.parametrize("kind", MODELS)
def test_what_a_layer_keeps_is_what_autograd_keeps(tmp_path: Path, kind: str) -> None:
    """What is kept beside layers is in both depths."""
    a_layer = (kept_bytes(tmp_path, kind, 3) - kept_bytes(tmp_path, kind, 1)) / 2
    found = activations(tmp_path, num_bytes=2)
    assert found is not None
    assert found.layer == pytest.approx(a_layer, rel=0.06)
    assert found.per_token(recomputed=False) - found.ends == found.layer
    assert found.per_token(recomputed=True) - found.ends == found.layer + 2 * SHAPE["hidden_size"]
    assert found.attended == 4 * SHAPE["num_attention_heads"] * 32


@pytest.mark.parametrize(
    ("size", "num_tokens", "recomputed", "peak"),
    [("0.6B", 16384, False, 43.2), ("0.6B", 32768, True, 14.9), ("4B", 8192, False, 119.1), ("4B", 16384, True, 75.1)],
)
def test_peaks_that_a_gpu_was_seen_to_have_are_foretold(
    tmp_path: Path, size: str, num_tokens: int, recomputed: bool, peak: float
) -> None:
    """Of one rank whose cast parameters stay from pass to pass, as they did there."""
    shape, num_parameters = SEEN[size]
    config = Qwen3Config(**shape, num_key_value_heads=8, head_dim=128, vocab_size=151_936, tie_word_embeddings=True)
    config.architectures = ["Qwen3ForCausalLM"]
    config.save_pretrained(tmp_path)
    found = activations(tmp_path, num_bytes=2)
    assert found is not None
    embedding, blocks = shape["hidden_size"] * 151_936 * 2, 2 * KERNEL_BLOCK_ELEMENTS * 4
    foretold = num_parameters * (16 + 2) + found.per_token(recomputed=recomputed) * num_tokens + embedding + blocks
    assert foretold / 2**30 == pytest.approx(peak, rel=0.05)


def test_ranks_that_share_matrices_share_all_but_norms(tmp_path: Path) -> None:
    Qwen3Config(**SHAPE, head_dim=32, num_hidden_layers=1).save_pretrained(tmp_path)
    whole, shared = activations(tmp_path, 2), activations(tmp_path, 2, num_tensor=2)
    assert whole is not None
    assert shared is not None
    norms = 2 * 8 * SHAPE["hidden_size"]
    assert shared.layer - norms == (whole.layer - norms) / 2
    assert (shared.layer_input, shared.ends) == (whole.layer_input, whole.ends)


def test_a_model_of_another_kind_is_not_guessed_at(tmp_path: Path) -> None:
    assert activations(tmp_path, 2) is None
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_next", "hidden_size": 8}')
    assert activations(tmp_path, 2) is None
    for wrong in ('{"model_type": "qwen3"}', "[]", "{", "[" * 100_000, '{"model_type": []}'):
        (tmp_path / "config.json").write_text(wrong)
        assert activations(tmp_path, 2) is None, wrong[:20]
    config = Qwen3Config(**SHAPE).to_diff_dict() | {"model_type": "qwen3", "head_dim": None}
    for heads in (0, "four", None):
        (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": heads}))
        assert activations(tmp_path, 2) is None
