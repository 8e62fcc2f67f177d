"""Models with recurrent layers, packed: each sequence gets the numbers and gradients that plain transformers gives it
alone.
"""

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from rolecall.data.model.files import tensor_names
from rolecall.errors import ConfigError
from rolecall.training.account.flops import count_flops
from rolecall.training.model.attention.packed import plan_attention
from rolecall.training.model.packed_model import PackedModel, build_model, fill_buffers
from rolecall.training.model.prefixes import find_prefixes
from rolecall.training.model.recurrent import KNOWN, recurrent_layers

TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
KINDS: dict[str, dict[str, Any]] = {
    "qwen3_next": EXPERTS | {"shared_expert_intermediate_size": 16},
    "qwen3_5_text": {"tie_word_embeddings": True},
    "qwen3_5_moe_text": EXPERTS | {"shared_expert_intermediate_size": 16},
}
PROMPT_TOKENS = 70
"""More than a chunk of 64 tokens, in which the layers compute."""


def built(path: Path, kind: str) -> tuple[PackedModel, Any]:
    """A packed model and a plain one, of the same random weights."""
    torch.manual_seed(0)
    plain = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(kind, **(TINY | KINDS[kind])), attn_implementation="sdpa"
    )
    plain.save_pretrained(path)
    model = build_model(path, "policy", torch.float32).to_empty(device="cpu")
    fill_buffers(model)
    model.hf.load_state_dict(plain.state_dict())
    model.hf.tie_weights()
    return model, plain


def distance(ours: torch.Tensor, theirs: Any) -> float:
    """Norm of the difference, in norms of `theirs`."""
    return float((ours.detach() - theirs.detach()).norm() / theirs.detach().norm())


def sequences() -> list[torch.Tensor]:
    """Three responses to one prompt, and others of many lengths."""
    draw = torch.Generator().manual_seed(1)
    prompt, *others = (torch.randint(2, 64, (n,), generator=draw) for n in (PROMPT_TOKENS, 3, 40, 77, 1, 5, 130))
    return [*(torch.cat([prompt, response]) for response in others[:3]), *others[3:]]


@pytest.mark.parametrize("shared", [False, True], ids=["whole", "shared beginnings"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_sequence_of_a_pack_is_computed_as_if_it_were_alone(tmp_path: Path, kind: str, shared: bool) -> None:
    model, plain = built(tmp_path, kind)
    assert model.takes_buckets
    assert [name for name, _ in model.hf.named_parameters()] == [name for name, _ in plain.named_parameters()]
    each = sequences()
    lengths = [len(ids) for ids in each]
    prefixes = find_prefixes([ids.numpy() for ids in each], torch.device("cpu")) if shared else None
    assert (prefixes is not None) == shared
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    plan = plan_attention(lengths, cu_seqlens, torch.float32, None, prefixes, takes_buckets=True)
    packed_NH = model.hidden_NH(torch.cat(each), torch.cat([torch.arange(n) for n in lengths]), plan)
    if prefixes is not None:
        packed_NH = prefixes.spread(packed_NH)
    alone_NH = torch.cat([plain.base_model(ids[None], use_cache=False).last_hidden_state[0] for ids in each])
    assert distance(packed_NH, alone_NH) < 1e-5
    weight_NH = torch.randn(packed_NH.shape, generator=torch.Generator().manual_seed(2))
    (packed_NH * weight_NH).sum().backward()  # type: ignore[no-untyped-call]
    (alone_NH * weight_NH).sum().backward()  # type: ignore[no-untyped-call]
    wanted = {name: parameter.grad for name, parameter in plain.named_parameters()}
    assert sum(grad is None for grad in wanted.values()) <= 1  # the output layer's, which hidden states have not seen
    for name, parameter in model.hf.named_parameters():
        assert (parameter.grad is None) == (wanted[name] is None)
        assert parameter.grad is None or distance(parameter.grad, wanted[name]) < 1e-3, name


@pytest.mark.parametrize("kind", KINDS)
def test_flops_are_those_of_the_matrices_and_the_rule_whatever_computes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Kernels such as flash-linear-attention's cannot be called without data."""
    AutoConfig.for_model(kind, **(TINY | KINDS[kind])).save_pretrained(tmp_path)
    model = build_model(tmp_path, "policy", torch.float32)
    code = sys.modules[type(model.hf).__module__]
    for name in ("torch_chunk_gated_delta_rule", "causal_conv1d_fn"):
        assert hasattr(code, name)
        monkeypatch.setattr(code, name, None)
    flops = count_flops(model)
    assert flops.update.per_token == pytest.approx(3 * flops.forward.per_token)
    if kind != "qwen3_5_text":  # of the others each token meets two experts of four
        return
    matrices = sum(part.weight.numel() for part in model.hf.base_model.modules() if isinstance(part, nn.Linear))
    assert flops.forward.per_token == 2 * matrices + 3 * 4 * 6 * 8 * 12


def test_a_language_model_that_transformers_saves_alone_is_read(tmp_path: Path) -> None:
    text = TINY | KINDS["qwen3_5_text"]
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision, tie_word_embeddings=True)
    AutoModelForImageTextToText.from_config(config).save_pretrained(tmp_path / "both")
    alone = AutoModelForCausalLM.from_pretrained(tmp_path / "both")
    alone.save_pretrained(tmp_path / "alone", save_original_format=False)
    model = build_model(tmp_path / "alone", "policy", torch.float32)
    assert tensor_names(tmp_path / "alone") == {name for name, _ in model.hf.named_parameters()}


def test_a_model_whose_recurrent_layers_are_not_known_is_refused(tmp_path: Path) -> None:
    AutoConfig.for_model("olmo_hybrid", **(TINY | {"linear_num_key_heads": 4})).save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match="'olmo_hybrid', which keeps a state from token to token"):
        build_model(tmp_path, "policy", torch.float32)


def test_every_known_layer_is_compared(tmp_path: Path) -> None:
    found = set()
    for kind in KINDS:
        AutoConfig.for_model(kind, **(TINY | KINDS[kind])).save_pretrained(tmp_path / kind)
        found |= {
            base.__name__
            for layer in recurrent_layers(build_model(tmp_path / kind, "policy", torch.float32).hf)
            for base in type(layer).__mro__
        }
    assert found >= KNOWN


def test_a_recurrent_layer_without_a_plan_or_with_a_mask_is_refused(tmp_path: Path) -> None:
    layer = recurrent_layers(built(tmp_path, "qwen3_5_text")[0].hf)[0]
    x_1LH = torch.zeros(1, 3, 32)
    for given in ({}, {"packed": plan_attention([3], torch.tensor([0, 3]), torch.float32), "attention_mask": x_1LH}):
        with pytest.raises(ConfigError, match="is not told how sequences are packed, or is given a mask"):
            layer(x_1LH, **given)


@pytest.mark.gpu
@pytest.mark.parametrize("shared", [False, True], ids=["whole", "shared beginnings"])
def test_flash_attention_beside_recurrent_layers_agrees_with_float32(tmp_path: Path, shared: bool) -> None:
    model = built(tmp_path, "qwen3_5_text")[0].cuda()
    each = [ids.cuda() for ids in sequences()]
    lengths = [len(ids) for ids in each]
    cuda = torch.device("cuda")
    prefixes = find_prefixes([ids.cpu().numpy() for ids in each], cuda) if shared else None
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=cuda)
    positions = torch.cat([torch.arange(n, device=cuda) for n in lengths])

    def hidden(dtype: torch.dtype, *, flash: bool) -> torch.Tensor:
        plan = plan_attention(lengths, cu_seqlens, dtype, None, prefixes, takes_buckets=True)
        assert plan.flash == (dtype == torch.bfloat16)
        with torch.no_grad():
            return model.to(dtype).hidden_NH(torch.cat(each), positions, replace(plan, flash=flash)).float()

    exact = hidden(torch.float32, flash=False)
    padded, found = (hidden(torch.bfloat16, flash=flash) for flash in (False, True))
    assert distance(found, exact) < 1.25 * distance(padded, exact)
