"""Tiny random Gemmas whose soft caps bend what they cap, in float32."""

from pathlib import Path

import torch
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma4Config,
    Gemma4ForCausalLM,
    Gemma4ForConditionalGeneration,
    Gemma4TextConfig,
    Gemma4VisionConfig,
    PreTrainedModel,
)

from tests.tiny_tokenizer import EOS_TOKEN_ID, write_tokenizer

_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "sliding_window": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.1,
    "eos_token_id": EOS_TOKEN_ID,
    "pad_token_id": 0,
    "bos_token_id": None,
}
_MIXTURE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 64}
_NESTED = {"num_kv_shared_layers": 2, "use_double_wide_mlp": True, "hidden_size_per_layer_input": 16}


def gemma4_config(vocab: int = 288, *, mixture: bool = False) -> Gemma4TextConfig:
    """A Gemma 4 of six layers, every other one in a window of 8: wide heads, one key head for all and values that are
    keys in the others; the last two attend to keys and values of earlier ones, and each token has an embedding in every
    layer, or with `mixture` four experts beside an MLP, two active.
    """
    return Gemma4TextConfig(
        **_SHAPE,
        **(_MIXTURE | {"hidden_size_per_layer_input": 0} if mixture else _NESTED),
        vocab_size=vocab,
        vocab_size_per_layer_input=vocab,
        num_hidden_layers=6,
        layer_types=["sliding_attention", "full_attention"] * 3,
        global_head_dim=64,
        num_global_key_value_heads=1,
        attention_k_eq_v=True,
        final_logit_softcapping=4.0,
    )


def write_gemma4(path: Path, *, vocab: int = 288, seed: int = 0, mixture: bool = False) -> Path:
    """The model of gemma4_config, its layers' scalars unequal, its tokenizer beside it. Returns `path`."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Gemma4ForCausalLM(gemma4_config(vocab, mixture=mixture)).float()
    for number, layer in enumerate(model.model.layers):
        layer.self_attn.q_norm.weight.data.mul_(0.3)  # scores are not divided by the root of the head size
        layer.layer_scalar.fill_(0.7 + 0.1 * number + 0.03 * seed)
    return _saved(model, path, seed)


def write_gemma2(path: Path, *, vocab: int = 288, seed: int = 0, score_cap: float | None = 2.0) -> Path:
    """A Gemma 2 of two layers, one in a window of 8, which caps its scores, too; its tokenizer beside it. Returns
    `path`.
    """
    config = Gemma2Config(
        **_SHAPE,
        vocab_size=vocab,
        num_hidden_layers=2,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=score_cap,
        final_logit_softcapping=4.0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Gemma2ForCausalLM(config).float()
    return _saved(model, path, seed)


def write_gemma4_with_images(path: Path) -> Path:
    """The model of gemma4_config as its publisher gives it, below a tower that reads images. Returns `path`."""
    vision = Gemma4VisionConfig(
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        position_embedding_size=64,
    )
    config = Gemma4Config(text_config=gemma4_config().to_dict(), vision_config=vision.to_dict())
    return _saved(Gemma4ForConditionalGeneration(config).float(), path, 0)


@torch.no_grad()
def _saved(model: PreTrainedModel, path: Path, seed: int) -> Path:
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.add_(0.2 * torch.arange(parameter.numel()).add(seed).sin())
    model.save_pretrained(path)
    write_tokenizer(path)
    return path
