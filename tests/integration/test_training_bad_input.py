"""What a training engine says to model directories that do not fit: an error that names the tensor or setting, before
anything is trained.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rolecall.errors import ConfigError
from rolecall.settings import OptimizerSection
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.model.packed_model import Head
from rolecall.training.options import EngineOptions
from tests.tiny_models import write_qwen3, write_qwen3_moe

pytestmark = pytest.mark.usefixtures("one_rank")

Tensors = dict[str, torch.Tensor]


def engine_of(path: Path, head: Head = "policy") -> FsdpEngine:
    return FsdpEngine(
        EngineOptions(path=path, head=head, dtype="float32", optimizer=OptimizerSection()), device=torch.device("cpu")
    )


def configured(**changes: Any) -> Callable[[Path], None]:
    def damage(model: Path) -> None:
        config = json.loads((model / "config.json").read_text()) | changes
        (model / "config.json").write_text(json.dumps(config))

    return damage


def stored(change: Callable[[Tensors], Tensors]) -> Callable[[Path], None]:
    def damage(model: Path) -> None:
        save_file(change(load_file(model / "model.safetensors")), model / "model.safetensors")

    return damage


QUERY = "model.layers.1.self_attn.q_proj.weight"
DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (
        configured(num_attention_heads=2),
        r"q_proj.weight' has the shape \(64, 64\), not \(32, 64\) as its config.json says; use matching files",
    ),
    (configured(num_key_value_heads=4), r"k_proj.weight' has the shape \(32, 64\), not \(64, 64\)"),
    (configured(vocab_size=200), r"embed_tokens.weight' has the shape \(288, 64\), not \(200, 64\)"),
    (
        configured(num_hidden_layers=1, layer_types=["full_attention"]),
        r"11 tensors have no place in the Qwen3ForCausalLM that its config.json describes, "
        r"'model.layers.1.input_layernorm.weight' the",
    ),
    (configured(num_hidden_layers=3, layer_types=["full_attention"] * 3), r"has no tensor 'model.layers.2"),
    (
        configured(num_hidden_layers=3),
        r"transformers does not take its config.json .*`num_hidden_layers` \(3\) must be equal",
    ),
    (
        configured(model_type="llama", architectures=["LlamaForCausalLM"]),
        r"4 tensors have no place in the LlamaForCausalLM .*q?k?_norm.weight' the first",
    ),
    (
        stored(lambda tensors: {**tensors, QUERY: tensors[QUERY].to(torch.int8)}),
        "q_proj.weight' is stored as torch.int8, which is quantized or no weight",
    ),
    (
        stored(lambda tensors: {**tensors, QUERY: tensors[QUERY].to(torch.float8_e4m3fn)}),
        "q_proj.weight' is stored as torch.float8_e4m3fn",
    ),
    (
        stored(lambda tensors: {name: tensor for name, tensor in tensors.items() if name != QUERY}),
        f"has no tensor '{QUERY}'",
    ),
    (
        stored(lambda tensors: {**tensors, "model.extra.weight": torch.zeros(2)}),
        "1 tensors have no place .* 'model.extra.weight' the first",
    ),
]


@pytest.mark.parametrize(("damage", "told"), DAMAGES, ids=[told[:30] for _, told in DAMAGES])
def test_weights_that_are_not_those_of_the_configuration_are_refused_by_name(
    tmp_path: Path, damage: Callable[[Path], None], told: str
) -> None:
    damage(write_qwen3(tmp_path))
    with pytest.raises(ConfigError, match=told):
        engine_of(tmp_path)


def test_what_another_head_needs_or_old_checkpoints_hold_is_no_surplus(tmp_path: Path) -> None:
    dense, moe = write_qwen3(tmp_path / "dense"), write_qwen3_moe(tmp_path / "moe")
    tied = write_qwen3(tmp_path / "tied", tied=True)
    stored(lambda tensors: {**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()})(tied)
    stored(lambda tensors: {**tensors, "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)})(dense)
    for path in (dense, moe, tied):
        for head in ("policy", "value"):
            engine_of(path, head)
