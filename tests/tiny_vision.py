"""Configurations of tiny models of text and images, by family."""

from typing import Any

from transformers import (
    Glm4vConfig,
    Glm4vForConditionalGeneration,
    PretrainedConfig,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Qwen3VLMoeConfig,
    Qwen3VLMoeForConditionalGeneration,
)

from tests.tiny_tokenizer import EOS_TOKEN_ID, SPECIAL_TOKENS

_CLASSES: dict[str, tuple[Any, Any]] = {
    "qwen2_vl": (Qwen2VLConfig, Qwen2VLForConditionalGeneration),
    "qwen2_5_vl": (Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration),
    "qwen3_vl": (Qwen3VLConfig, Qwen3VLForConditionalGeneration),
    "qwen3_vl_moe": (Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration),
    "qwen3_5": (Qwen3_5Config, Qwen3_5ForConditionalGeneration),
    "qwen3_5_moe": (Qwen3_5MoeConfig, Qwen3_5MoeForConditionalGeneration),
    "glm4v": (Glm4vConfig, Glm4vForConditionalGeneration),
}
_IDS = {"glm4v": ("image_start", "image_end", "image", "video", "video_start", "video_end")}
"""What a family calls the ids of its special tokens in config.json, where others begin with vision_start."""
_QWEN3_PROCESSORS = ("Qwen3VLProcessor", "Qwen2VLImageProcessor", "Qwen3VLVideoProcessor")
VISION_PROCESSORS = dict.fromkeys(_CLASSES, _QWEN3_PROCESSORS) | {
    "qwen2_vl": ("Qwen2VLProcessor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor"),
    "qwen2_5_vl": ("Qwen2_5_VLProcessor", "Qwen2VLImageProcessor", "Qwen2VLVideoProcessor"),
    "glm4v": ("Glm4vProcessor", "Glm4vImageProcessor", "Glm4vVideoProcessor"),
}
"""The classes of a family's processor, of its images' and its videos'."""

_HALF = {"mrope_section": [3, 3, 2], "partial_rotary_factor": 0.5}
"""Rotary positions of half a head."""


def vision_config(family: str, *, tied: bool, vocab: int, num_layers: int) -> tuple[PretrainedConfig, Any]:
    """The configuration of `family`, and the class that it is of. Every other layer of a recurrent family attends; its
    heads are of the smallest size that vLLM computes on CPUs.
    """
    shared = {"eos_token_id": EOS_TOKEN_ID, "tie_word_embeddings": tied, "initializer_range": 0.1}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    text: dict[str, Any] = {
        **shared,
        "vocab_size": vocab,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "rope_parameters": rope,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    vision: dict[str, Any] = {
        "depth": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_heads": 2,
        "out_hidden_size": 128,
        "patch_size": 4,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
        "initializer_range": 0.1,
    }
    ids = {
        f"{name}_token_id": len(SPECIAL_TOKENS) + index
        for index, name in enumerate(_IDS.get(family, ("vision_start", "vision_end", "image", "video")))
    }
    if family == "qwen2_vl":  # whose hidden_size is that of the language model
        vision |= {"embed_dim": 64, "hidden_size": 128, "mlp_ratio": 2}
        del vision["intermediate_size"], vision["out_hidden_size"]
    elif family == "qwen2_5_vl":
        vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
    elif family == "glm4v":
        vision |= {"image_size": 32}
        text |= {"attention_bias": True, "rope_parameters": {**rope, **_HALF}}
    else:
        vision |= {"num_position_embeddings": 64}
        text |= {"head_dim": 32, "rope_parameters": {**rope, "mrope_interleaved": True}}
    if family.startswith("qwen3_vl"):
        vision |= {"deepstack_visual_indexes": [0]}
    if family.startswith("qwen3_5"):
        text["rope_parameters"] |= _HALF
        text |= {
            "layer_types": [("linear_attention", "full_attention")[layer % 2] for layer in range(num_layers)],
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        }
    if family.endswith("moe"):
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 96}
        text |= {"shared_expert_intermediate_size": 64} if family == "qwen3_5_moe" else {"norm_topk_prob": True}
    configuration, kind = _CLASSES[family]
    return configuration(text_config=text, vision_config=vision, **ids, **shared), kind
