"""Models that cannot be trained exactly are refused by name, on the meta device, and those that can are built without
dropout.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import linear
from transformers import AutoConfig, AutoModelForCausalLM

from rolecall.errors import ConfigError
from rolecall.training.account.flops import count_flops
from rolecall.training.model.packed_model import PackedModel, PolicyModel, build_model, state_buffers
from rolecall.training.model.supported import check_head, without_dropout

TINY = {
    "num_hidden_layers": 1,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def built(path: Path, kind: str, **changes: Any) -> PackedModel:
    AutoConfig.for_model(kind, **(TINY | changes)).save_pretrained(path)
    return build_model(path, "policy", torch.float32)


@pytest.mark.parametrize(
    "kind", ["llama", "qwen2", "qwen3", "mistral", "mixtral", "olmo2", "phi3", "gemma3_text", "smollm3"]
)
def test_plain_causal_models_are_taken(tmp_path: Path, kind: str) -> None:
    assert built(tmp_path, kind).hf.device.type == "meta"


@pytest.mark.parametrize(
    ("kind", "changes", "scale"),
    [
        ("granite", {"logits_scaling": 4.0}, 0.25),
        ("cohere", {"logit_scale": 0.5}, 0.5),
        ("hyperclovax", {"logits_scaling": 3}, 3.0),
        ("minicpm3", {"dim_model_base": 8}, 0.25),
        ("gemma2", {"final_logit_softcapping": 30.0}, 1.0),
        ("llama", {}, 1.0),
    ],
)
def test_a_constant_factor_of_the_logits_is_found(
    tmp_path: Path, kind: str, changes: dict[str, Any], scale: float
) -> None:
    model = built(tmp_path, kind, **changes)
    assert isinstance(model, PolicyModel)
    assert model.logit_scale == scale


def test_biases_that_experts_are_chosen_by_are_no_parameters_and_stay_in_float32(tmp_path: Path) -> None:
    mixture = {"num_experts": 4, "num_experts_per_tok": 2, "n_routed_experts": 4, "moe_intermediate_size": 16}
    for kind, name in (("afmoe", "expert_bias"), ("glm4_moe", "gate.e_score_correction_bias")):
        sizes = TINY | mixture | {"num_hidden_layers": 2, "num_dense_layers": 1, "first_k_dense_replace": 1}
        AutoConfig.for_model(kind, **sizes).save_pretrained(tmp_path / kind)
        hf = build_model(tmp_path / kind, "policy", torch.bfloat16).hf
        assert state_buffers(hf)[f"model.layers.1.mlp.{name}"].dtype == torch.float32
        assert all(parameter.dtype == torch.bfloat16 for parameter in hf.parameters())


@pytest.mark.parametrize(
    ("kind", "cap"), [("gemma2", 30.0), ("gemma3_text", 20.0), ("gemma4_text", 7.0), ("llama", None)]
)
def test_a_soft_cap_of_the_logits_is_found(tmp_path: Path, kind: str, cap: float | None) -> None:
    model = built(tmp_path, kind, **({"final_logit_softcapping": cap} if cap else {}))
    assert isinstance(model, PolicyModel)
    assert model.logit_cap == (pytest.approx(cap) if cap else None)


Bend = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""What is made of the last hidden states and the output layer's weight."""


@pytest.mark.parametrize(
    ("bend", "found"),
    [
        (lambda h, w: 6 * torch.tanh(linear(h, w) * 0.5 / 4), (0.75, 8.0)),
        (lambda h, w: (linear(h, w) / 3).tanh_().mul_(3).div_(0.5), (2.0, 3.0)),
        (lambda h, w: linear(torch.tanh(h), w), "tanh"),
        (lambda h, w: torch.tanh(torch.tanh(linear(h, w))), "tanh"),
        (lambda h, w: linear(torch.tanh(linear(h, w)), w.t()), "mm after tanh"),
        (lambda h, w: torch.tanh(linear(h, w)) + 1, "add"),
        (lambda h, w: torch.sigmoid(linear(h, w)), "sigmoid"),
    ],
)
def test_what_is_done_to_logits_is_taken_exactly_or_refused(bend: Bend, found: tuple[float, float] | str) -> None:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **TINY))
    model.forward = lambda **given: bend(model.model.forward(**given).last_hidden_state, model.lm_head.weight)
    if isinstance(found, str):
        with pytest.raises(ConfigError, match=rf"a constant factor and a soft cap \({found}\)"):
            check_head(model)
    else:
        assert check_head(model) == pytest.approx(found)


@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("vaultgemma", r"caps the scores of attention softly \(attn_logit_softcapping 50.0 of config.json\)"),
        ("gemma3n_text", "is a Gemma 3n, of which transformers cannot compute what its files lack"),
        ("phi", "PhiForCausalLM has a bias in its output layer"),
        ("mamba", "is of model_type 'mamba', which keeps a state from token to token"),
        ("falcon", "a falcon model .* cannot be trained packed"),
        ("opt", "OPTAttention is not told how sequences are packed"),
        ("t5", "is an encoder-decoder model"),
        ("vit", "a vit model .* cannot be trained packed"),
        ("phimoe", "a phimoe model draws its experts at random while it trains"),
    ],
)
def test_models_whose_numbers_would_be_wrong_are_refused_with_the_reason(tmp_path: Path, kind: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        built(tmp_path, kind)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"architectures": ["Qwen3ForSequenceClassification"]},
            "holds Qwen3ForSequenceClassification, which is not the causal language model Qwen3ForCausalLM",
        ),
        ({"model_type": "qwen99"}, "the installed transformers knows no model_type 'qwen99' of config.json"),
        (
            {"quantization_config": {"quant_method": "gptq", "bits": 4}},
            r"is quantized \(gptq\), and quantized weights cannot be trained",
        ),
        ({"num_key_value_heads": 3}, "num_attention_heads 4, not a multiple of num_key_value_heads 3"),
        ({"head_dim": None, "hidden_size": 33}, "hidden_size 33, not a multiple of num_attention_heads 4"),
    ],
)
def test_a_configuration_of_another_kind_of_model_is_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, Any], told: str
) -> None:
    config = AutoConfig.for_model("qwen3", **TINY, head_dim=8).to_dict() | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match=told):
        build_model(tmp_path, "policy", torch.float32)


def test_a_model_that_could_keep_a_state_and_has_no_such_layer_is_taken(tmp_path: Path) -> None:
    dense = {"num_local_experts": 0, "position_embedding_type": "rope", "mamba_n_heads": 4, "mamba_d_head": 16}
    model = built(tmp_path, "granitemoehybrid", layer_types=["attention"], **dense)
    assert count_flops(model).forward.per_token > 0
    with pytest.raises(ConfigError, match="'granitemoehybrid', which keeps a state from token to token"):
        built(tmp_path, "granitemoehybrid", layer_types=["mamba"], **dense)
    with torch.device("meta"):
        layer = AutoModelForCausalLM.from_config(
            AutoConfig.for_model("granitemoehybrid", **TINY, layer_types=["mamba"], **dense)
        )
    with pytest.raises(ConfigError, match="GraniteMoeHybridForCausalLM keeps a state from token to token"):
        check_head(layer)  # whatever its configuration says


def test_a_model_is_built_without_its_dropout(tmp_path: Path) -> None:
    model = built(tmp_path, "gpt2", resid_pdrop=0.1, embd_pdrop=0.2, attn_pdrop=0.3)
    assert {module.p for module in model.modules() if isinstance(module, nn.Dropout)} == {0.0}
    assert built(tmp_path, "qwen3", attention_dropout=0.1).hf.config.attention_dropout == 0.0


def test_a_router_is_built_without_its_jitter(tmp_path: Path) -> None:
    config = AutoConfig.for_model("mixtral", **TINY, num_local_experts=4, router_jitter_noise=0.1)
    without_dropout(config)
    model = AutoModelForCausalLM.from_config(config).train()
    hidden = torch.randn(1, 3, TINY["hidden_size"])
    assert torch.equal(model.model.layers[0].mlp(hidden.clone()), model.model.layers[0].mlp(hidden.clone()))
    parted = AutoConfig.for_model("dbrx", ffn_config={"moe_jitter_eps": 0.1})
    without_dropout(parted)
    assert parted.ffn_config.moe_jitter_eps is None
