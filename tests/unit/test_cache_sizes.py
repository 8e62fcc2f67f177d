"""Bytes of a rollout's cache are those that vLLM's own classes allocate for the same layers."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rolecall.data.model.cache_sizes import cache_sizes
from rolecall.settings.rollout import RolloutSection

pytest.importorskip("vllm")
from vllm.v1.core.kv_cache_utils import (
    _max_memory_usage_bytes_from_groups,
    get_kv_cache_groups,
)
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

LONGEST, IN_FLIGHT = 33792, 8192
GEMMA_3: dict[str, Any] = {
    "model_type": "gemma3_text",
    "num_hidden_layers": 62,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "head_dim": 128,
    "hidden_size": 5376,
    "sliding_window": 1024,
}
"""The 27B, as it is published, which says nothing of its layers."""
GPT_OSS: dict[str, Any] = {
    "model_type": "gpt_oss",
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "hidden_size": 2880,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"] * 18,
}
QWEN3_5: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "num_hidden_layers": 64,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_size": 5120,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "mamba_ssm_dtype": "float32",
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
}
DEEPSEEK_V3: dict[str, Any] = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "hidden_size": 7168,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
}
QWEN3 = {
    "model_type": "qwen3",
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "hidden_size": 5120,
}
GEMMA_4: dict[str, Any] = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_size": 5376,
    "sliding_window": 1024,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
}


def full(keys: int, head_dim: int, block: int = 16) -> KVCacheSpec:
    return FullAttentionSpec(block_size=block, num_kv_heads=keys, head_size=head_dim, dtype=torch.bfloat16)


def window(keys: int, head_dim: int, size: int) -> KVCacheSpec:
    return SlidingWindowSpec(
        block_size=16, num_kv_heads=keys, head_size=head_dim, dtype=torch.bfloat16, sliding_window=size
    )


def recurrent(num_tensor: int) -> list[KVCacheSpec]:
    """Qwen3.5's layers, states padded to a page of attention, as its platforms have them."""
    shapes = ((3, (2 * 16 + 48) * 128 // num_tensor), (48 // num_tensor, 128, 128))
    bare = MambaSpec(block_size=-1, shapes=shapes, dtypes=(torch.bfloat16, torch.float32))
    a_token = 2 * max(1, 4 // num_tensor) * 256 * 2
    block = 16 * -(-bare.page_size_bytes // (16 * a_token))
    padded = MambaSpec(block_size=LONGEST, shapes=shapes, dtypes=bare.dtypes, page_size_padded=block * a_token)
    return ([padded] * 3 + [full(max(1, 4 // num_tensor), 256, block)]) * 16


def latent() -> KVCacheSpec:
    return MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype=torch.bfloat16)


def of_vllm(layers: list[KVCacheSpec]) -> int:
    """Bytes that vLLM reckons for one response as long as may be."""
    config: Any = SimpleNamespace(
        model_config=SimpleNamespace(max_model_len=LONGEST),
        parallel_config=SimpleNamespace(decode_context_parallel_size=1, prefill_context_parallel_size=1),
        cache_config=SimpleNamespace(
            mamba_cache_mode="none",
            get_resolved_kv_cache_layout=lambda: SimpleNamespace(is_block_outermost=False),
        ),
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=False),
        attention_config=SimpleNamespace(hisparse_config=None),
        speculative_config=None,
        max_in_flight_tokens=IN_FLIGHT,
    )
    named = {f"layers.{number}": spec for number, spec in enumerate(layers)}
    groups = get_kv_cache_groups(config, named)
    return int(_max_memory_usage_bytes_from_groups(config, groups))


@pytest.mark.parametrize("num_tensor", [1, 4])
@pytest.mark.parametrize(
    "text", [QWEN3, DEEPSEEK_V3, GEMMA_3, GPT_OSS, QWEN3_5, GEMMA_4], ids=lambda x: x["model_type"]
)
def test_a_response_takes_what_vllm_reckons(tmp_path: Path, text: dict[str, Any], num_tensor: int) -> None:
    keys = max(1, text["num_key_value_heads"] // num_tensor)
    match text["model_type"]:
        case "qwen3":
            layers = [full(keys, 128)] * 64
        case "deepseek_v3":
            layers = [latent()] * 61
        case "gemma3_text":
            layers = [full(keys, 128) if layer % 6 == 5 else window(keys, 128, 1024) for layer in range(62)]
        case "gpt_oss":
            layers = [window(keys, 64, 128), full(keys, 64)] * 18
        case "gemma4_text":
            layers = ([window(keys, 256, 1024)] * 5 + [full(4 // num_tensor, 512)]) * 10
        case _:
            layers = recurrent(num_tensor)
    (tmp_path / "config.json").write_text(json.dumps(text))
    found = cache_sizes(tmp_path, RolloutSection(tensor_parallel_size=num_tensor), size=2)
    assert found is not None
    assert found.response_bytes(LONGEST, IN_FLIGHT) == of_vllm(layers)


@pytest.mark.parametrize(
    "wrong", [{"model_type": []}, {"num_hidden_layers": 0}, {"num_kv_shared_layers": 60}, {"per_layer_config": [1]}]
)
def test_a_configuration_that_cannot_be_reckoned_is_left_to_others(tmp_path: Path, wrong: dict[str, Any]) -> None:
    (tmp_path / "config.json").write_text(json.dumps(GEMMA_4 | wrong))
    assert cache_sizes(tmp_path, RolloutSection(), size=2) is None
