"""Settings of adapters, and their arithmetic and names by hand."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from rolecall.settings import ActorSection, KlSection, LoraSection, RunSettings
from rolecall.training.model import lora
from rolecall.training.model.box import Box
from rolecall.training.state.checkpoint import Part
from tests.smallest import smallest_tree

GAE = {"groups_per_batch": 1, "advantage": {"kind": "gae"}}


@pytest.mark.parametrize(
    ("sections", "words"),
    [
        ({"algorithm": {"groups_per_batch": 1, "kl": {"reference": "base", "kl_coef": 0.1}}}, "actor.lora is not set"),
        (
            {
                "algorithm": {"groups_per_batch": 1, "kl": {"reference": "base", "kl_coef": 0.1}},
                "references": {"base": {}},
            },
            "references.base: this name",
        ),
        (
            {"algorithm": {"groups_per_batch": 1, "kl": {"reference": "base", "kl_coef": 0.1, "placement": "reward"}}},
            "use placement: loss",
        ),
        (
            {"algorithm": {"groups_per_batch": 1}, "actor": {"lora": {}, "num_ranks": 2, "parallel": {"tensor": 2}}},
            "parallel.tensor",
        ),
        (
            {"algorithm": GAE, "critic": {"lora": {}, "num_ranks": 2, "parallel": {"tensor": 2}}},
            r"critic\.parallel\.tensor: .*or use backend megatron",
        ),
        ({"algorithm": {"groups_per_batch": 1}, "actor": {"lora": {"rank": 513}}}, "512"),
        ({"algorithm": {"groups_per_batch": 1}, "actor": {"lora": {"experts": True}}}, "set weights.merge_adapters"),
        (
            {"algorithm": GAE, "critic": {"lora": {"experts": True}}, "actor": {"activation_offload": True}},
            r"critic\.lora\.experts: .* set actor\.gradient_checkpointing",
        ),
        ({"algorithm": {"groups_per_batch": 1}, "actor": {"lora": {"target_modules": []}}}, "at least 1"),
    ],
)
def test_what_adapters_do_not_do_is_refused_in_words(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        RunSettings.model_validate(smallest_tree(Path("/nowhere"), **sections))


def test_a_critic_s_experts_have_adapters_though_none_are_published() -> None:
    section = {"lora": {"experts": True}}
    settings = RunSettings.model_validate(smallest_tree(Path("/nowhere"), algorithm=GAE, critic=section))
    assert settings.critic is not None
    assert settings.critic.lora == LoraSection(experts=True)


def test_what_is_kept_of_adapters_says_experts_only_where_they_have_some() -> None:
    assert "experts" not in LoraSection().as_kept()  # so that a checkpoint of a release without them is one of these
    assert LoraSection(experts=True).as_kept()["experts"] is True


def test_a_kl_to_the_base_needs_no_reference_service() -> None:
    kl = KlSection(reference="base", kl_coef=0.1)
    actor = ActorSection(lora=LoraSection())
    settings = RunSettings.model_validate(
        smallest_tree(Path("/nowhere"), algorithm={"groups_per_batch": 1, "kl": kl}, actor=actor)
    )
    assert settings.references == {}


def test_an_adapter_begins_by_every_seed_that_a_run_may_have() -> None:
    shape = torch.Size([2, 4])
    made = [lora.new_adapter("q.lora_A.default.weight", shape, seed) for seed in (0, 2**63 - 2, 2**63 - 1)]
    assert not torch.equal(made[1], made[2])
    assert not torch.equal(made[0], made[1])


def test_an_adapter_is_added_with_alpha_over_rank_and_rounded_once() -> None:
    weight, down, up = (
        torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16),
        torch.tensor([[1.0, -1.0], [0.5, 0.0]]),
        torch.tensor([[2.0, 4.0]]),
    )
    expected = torch.tensor([[1.0 + 1.5 * 4.0, 2.0 - 1.5 * 2.0]], dtype=torch.bfloat16)
    assert torch.equal(lora.merged(weight, down, up, LoraSection(rank=2, alpha=3.0)), expected)


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_are_merged_as_each_alone(transposed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    section, num_experts = LoraSection(rank=2, alpha=3.0), 3
    weight = torch.randn(num_experts, 5, 4, generator=generator)
    inputs, outputs = (5, 4) if transposed else (4, 5)
    down_ERI = torch.randn(num_experts, 2, inputs, generator=generator)
    up_EOR = torch.randn(num_experts, outputs, 2, generator=generator)
    down, up = down_ERI.reshape(num_experts * 2, inputs), up_EOR.permute(1, 2, 0).reshape(outputs, 2 * num_experts)
    ours = lora.merged_experts(weight, down, up, section, transposed=transposed)
    for expert in range(num_experts):
        delta_OI = 1.5 * up_EOR[expert] @ down_ERI[expert]
        expected = weight[expert] + (delta_OI.T if transposed else delta_OI)
        torch.testing.assert_close(ours[expert], expected)


def test_what_ranks_keep_of_experts_adapters_is_a_box_and_goes_to_peft_as_peft_has_it() -> None:
    section, (down, up) = LoraSection(rank=2), lora.adapter_names("model.layers.0.mlp.experts.down_proj")
    whole = torch.arange(5.0 * 2 * 3).view(5, 6)
    shape = lora.kept_shape(up, whole.shape, section)
    assert shape == torch.Size((5, 2, 3))
    assert lora.kept_shape(down, torch.Size((6, 4)), section) == (6, 4)
    assert lora.kept_shape("q_proj.lora_B.default.weight", whole.shape, section) == (5, 6)
    rows = Part(whole.shape, Box((2, 0), (3, 6)), (whole[2:4], whole[4:]), is_first=True).of(shape)
    held = rows.copy_to(torch.empty(rows.box.shape))
    assert torch.equal(held[..., 1], whole[2:, 1::3]), "the second expert's"
    assert torch.equal(lora.to_peft(up, held)[1], whole[2:])


def test_names_of_stacked_experts_are_those_that_peft_gives_them() -> None:
    layer = "model.layers.0.mlp.experts"
    assert lora.adapter_names(f"{layer}.gate_up_proj")[0] == f"{layer}.base_layer.lora_A.default.weight"
    assert lora.adapter_names(f"{layer}.down_proj")[1] == f"{layer}.lora_B.default.weight"
    assert lora.adapter_names(f"{layer}.3.down_proj.weight")[0] == f"{layer}.3.down_proj.lora_A.default.weight"
    assert lora.checkpoint_name(f"{layer}.base_layer.base_layer.down_proj") == f"{layer}.down_proj"
    inner = f"{layer}.base_layer.lora_A.default.weight"
    assert lora.checkpoint_name(inner) == inner
    assert lora.is_of_experts(inner)
    assert not lora.is_of_experts("model.layers.0.mlp.shared_experts.up_proj.lora_A.default.weight")


def test_names_go_to_the_model_directory_and_to_pefts_files() -> None:
    down, up = lora.adapter_names("model.layers.0.self_attn.q_proj.weight")
    assert lora.is_adapter(down)
    assert lora.is_adapter(up)
    assert lora.peft_name(up) == "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
    assert (
        lora.checkpoint_name("model.layers.0.self_attn.q_proj.base_layer.weight")
        == "model.layers.0.self_attn.q_proj.weight"
    )
    assert not lora.is_adapter("model.layers.0.self_attn.q_proj.base_layer.weight")
