"""Tiny random models on disk, with a chat tokenizer, for every test that needs a real model directory. Nothing is
downloaded.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PretrainedConfig,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from tests.tiny_tokenizer import EOS_TOKEN_ID, GLM_TEMPLATE, GLM_TOKENS, VISION_TEMPLATE, VISION_TOKENS, write_tokenizer
from tests.tiny_vision import VISION_PROCESSORS, vision_config

VisionFamily = Literal["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "glm4v"]


def write_qwen3(
    path: Path,
    *,
    tied: bool = False,
    hidden: int = 64,
    num_layers: int = 2,
    vocab: int = 288,
    heads: int = 4,
    kv_heads: int = 2,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """A random dense Qwen3 with weights large enough that mistakes show, its tokenizer beside it. Returns `path`."""
    config = Qwen3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=hidden // heads,
        max_position_embeddings=512,
        tie_word_embeddings=tied,
        initializer_range=0.1,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = _drawn(Qwen3ForCausalLM, config, seed).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.add_(0.05 * torch.arange(parameter.numel()).sin())
    model.save_pretrained(path)
    write_tokenizer(path)
    return path


def write_qwen3_moe(
    path: Path, *, vocab: int = 150, seed: int = 0, head_dim: int = 16, expert_hidden: int = 32, num_layers: int = 2
) -> Path:
    """A random mixture of four experts, two active: parameters that transformers fuses and checkpoints do not. No
    tokenizer. Returns `path`.
    """
    config = Qwen3MoeConfig(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=expert_hidden,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        num_experts=4,
        num_experts_per_tok=2,
        eos_token_id=EOS_TOKEN_ID,
        initializer_range=0.2,
        max_position_embeddings=256,
    )
    _drawn(Qwen3MoeForCausalLM, config, seed).save_pretrained(path)
    return path


def write_qwen3_5(path: Path, *, vocab: int = 150, seed: int = 0) -> Path:
    """A random Qwen3.5 of four layers, three of them recurrent. No tokenizer. Returns `path`."""
    config = Qwen3_5TextConfig(
        vocab_size=vocab,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        max_position_embeddings=256,
        initializer_range=0.2,
        eos_token_id=EOS_TOKEN_ID,
    )
    _drawn(Qwen3_5ForCausalLM, config, seed).save_pretrained(path)
    return path


def write_qwen3_next(path: Path, *, vocab: int = 288, seed: int = 0) -> Path:
    """A random Qwen3-Next of four layers, three of them recurrent, of four experts, two active, whose heads are of the
    smallest size that vLLM computes on CPUs; its tokenizer beside it. Returns `path`.
    """
    config = Qwen3NextConfig(
        vocab_size=vocab,
        hidden_size=128,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        linear_num_key_heads=1,
        linear_num_value_heads=2,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        max_position_embeddings=512,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=0,
        bos_token_id=None,
    )
    _drawn(Qwen3NextForCausalLM, config, seed).save_pretrained(path)
    write_tokenizer(path)
    return path


def write_gpt_oss(
    path: Path, *, vocab: int = 288, seed: int = 0, num_layers: int = 2, window: int = 8, head_dim: int = 32
) -> Path:
    """A random gpt-oss of four experts, two active, every other layer in a window: sinks and biases as large as scores,
    and an expert whose gate meets its clamp; its tokenizer beside it. Returns `path`.
    """
    config = GptOssConfig(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=window,
        initializer_range=0.1,
        max_position_embeddings=512,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
        },
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=0,
        bos_token_id=None,
    )
    model = _drawn(GptOssForCausalLM, config, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                parameter.add_((0.3 * torch.arange(parameter.numel())).sin().view_as(parameter))
            if name.endswith("gate_up_proj_bias"):
                parameter[0, :4] *= 14
    model.save_pretrained(path)
    write_tokenizer(path)
    return path


def write_deepseek_v2(path: Path, *, vocab: int = 152, seed: int = 0) -> Path:
    """A random DeepSeek-V2 of four layers: latent attention, and after one dense layer four experts, two active, beside
    two that all tokens go to. No tokenizer. Returns `path`.
    """
    config = DeepseekV2Config(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=12,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_shared_experts=2,
        first_k_dense_replace=1,
        routed_scaling_factor=1.5,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
        },
        eos_token_id=EOS_TOKEN_ID,
        initializer_range=0.1,
        max_position_embeddings=256,
    )
    _drawn(DeepseekV2ForCausalLM, config, seed).save_pretrained(path)
    return path


def write_llama(path: Path, *, vocab: int = 152, seed: int = 0) -> Path:
    """A random Llama whose rotary positions are scaled as Llama 3's. No tokenizer. Returns `path`."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=EOS_TOKEN_ID,
        initializer_range=0.1,
        max_position_embeddings=512,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    )
    _drawn(LlamaForCausalLM, config, seed).save_pretrained(path)
    return path


def write_glm4_moe(path: Path, *, vocab: int = 150, seed: int = 0, head_dim: int = 16) -> Path:
    """A random GLM-4.5 of three layers: after a dense one eight experts in two groups, two active, chosen with biases
    that no half precision holds, beside one that all tokens go to. No tokenizer. Returns `path`.
    """
    config = Glm4MoeConfig(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=head_dim,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        use_qk_norm=True,
        attention_bias=True,
        eos_token_id=EOS_TOKEN_ID,
        initializer_range=0.2,
        max_position_embeddings=256,
    )
    model = _drawn(Glm4MoeForCausalLM, config, seed)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.add_(0.3 * torch.arange(len(buffer)).add(seed).sin())
    model.save_pretrained(path)
    return path


def write_granite(path: Path, *, tied: bool = False, vocab: int = 152, hidden: int = 64, seed: int = 0) -> Path:
    """A random Granite, which scales embeddings, attention, residuals and logits. No tokenizer. Returns `path`."""
    config = GraniteConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        tie_word_embeddings=tied,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        embedding_multiplier=2.0,
        attention_multiplier=0.2,
        residual_multiplier=0.7,
        logits_scaling=3.0,
        eos_token_id=EOS_TOKEN_ID,
        initializer_range=0.2,
        max_position_embeddings=256,
    )
    _drawn(GraniteForCausalLM, config, seed).save_pretrained(path)
    return path


def write_qwen2(path: Path, *, vocab: int = 152, seed: int = 0) -> Path:
    """A random Qwen2, whose queries, keys and values have biases. No tokenizer. Returns `path`."""
    config = Qwen2Config(
        vocab_size=vocab,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=EOS_TOKEN_ID,
        initializer_range=0.1,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    model = _drawn(Qwen2ForCausalLM, config, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.copy_(0.3 * torch.arange(parameter.numel()).sin())
    model.save_pretrained(path)
    return path


def write_phi3(
    path: Path, *, original_tokens: int, max_tokens: int = 256, vocab: int = 152, hidden: int = 64, seed: int = 0
) -> Path:
    """A random Phi-3 with LongRoPE as Phi-4-mini has it, first trained to read `original_tokens`, of heads of which
    three quarters turn. No tokenizer. Returns `path`.
    """
    num_factors = hidden // 4 * 3 // 8
    config = Phi3Config(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        partial_rotary_factor=0.75,
        original_max_position_embeddings=original_tokens,
        max_position_embeddings=max_tokens,
        rope_scaling={
            "type": "longrope",
            "short_factor": [1.0 + 0.1 * i for i in range(num_factors)],
            "long_factor": [1.5 + 0.7 * i for i in range(num_factors)],
        },
        tie_word_embeddings=True,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=0,
        initializer_range=0.2,
    )
    _drawn(Phi3ForCausalLM, config, seed).save_pretrained(path)
    return path


def write_stablelm(path: Path, *, vocab: int = 152, hidden: int = 64, seed: int = 0) -> Path:
    """A random StableLM, a quarter of whose heads turn, with biases of queries, keys and values. No tokenizer. Returns
    `path`.
    """
    return _write_auto("stablelm", path, vocab, hidden, seed, partial_rotary_factor=0.25, use_qkv_bias=True)


def write_nemotron(path: Path, *, vocab: int = 152, hidden: int = 64, seed: int = 0) -> Path:
    """A random Nemotron, half of whose heads turn, with norms around 1 and squared activations. No tokenizer. Returns
    `path`.
    """
    return _write_auto("nemotron", path, vocab, hidden, seed, partial_rotary_factor=0.5, head_dim=hidden // 4)


def _write_auto(kind: str, path: Path, vocab: int, hidden: int, seed: int, **more: Any) -> Path:
    """A random model of that model_type, no vector of it all zeros or ones."""
    config = AutoConfig.for_model(
        kind,
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        eos_token_id=EOS_TOKEN_ID,
        bos_token_id=0,
        pad_token_id=0,
        initializer_range=0.2,
        max_position_embeddings=256,
        **more,
    )
    model = _drawn(AutoModelForCausalLM.from_config, config, seed)
    with torch.no_grad():
        for parameter in (each for each in model.parameters() if each.ndim == 1):
            parameter.add_(0.3 * torch.arange(parameter.numel()).sin())
    model.save_pretrained(path)
    return path


def write_vision(
    path: Path, family: VisionFamily, *, tied: bool = False, vocab: int = 288, num_layers: int = 2, seed: int = 0
) -> Path:
    """A random model of text and images with its tokenizer and image processor beside it: a token of an image is 8 x 8
    pixels, and an image is scaled to between 1 and 64 of them. Returns `path`.
    """
    config, kind = vision_config(family, tied=tied, vocab=vocab, num_layers=num_layers)
    model = _drawn(kind, config, seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias") or "norm" in name:
                parameter.add_(0.05 * torch.arange(parameter.numel()).sin().view_as(parameter))
    model.save_pretrained(path)
    if family == "qwen3_vl_moe":
        transpose_experts(path)
    is_glm = family == "glm4v"
    write_tokenizer(path, *((GLM_TEMPLATE, GLM_TOKENS) if is_glm else (VISION_TEMPLATE, VISION_TOKENS)))
    write_image_processor(path, family, patch=4)
    return path


def transpose_experts(path: Path) -> None:
    """Turns the matrices of experts in `path`, which published mixtures of Qwen3-VL have the other way round than
    transformers.
    """
    tensors = load_file(path / "model.safetensors")
    turned = {name: each.mT.contiguous() if ".experts." in name else each for name, each in tensors.items()}
    save_file(turned, path / "model.safetensors", metadata={"format": "pt"})


def write_image_processor(path: Path, family: VisionFamily, *, patch: int, max_tokens: int = 64) -> None:
    """The files by which transformers and vLLM make pixel values of images, saved beside the tokenizer in `path`."""
    token_pixels = (2 * patch) ** 2
    processor, image, video = VISION_PROCESSORS[family]
    frames = 2 if family == "glm4v" else 1  # as which its processor counts an image
    shared: dict[str, Any] = {
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "size": {"shortest_edge": frames * token_pixels, "longest_edge": frames * max_tokens * token_pixels},
        "processor_class": processor,
    }
    for name, kind in (
        ("", {"image_processor_type": image}),
        ("video_", {"video_processor_type": video}),
    ):
        (path / f"{name}preprocessor_config.json").write_text(json.dumps({**shared, **kind}, indent=2))
    file = path / "tokenizer_config.json"
    file.write_text(
        json.dumps({**json.loads(file.read_text()), "processor_class": shared["processor_class"]}, indent=2)
    )


def write_reward_model(
    path: Path,
    *,
    family: Literal["qwen2", "qwen3", "llama"] = "qwen3",
    num_labels: int = 1,
    every_token: bool = False,
    seed: int = 0,
    max_tokens: int = 512,
) -> Path:
    """A random classification model over whole sequences, or over `every_token`, its tokenizer beside it. Returns
    `path`.
    """
    configs = {"qwen2": Qwen2Config, "qwen3": Qwen3Config, "llama": LlamaConfig}
    config = configs[family](
        vocab_size=288,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=max_tokens,
        initializer_range=0.1,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=0,
        bos_token_id=None,
        num_labels=num_labels,
    )
    kind = AutoModelForTokenClassification if every_token else AutoModelForSequenceClassification
    _drawn(kind.from_config, config, seed).save_pretrained(path)
    write_tokenizer(path)
    return path


def _drawn(make: Callable[[Any], Any], config: PretrainedConfig, seed: int) -> Any:
    """A model in float32 whose weights are those of `seed`, whatever was drawn before."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return make(config).float()
