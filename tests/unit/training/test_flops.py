"""Counted FLOPs against torch's counter over real runs of plain transformers models, eager attention and all, at other
lengths than the trace's.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    FalconH1Config,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    JetMoeConfig,
    LlamaConfig,
    MiniMaxConfig,
    MixtralConfig,
    Olmo3Config,
    OpenAIGPTConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rolecall.errors import ConfigError
from rolecall.settings import LoraSection
from rolecall.training.account.flops import AttentionCost, CostModel, ModelFlops, count_flops
from rolecall.training.model.attention.packed import NAME
from rolecall.training.model.lora import add_adapters, is_adapter, stacked_experts
from rolecall.training.model.packed_model import Head, PackedModel, PolicyModel, build_model
from tests.tiny_gemma import gemma4_config

SIZES = {
    "vocab_size": 48,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 8}
EXPERTS = {"moe_intermediate_size": 12, "num_experts_per_tok": 2}
CONFIGS: dict[str, PretrainedConfig] = {
    "every head its own keys": LlamaConfig(**SIZES, num_key_value_heads=4),
    "shared keys, wide heads, tied": Qwen3Config(**SIZES, num_key_value_heads=2, head_dim=12, tie_word_embeddings=True),
    "no gate in the MLP": GPT2Config(vocab_size=48, n_embd=32, n_layer=2, n_head=4, n_positions=64, attn_pdrop=0.0),
    "windows in some layers": Olmo3Config(
        **SIZES, num_key_value_heads=2, sliding_window=4, layer_types=["sliding_attention", "full_attention"]
    ),
    "windows and other norms": Gemma3TextConfig(
        **SIZES, num_key_value_heads=2, head_dim=8, sliding_window=4, attn_logit_softcapping=None
    ),
    "experts": Qwen3MoeConfig(**SIZES, **EXPERTS, num_key_value_heads=2, head_dim=8, num_experts=4),
    "experts beside a dense layer": Qwen3MoeConfig(
        **SIZES, **EXPERTS, num_key_value_heads=2, head_dim=8, num_experts=4, mlp_only_layers=[0]
    ),
    "experts and a shared one": Qwen2MoeConfig(
        **SIZES, **EXPERTS, num_key_value_heads=2, num_experts=4, shared_expert_intermediate_size=20
    ),
    "experts as wide as the MLP": MixtralConfig(
        **SIZES, num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2
    ),
    "experts with biases, heads with sinks": GptOssConfig(
        **SIZES, num_key_value_heads=2, head_dim=8, num_local_experts=4, num_experts_per_tok=2, sliding_window=4
    ),
    "keys and values of earlier layers, heads of two sizes": gemma4_config(48),
    "experts beside an MLP": gemma4_config(48, mixture=True),
    "capped scores": Gemma2Config(**SIZES, num_key_value_heads=2, head_dim=8, sliding_window=4),
    "latent attention, routed and shared experts": DeepseekV3Config(
        **SIZES,
        **LATENT,
        **EXPERTS,
        n_routed_experts=4,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        num_key_value_heads=4,
    ),
}


def flops_of(config: PretrainedConfig, folder: Path, *, head: Head = "policy", frozen: bool = False) -> ModelFlops:
    config.save_pretrained(folder)
    model = build_model(folder, head, torch.float32)
    return count_flops(model.requires_grad_(not frozen))


def unchecked(config: PretrainedConfig) -> PackedModel:
    """The model on the meta device, whatever build_model would say of it."""
    with torch.device("meta"):
        return PolicyModel(AutoModelForCausalLM.from_config(config, attn_implementation=NAME, dtype=torch.float32))


def counted(
    config: PretrainedConfig, num_tokens: int, change: Callable[[PreTrainedModel], None] = lambda hf: None
) -> tuple[int, int]:
    """(forward, forward and backward) as torch counts one sequence, really computed; attention as a whole square."""
    model = AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    ).train()
    change(model)
    with FlopCounterMode(display=False) as counter:
        logits = model(torch.randint(0, 48, (1, num_tokens)), use_cache=False).logits
        forward = counter.get_total_flops()
        logits.sum().backward()
    return forward, counter.get_total_flops()


def square(cost: CostModel, num_tokens: int) -> float:
    """What `cost` says, attention as a whole square."""
    return (cost.per_token + cost.per_scored_token) * num_tokens + sum(
        part.flops_per_pair for part in cost.attention
    ) * num_tokens**2


@pytest.mark.parametrize("name", CONFIGS)
def test_a_traced_model_costs_what_torch_counts_when_plain_transformers_runs_it(name: str, tmp_path: Path) -> None:
    flops = flops_of(CONFIGS[name], tmp_path)
    for num_tokens in (3, 11):
        assert (square(flops.forward, num_tokens), square(flops.update, num_tokens)) == counted(
            CONFIGS[name], num_tokens
        )


def test_adapters_cost_what_torch_counts_when_their_base_is_frozen(tmp_path: Path) -> None:
    config, section = CONFIGS["shared keys, wide heads, tied"], LoraSection(rank=3)
    config.save_pretrained(tmp_path)
    model = build_model(tmp_path, "policy", torch.float32)
    add_adapters(model, section, "actor.lora")
    flops = count_flops(model)

    def adapt(hf: PreTrainedModel) -> None:
        add_adapters(PackedModel(hf), section, "actor.lora")
        hf.to_empty(device="cpu")  # FLOPs do not depend on values

    for num_tokens in (3, 11):
        expected = counted(config, num_tokens, adapt)
        assert (square(flops.forward, num_tokens), square(flops.update, num_tokens)) == expected
    assert flops.update.per_token < 2.5 * flops.forward.per_token


def test_adapters_of_experts_cost_a_token_what_experts_that_train_do(tmp_path: Path) -> None:
    config = CONFIGS["experts"]
    attention = LoraSection(rank=3, target_modules=("q_proj", "k_proj", "v_proj", "o_proj"))
    config.save_pretrained(tmp_path)
    model = build_model(tmp_path, "policy", torch.float32)
    add_adapters(model, attention.model_copy(update={"experts": True}), "actor.lora")
    flops = count_flops(model)
    trained = {name for name, parameter in model.hf.named_parameters() if parameter.requires_grad}
    assert trained == {name for name, _ in model.hf.named_parameters() if is_adapter(name)}

    def adapt(hf: PreTrainedModel) -> None:
        add_adapters(PackedModel(hf), attention, "actor.lora")
        hf.to_empty(device="cpu")
        for name in stacked_experts(hf):
            hf.get_parameter(name).requires_grad_(True)

    for num_tokens in (3, 11):
        expected = counted(config, num_tokens, adapt)
        assert (square(flops.forward, num_tokens), square(flops.update, num_tokens)) == expected


def test_windows_are_told_apart(tmp_path: Path) -> None:
    flops = flops_of(CONFIGS["windows in some layers"], tmp_path)
    assert {part.window for part in flops.forward.attention} == {4, None}


def test_a_frozen_model_has_no_backward_and_a_frozen_matrix_half_of_one(tmp_path: Path) -> None:
    config = CONFIGS["shared keys, wide heads, tied"]
    frozen = flops_of(config, tmp_path, frozen=True)
    assert frozen.update == frozen.forward
    model = build_model(tmp_path, "policy", torch.float32).requires_grad_(False)
    model.hf.get_submodule("model.layers.0.input_layernorm").requires_grad_(True)
    partly = count_flops(model)
    # of the first layer's first products, whose inputs need the gradient of a norm, down to the head: inputs' gradients
    # and no weights'
    assert partly.update.per_token == 2 * partly.forward.per_token
    assert partly.update.per_scored_token == 2 * partly.forward.per_scored_token
    assert partly.update.attention[0].flops_per_pair == 3 * partly.forward.attention[0].flops_per_pair


def test_a_value_head_costs_its_row(tmp_path: Path) -> None:
    assert flops_of(CONFIGS["every head its own keys"], tmp_path, head="value").forward.per_scored_token == 2 * 32


def test_the_model_keeps_its_experts_implementation_and_no_gradient(tmp_path: Path) -> None:
    CONFIGS["experts"].save_pretrained(tmp_path)
    model = build_model(tmp_path, "policy", torch.float32)
    before = model.hf.get_experts_implementation()
    count_flops(model)
    assert model.hf.get_experts_implementation() == before != {"": "batched_mm"}
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_layer_that_would_mix_packed_sequences_is_refused() -> None:
    config = MiniMaxConfig(
        **SIZES,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["linear_attention", "full_attention"],
    )
    with pytest.raises(ConfigError, match="2 layers, of which 1 attend"):
        count_flops(unchecked(config))


def test_attention_beside_the_interface_is_refused() -> None:
    config = OpenAIGPTConfig(vocab_size=48, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    with pytest.raises(ConfigError, match="of which 0 attend"):
        count_flops(unchecked(config))


def test_a_convolution_beside_attention_is_refused() -> None:
    config = FalconH1Config(
        **SIZES,
        num_key_value_heads=2,
        mamba_d_ssm=32,
        mamba_n_heads=4,
        mamba_d_head=8,
        mamba_d_state=8,
        mamba_chunk_size=8,
    )
    with pytest.raises(ConfigError, match="convolutions over tokens"):
        count_flops(unchecked(config))


def test_a_model_whose_code_looks_at_values_is_refused_in_words(tmp_path: Path) -> None:
    config = JetMoeConfig(
        **{**SIZES, "num_attention_heads": None},
        kv_channels=8,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
    )
    with pytest.raises(ConfigError, match="JetMoeForCausalLM cannot be followed without data"):
        flops_of(config, tmp_path)


@given(st.lists(st.integers(1, 40), max_size=5), st.none() | st.integers(1, 50), st.integers(0, 30))
def test_pairs_are_those_of_a_causal_mask_with_its_window(
    lengths: list[int], window: int | None, num_scored: int
) -> None:
    cost = CostModel(5.0, (AttentionCost(3.0, window), AttentionCost(1.0)), 7.0)

    def pairs(length: int, window: int | None) -> int:
        i, j = np.indices((length, length))
        return int(((j <= i) & (i - j < (window or length))).sum())

    expected = [12.0 * n + 3 * pairs(n, window) + pairs(n, None) for n in lengths]
    assert cost.costs(lengths).tolist() == expected
    assert cost.total(lengths, num_scored) == sum(expected) - 7 * (sum(lengths) - num_scored)
