"""Stages of a pipeline: the layers that each has, and what a rank of the largest holds."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from rolecall.data.megatron.stages import RankParameters, rank_parameters, split_layers
from rolecall.data.model.files import model_shapes
from rolecall.settings import ActorSection, CriticSection, LayoutSection, MegatronSection

MIXTURE: dict[str, Any] = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2}


def write_sizes(
    path: Path, num_layers: int, layer: int, head: int, experts: int = 0, *, tied: bool = False, **config: Any
) -> Path:
    """A model directory whose files hold no numbers: of layers of so many parameters beside so many in experts, and
    embedding and head of as many each.
    """
    shapes = {"model.embed_tokens.weight": [head, 1], **({} if tied else {"lm_head.weight": [1, head]})}
    for index in range(num_layers):
        shapes[f"model.layers.{index}.mlp.gate_proj.weight"] = [layer]
        if experts:
            shapes[f"model.layers.{index}.mlp.experts.0.up_proj.weight"] = [experts]
    return write_shapes(path, shapes, {"num_hidden_layers": num_layers, **config})


def write_shapes(path: Path, shapes: dict[str, list[int]], config: dict[str, Any]) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps(config))
    entries = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    header = json.dumps(entries).encode()
    (path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    return path


def stages(path: Path, pipeline: int, virtual: int = 1) -> tuple[int, ...]:
    return split_layers(path, LayoutSection(pipeline=pipeline), MegatronSection(virtual_stages=virtual))


@pytest.mark.parametrize(
    ("num_layers", "head", "num_stages", "split"),
    [
        (4, 100, 2, (2, 2)),
        (48, 540, 4, (12, 12, 12, 12)),
        (3, 30, 2, (2, 1)),
        (5, 30, 4, (1, 1, 2, 1)),
        (94, 30, 8, (11, 12, 12, 12, 12, 12, 12, 11)),
        (94, 270, 8, (12, 12, 12, 12, 12, 12, 12, 10)),
        (61, 150, 8, (7, 8, 8, 8, 8, 8, 8, 6)),
        (61, 30, 4, (15, 15, 16, 15)),
        (7, 1000, 4, (2, 2, 2, 1)),
    ],
)
def test_the_last_stages_head_counts_as_layers_and_no_stage_has_more_than_its_share(
    tmp_path: Path, num_layers: int, head: int, num_stages: int, split: tuple[int, ...]
) -> None:
    assert stages(write_sizes(tmp_path, num_layers, 100, head), num_stages) == split


def test_experts_count_where_they_are_active(tmp_path: Path) -> None:
    """Of 800 parameters in eight experts two are active: a layer of 100 + 200, and a head of as much as two of them."""
    mixture = write_sizes(tmp_path, 10, 100, 600, 800, **MIXTURE)
    assert stages(mixture, 4) == (3, 3, 3, 1)
    assert stages(write_sizes(tmp_path, 10, 900, 600), 4) == (2, 3, 3, 2)


def test_blocks_after_the_last_layer_count_nowhere(tmp_path: Path) -> None:
    """They predict further tokens, and are not computed."""
    path, setting = write_sizes(tmp_path, 7, 100, 250), "model.path"
    section = ActorSection.model_validate({"num_ranks": 2, "backend": "megatron", "parallel": {"pipeline": 2}})
    split, held = stages(path, 3), rank_parameters(path, section, MegatronSection(), setting)
    shapes = {name: list(shape) for name, shape in model_shapes(path, setting).items()}
    write_shapes(path, shapes | {"model.layers.7.eh_proj.weight": [10_000]}, {"num_hidden_layers": 7})
    assert stages(path, 3) == split
    assert rank_parameters(path, section, MegatronSection(), setting) == held


def test_virtual_stages_are_split_as_stages_of_their_own(tmp_path: Path) -> None:
    model = write_sizes(tmp_path, 5, 100, 30)
    assert stages(model, 2, 2) == stages(model, 4)


@pytest.mark.parametrize("head", [0, 40, 130, 250])
def test_no_split_within_the_share_is_faster(tmp_path: Path, head: int) -> None:
    def slowest(split: tuple[int, ...]) -> int:
        return max([100 * count for count in split[:-1]] + [100 * split[-1] + head])

    for num_stages in (2, 3, 5):
        for num_layers in range(num_stages, 14):
            found = stages(write_sizes(tmp_path, num_layers, 100, head), num_stages)
            shares = range(1, -(-num_layers // num_stages) + 1)
            every = [split for split in product(shares, repeat=num_stages) if sum(split) == num_layers]
            assert found in every
            assert slowest(found) == min(map(slowest, every)), (num_layers, num_stages)


@pytest.mark.parametrize("tied", [False, True])
def test_a_critic_has_no_head_that_its_last_stage_makes_room_for(tmp_path: Path, tied: bool) -> None:
    model, megatron = write_sizes(tmp_path, 8, 100, 300, tied=tied), MegatronSection()
    assert split_layers(model, LayoutSection(pipeline=3), megatron) == (3, 3, 2)
    assert split_layers(model, LayoutSection(pipeline=3), megatron, head="value") == (2, 3, 3)
    sizes = {"num_ranks": 3, "parallel": {"pipeline": 3}}
    assert rank_parameters(model, CriticSection.model_validate(sizes), megatron, "critic.path").held == 500
    alone = rank_parameters(model, CriticSection(), megatron, "critic.path")
    assert alone == RankParameters(8 * 100 + 300, 8 * 100 + 300)


@pytest.mark.parametrize("tied", [False, True])
def test_a_rank_of_the_largest_stage_is_counted(tmp_path: Path, tied: bool) -> None:
    model = write_sizes(tmp_path, 5, 100, 30, 800, tied=tied, **MIXTURE)

    def most(num_ranks: int, virtual: int = 1, **parallel: int) -> RankParameters:
        section = ActorSection.model_validate({"num_ranks": num_ranks, "backend": "megatron", "parallel": parallel})
        return rank_parameters(model, section, MegatronSection(virtual_stages=virtual), "model.path")

    copy = 30 if not tied else 0
    assert most(1) == RankParameters(5 * 900 + 30 + copy, 5 * 900 + 30 + copy)
    assert most(2, pipeline=2) == RankParameters(3 * 900 + 30, 3 * 900 + 30)
    assert most(8, pipeline=2, tensor=2, expert=4) == RankParameters(330 / 2 + 2400 / 4, (330 + 2400) / 4)
    assert most(4, pipeline=4) == RankParameters(2 * 900, 2 * 900)
    assert most(2, virtual=2, pipeline=2) == RankParameters(3 * 900 + 30, 3 * 900 + 30), "layers 0, 2 and 3"
    assert most(1).trained_bytes(2) == (5 * 900 + 30 + copy) * (2 + 4 + 4 + 8)
    assert most(1).trained_bytes(4) == (5 * 900 + 30 + copy) * (4 + 4 + 8)


def test_a_rank_s_adapters_are_counted_beside_a_base_that_is_not_trained(tmp_path: Path) -> None:
    """Half of each is cut as its matrix is: B of a matrix of which ranks have rows, A where they have columns."""
    layer = {"self_attn.q_proj": [40, 10], "self_attn.o_proj": [10, 40], "mlp.up_proj": [60, 10]}
    shapes = {f"model.layers.{i}.{name}.weight": shape for i in range(3) for name, shape in layer.items()}
    model = write_shapes(tmp_path, shapes | {"model.embed_tokens.weight": [70, 10]}, {"num_hidden_layers": 3})
    lora = {"rank": 2, "target_modules": ["q_proj", "o_proj"]}

    def most(num_ranks: int, **parallel: int) -> RankParameters:
        tree = {"num_ranks": num_ranks, "backend": "megatron", "parallel": parallel, "lora": lora}
        return rank_parameters(model, ActorSection.model_validate(tree), MegatronSection(), "model.path")

    base, pair = 3 * (400 + 400 + 600), 2 * (40 + 10)
    assert most(1) == RankParameters(base + 700, 3 * 2 * pair, 3 * 2 * pair)
    assert most(2) == RankParameters(base + 700, 3 * pair, 3 * 2 * pair)
    cut = 2 * (40 / 2 + 10)
    assert most(4, tensor=2) == RankParameters(base / 2 + 350, 3 * 2 * cut / 2, 3 * 2 * cut)
    assert most(2, pipeline=2).adapters == 2 * 2 * pair, "two of three layers"
    assert most(1).parameter_bytes(2) == (base + 700) * 2 + 6 * pair * 4
    assert most(2).trained_bytes(2) == (base + 700) * 2 + 6 * pair * (4 + 4) + 3 * pair * 8
    assert most(2).trained_bytes(4) - most(2).trained_bytes(2) == (base + 700) * 2


def test_experts_adapters_are_on_the_ranks_of_their_experts_alone(tmp_path: Path) -> None:
    layer = {
        "self_attn.q_proj.weight": [40, 10],
        "mlp.experts.gate_up_proj": [8, 60, 10],
        "mlp.experts.down_proj": [8, 10, 30],
    }
    shapes = {f"model.layers.{i}.{name}": shape for i in range(3) for name, shape in layer.items()}
    model = write_shapes(
        tmp_path, shapes | {"model.embed_tokens.weight": [70, 10]}, {**MIXTURE, "num_hidden_layers": 3}
    )

    def most(num_ranks: int, **parallel: int) -> RankParameters:
        lora = {"rank": 2, "target_modules": ["q_proj"], "experts": True}
        tree = {"num_ranks": num_ranks, "backend": "megatron", "parallel": parallel, "lora": lora}
        return rank_parameters(model, ActorSection.model_validate(tree), MegatronSection(), "model.path")

    dense, spread = 2 * (40 + 10), 2 * 8 * (60 + 10 + 10 + 30)
    assert most(1).adapters == most(1).optimized == 3 * (dense + spread)
    assert most(4, expert=4).adapters == 3 * (dense + spread / 4)
    assert most(4, expert=4).optimized == 3 * (dense + spread) / 4
    assert most(2, pipeline=2).adapters == 2 * (dense + spread), "two of three layers"
