"""What a pass keeps for its backward pass is what is reckoned from config.json, and what a GPU was seen to take."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoConfig, PretrainedConfig, Qwen3Config

from rolecall.settings.sizes.activations import activations, tower_activations
from rolecall.settings.sizes.families import FAMILIES
from rolecall.training.model.attention.packed import PackedPlan, TracedAttention, plan_attention
from rolecall.training.model.logits.logprobs import KERNEL_BLOCK_ELEMENTS
from rolecall.training.model.packed_model import PackedModel, build_model, fill_buffers
from tests.tiny_vision import vision_config

NUM_TOKENS = 96
SHAPE: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 96,
    "pad_token_id": 0,
}
WIDE, NARROW = {"head_dim": 40}, {"head_dim": 32}
FEW = {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 48}
EXPERTS: dict[str, Any] = {"num_experts": 4, "moe_intermediate_size": 48, "num_experts_per_tok": 2}
ROUTED = {"n_routed_experts": 4, "moe_intermediate_size": 48, "num_experts_per_tok": 2, "first_k_dense_replace": 0}
LATENT: dict[str, Any] = ROUTED | {
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 8,
    "v_head_dim": 32,
    "n_shared_experts": 1,
    "num_key_value_heads": 4,
}
BY_SIGMOID: dict[str, Any] = {"n_group": 1, "topk_group": 1}
SPARSE = {"mlp_layer_types": ["sparse"] * 3}
GATED = EXPERTS | WIDE | {"shared_expert_intermediate_size": 96, "layer_types": ["full_attention"] * 3}
GEMMA_4: dict[str, Any] = WIDE | {
    "hidden_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "attention_k_eq_v": True,
    "global_head_dim": 40,
    "num_global_key_value_heads": 2,
}
LOCAL, GLOBAL = {"layer_types": ["sliding_attention"] * 3}, {"layer_types": ["full_attention"] * 3}
LISTED = '{"model_type": "llama", "num_hidden_layers": 1, "per_layer_config": [1]}'
MODELS: dict[str, dict[str, Any]] = {
    **{kind: {} for kind in ("llama", "qwen2", "mistral", "granite", "smollm3", "phi3", "olmo2", "olmo3")},
    **{kind: {} for kind in ("nemotron", "stablelm", "arcee", "cohere", "cohere2", "jais2", "starcoder2")},
    **dict.fromkeys(("ministral3", "ernie4_5", "cwm", "helium"), NARROW),
    **dict.fromkeys(("qwen3", "seed_oss", "glm", "glm4", "exaone4", "hunyuan_v1_dense"), WIDE),
    **dict.fromkeys(("gemma", "gemma3_text"), WIDE),
    "gemma2": WIDE | {"attn_logit_softcapping": None},
    "cohere with norms of heads": {"use_qk_norm": True},
    "qwen3_moe": EXPERTS | WIDE,
    "mellum": EXPERTS | WIDE | SPARSE,
    "afmoe": EXPERTS | WIDE | {"num_dense_layers": 0},
    "exaone_moe": EXPERTS | WIDE | SPARSE,
    "deepseek_v2": LATENT,
    "deepseek_v3": LATENT | BY_SIGMOID,
    "glm4_moe_lite": LATENT | BY_SIGMOID | SPARSE,
    "glm4_moe": ROUTED | BY_SIGMOID | WIDE | {"use_qk_norm": True},
    "dots1": ROUTED | BY_SIGMOID | WIDE | {"n_shared_experts": 1},
    "solar_open": ROUTED | WIDE,
    "mixtral": FEW,
    "granitemoe": FEW,
    "minimax_m2": FEW | WIDE,
    "gpt_oss": FEW | WIDE,
    "olmoe": EXPERTS | {"intermediate_size": 48},
    "flex_olmo": EXPERTS | {"intermediate_size": 48},
    "qwen2_moe": EXPERTS | {"shared_expert_intermediate_size": 96},
    "qwen3_next": GATED,
    "qwen3_5_moe_text": GATED,
    "qwen3_5_text": WIDE | GLOBAL,
    "gemma4_text within windows": GEMMA_4 | LOCAL,
    "gemma4_text beyond": GEMMA_4 | GLOBAL | {"global_head_dim": 64, "num_global_key_value_heads": 1},
    "gemma4_text with vectors of layers": GEMMA_4 | LOCAL | {"hidden_size_per_layer_input": 16},
    "gemma4_text with experts": GEMMA_4 | LOCAL | {"enable_moe_block": True, "top_k_experts": 2} | EXPERTS,
}
"""What is further in the configuration of a family, by its model_type, behind which may stand which of its models."""
TEXTS = {"qwen2_vl": {}, "qwen2_5_vl": {}, "glm4v": {}, "qwen3_vl": WIDE, "qwen3_vl_moe": WIDE | EXPERTS}
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


def configuration(name: str, num_layers: int) -> PretrainedConfig:
    kind, more = name.split()[0], MODELS[name] | {"num_hidden_layers": num_layers}
    cut = {field: more[field][:num_layers] for field in ("layer_types", "mlp_layer_types") if field in more}
    return AutoConfig.for_model(kind, **SHAPE | more | cut)


def built(path: Path, config: PretrainedConfig) -> PackedModel:
    config.save_pretrained(path)
    model = build_model(path, "policy", torch.bfloat16)
    model.to_empty(device="cpu")
    fill_buffers(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    if model.hf._can_set_experts_implementation():
        model.hf.set_experts_implementation("grouped_mm")  # as on GPUs
    return model


def kept_bytes(module: nn.Module, compute: Callable[[], object]) -> int:
    """Bytes that autograd keeps of what `compute` does with `module`, parameters left out."""
    held = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        where = tensor.untyped_storage().data_ptr()
        if where not in held:
            kept.setdefault(where, tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        compute()
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def of_a_token(path: Path, config: PretrainedConfig, plan: PackedPlan | None = None) -> float:
    """Bytes of a token that autograd keeps of a pass."""
    num_tokens = NUM_TOKENS if plan is None else plan.num_tokens
    model, token_N = built(path, config), torch.arange(num_tokens)
    return kept_bytes(model, lambda: model.hidden_NH(token_N % 90, token_N, plan or _Attention())) / num_tokens


@pytest.mark.parametrize("name", MODELS)
def test_what_a_layer_keeps_is_what_autograd_keeps(tmp_path: Path, name: str) -> None:
    """What is kept beside layers is in both depths."""
    a_layer = (of_a_token(tmp_path, configuration(name, 3)) - of_a_token(tmp_path, configuration(name, 1))) / 2
    found = activations(tmp_path, num_bytes=2)  # of one layer, which was built last
    assert found is not None
    assert found.layer == pytest.approx(a_layer, rel=0.06)
    assert found.per_token(recomputed=False) - found.ends == found.layer
    assert found.per_token(recomputed=True) - found.ends == found.layer + 2 * SHAPE["hidden_size"]
    head_dim = 64 if name == "gemma4_text beyond" else MODELS[name].get("head_dim", 32)
    assert found.attended == 4 * SHAPE["num_attention_heads"] * head_dim


def test_no_family_is_reckoned_that_is_not_held_here() -> None:
    held = {name.split()[0] for name in MODELS} | TEXTS.keys() | {f"{name}_text" for name in TEXTS}
    assert held >= FAMILIES.keys()


@pytest.mark.parametrize("family", TEXTS)
def test_a_layer_beneath_a_tower_is_counted_as_any_other(tmp_path: Path, family: str) -> None:
    def config(num_layers: int) -> PretrainedConfig:
        whole, _ = vision_config(family, tied=False, vocab=96, num_layers=num_layers)
        for field, value in (SHAPE | TEXTS[family]).items():
            setattr(whole.text_config, field, value)
        return whole

    found = [of_a_token(tmp_path, config(num_layers)) for num_layers in (3, 1)]
    reckoned = activations(tmp_path, num_bytes=2)
    assert reckoned is not None
    assert reckoned.layer == pytest.approx((found[0] - found[1]) / 2, rel=0.045)


def test_a_layer_with_a_state_keeps_what_its_chunks_do(tmp_path: Path) -> None:
    def config(num_layers: int) -> PretrainedConfig:
        linear = {"key_heads": 2, "value_heads": 8}
        sizes = {"linear_key_head_dim": 40, "linear_value_head_dim": 56}
        sizes |= {f"linear_num_{name}": count for name, count in linear.items()}
        layers = {"num_hidden_layers": num_layers, "layer_types": ["linear_attention"] * num_layers}
        return AutoConfig.for_model("qwen3_5_text", **SHAPE | sizes | layers)

    plan = plan_attention([1024], torch.tensor([0, 1024], dtype=torch.int32), torch.bfloat16)
    found = [of_a_token(tmp_path, config(num_layers), plan) for num_layers in (2, 1)]
    reckoned = activations(tmp_path, num_bytes=2)
    assert reckoned is not None
    assert reckoned.layer == pytest.approx(found[0] - found[1], rel=0.03)
    assert reckoned.attended == 0


def test_a_cap_of_scores_repeats_keys_and_values(tmp_path: Path) -> None:
    """No kernel has one, and each head of queries gets keys of its own (rolecall/training/model/attention)."""
    found = []
    for cap in (50.0, None):
        shape = SHAPE | WIDE | {"num_hidden_layers": 1, "attn_logit_softcapping": cap}
        AutoConfig.for_model("gemma2", **shape).save_pretrained(tmp_path)
        reckoned = activations(tmp_path, 2)
        assert reckoned is not None
        found.append(reckoned.layer)
    assert found[0] - found[1] == 2 * 2 * (4 - 2) * 40


def test_layers_that_differ_are_added_up_and_the_largest_is_the_one_that_is_computed_again(tmp_path: Path) -> None:
    """A DeepSeek whose first layer is dense, and a Gemma 4 whose last one has keys of another."""
    shape = SHAPE | LATENT | BY_SIGMOID | {"num_hidden_layers": 4, "first_k_dense_replace": 1}
    AutoConfig.for_model("deepseek_v3", **shape | {"intermediate_size": 640}).save_pretrained(tmp_path)
    mixed = activations(tmp_path, 2)
    assert mixed is not None
    experts = 2 * (2 * (4 * 48 + 2 * 128) + 4 * 48) + 4 * 128
    dense = 2 * 4 * 640
    assert mixed.layers == pytest.approx(4 * mixed.layer - 3 * (dense - experts))

    more = {"attention_k_eq_v": False, "num_kv_shared_layers": 1, "use_double_wide_mlp": True}
    shape = SHAPE | GEMMA_4 | LOCAL | more | {"num_hidden_layers": 3}
    AutoConfig.for_model("gemma4_text", **shape).save_pretrained(tmp_path)
    found = activations(tmp_path, 2)
    assert found is not None
    keys, wider = (4 + 8 + 4) * 2 * 40, 2 * 4 * 320
    assert found.layers == pytest.approx(3 * (found.layer - wider + keys) + wider - keys)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v"])
def test_what_a_tower_keeps_of_a_token_of_an_image_is_what_autograd_keeps(tmp_path: Path, family: str) -> None:
    def of_an_image(depth: int) -> float:
        config, _ = vision_config(family, tied=False, vocab=96, num_layers=2)
        vision = config.vision_config
        vision.depth, vision.fullatt_block_indexes, vision.deepstack_visual_indexes = depth, [depth - 1], [0]
        model = built(tmp_path, config)
        tower = model.vision
        assert tower is not None
        grids_I3 = torch.tensor([[1, 16, 16]])
        patches_PC = torch.zeros(256, tower._patch_size, dtype=torch.bfloat16)
        given = tower._given(grids_I3, torch.device("cpu"))
        return kept_bytes(model, lambda: tower.module(patches_PC, patches=_Attention(), **given)) / (256 / 4)

    found = [of_an_image(depth) for depth in (4, 2)]
    reckoned = tower_activations(tmp_path, num_bytes=2)
    assert reckoned is not None
    assert reckoned.num_layers == 2
    assert reckoned.layers == pytest.approx(found[0] - found[1], rel=0.03)


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
    (tmp_path / "config.json").write_text('{"model_type": "mamba2", "hidden_size": 8}')
    assert activations(tmp_path, 2) is None
    for wrong in ('{"model_type": "qwen3"}', "[]", "{", "[" * 100_000, '{"model_type": []}', LISTED):
        (tmp_path / "config.json").write_text(wrong)
        assert activations(tmp_path, 2) is None, wrong[:20]
    config = Qwen3Config(**SHAPE).to_diff_dict() | {"model_type": "qwen3", "head_dim": None}
    for heads in (0, "four", None):
        (tmp_path / "config.json").write_text(json.dumps(config | {"num_attention_heads": heads}))
        assert activations(tmp_path, 2) is None
