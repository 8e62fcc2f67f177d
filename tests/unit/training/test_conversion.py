"""Fused experts from checkpoints that keep them apart: a rank reads its own, bit for bit what the whole would have
given.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    MixtralConfig,
    Mxfp4Config,
    PretrainedConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from rolecall.data.model.trainable import check_trainable
from rolecall.errors import ConfigError
from rolecall.training.model.conversion import Conversion
from rolecall.training.model.huggingface import ModelFiles
from tests.tiny_models import write_gpt_oss

NUM_EXPERTS = 6
SIZES: dict[str, Any] = {
    "vocab_size": 16,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "pad_token_id": 0,
}
LATENT = {"q_lora_rank": 4, "kv_lora_rank": 4, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 4}
CONFIGS: dict[str, PretrainedConfig] = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, moe_intermediate_size=6, head_dim=4, num_experts=NUM_EXPERTS),
    "qwen2_moe": Qwen2MoeConfig(
        **SIZES, moe_intermediate_size=6, num_experts=NUM_EXPERTS, shared_expert_intermediate_size=4
    ),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=NUM_EXPERTS),
    "deepseek_v3": DeepseekV3Config(
        **SIZES,
        **LATENT,
        moe_intermediate_size=6,
        n_routed_experts=NUM_EXPERTS,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
    ),
}


def test_the_copy_of_an_mxfp4_gpt_oss_that_is_named_as_remedy_has_every_weight(tmp_path: Path) -> None:
    """transformers would leave the experts out of one in the original format."""
    path = write_gpt_oss(tmp_path / "whole")
    whole = load_file(path / "model.safetensors")
    packed = {name: tensor.bfloat16() for name, tensor in whole.items() if tensor.ndim < 3}
    for name, tensor in whole.items():
        if tensor.ndim == 3:
            num_experts, width, num_rows = tensor.shape
            blocks = (num_experts, num_rows, width // 32)
            packed[f"{name}_blocks"] = torch.full((*blocks, 16), 0x22, dtype=torch.uint8)  # 1.0, twice
            packed[f"{name}_scales"] = torch.full(blocks, 126, dtype=torch.uint8)  # 2^-1
    save_file(packed, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "quantization_config": {"quant_method": "mxfp4"}}))
    with pytest.raises(ConfigError, match=r"Mxfp4Config\(dequantize=True\).*save_original_format=False"):
        check_trainable(path)
    model = AutoModelForCausalLM.from_pretrained(
        path, quantization_config=Mxfp4Config(dequantize=True), dtype="bfloat16"
    )
    model.save_pretrained(tmp_path / "copy", save_original_format=False)
    check_trainable(tmp_path / "copy")
    copy = load_file(tmp_path / "copy" / "model.safetensors")
    assert {name: tensor.shape for name, tensor in copy.items()} == {name: whole[name].shape for name in whole}
    assert all((tensor == 0.5).all() for tensor in copy.values() if tensor.ndim == 3)


class Reader:
    """The tensors of a model directory, and which were asked for."""

    def __init__(self, path: Path) -> None:
        self.files = ModelFiles(path)
        self.names: list[str] = []

    def read(self, name: str) -> torch.Tensor:
        self.names.append(name)
        return self.files.tensor(name)


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_rank_reads_its_own_experts_and_no_others(kind: str, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS[kind])
    model.save_pretrained(tmp_path)
    conversion = Conversion(model)
    fused = {name: parameter for name, parameter in model.named_parameters() if parameter.ndim == 3}
    assert len(fused) == (2 if kind == "deepseek_v3" else 4), "two of each layer with experts"
    for name, parameter in fused.items():
        whole = Reader(tmp_path)
        assert torch.equal(conversion.from_checkpoint(name, parameter.shape, whole.read, slice(None)), parameter)
        for start, end in [(0, 2), (2, 6), (5, 6), (0, 6)]:
            own = Reader(tmp_path)
            assert torch.equal(
                conversion.from_checkpoint(name, parameter.shape, own.read, slice(start, end)), parameter[start:end]
            )
            assert len(own.names) * NUM_EXPERTS == len(whole.names) * (end - start)
            assert all(any(f".{expert}." in source for expert in range(start, end)) for source in own.names)
        nothing = Reader(tmp_path)
        assert conversion.from_checkpoint(name, parameter.shape, nothing.read, slice(6, 6)).shape == (
            0,
            *parameter.shape[1:],
        )
        assert not nothing.names, "a rank may keep no expert"


def test_a_renamed_tensor_of_another_size_is_refused_whatever_rows_are_wanted() -> None:
    model = AutoModelForCausalLM.from_config(CONFIGS["mixtral"])
    conversion, name = Conversion(model), "model.layers.0.mlp.gate.weight"
    shape = model.get_parameter(name).shape
    assert list(conversion.to_checkpoint(name, torch.empty(shape, device="meta"))) != [name]
    for rows in (slice(0, 2), slice(0, NUM_EXPERTS)):
        with pytest.raises(ConfigError, match=r"has the shape \(8, 8\), not \(6, 8\)"):
            conversion.from_checkpoint(name, shape, lambda _: torch.zeros(NUM_EXPERTS + 2, 8), rows)
