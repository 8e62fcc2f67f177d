"""Where images stand among tokens, what a vision tower attends to, and what it costs."""

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForImageTextToText

from rolecall.columns import IMAGES
from rolecall.data.model.adapters import num_adapter_parameters
from rolecall.data.model.files import read_model
from rolecall.data.model.trainable import check_parallel
from rolecall.errors import ConfigError
from rolecall.settings import ParallelSection
from rolecall.training.account.flops import count_flops
from rolecall.training.model.attention.packed import attend_packed, plan_attention
from rolecall.training.model.lora import add_adapters
from rolecall.training.model.packed_model import build_model, language_layers, layers
from rolecall.training.packing.images import ImageReader, ReadImages, place_images
from rolecall.training.packing.pack import pack
from tests.tiny_models import VisionFamily, write_vision
from tests.vision_rig import CPU, SHOWS, SQUARE, TALL, WIDE, adapters, make_row, make_rows, oracle_inputs, read_images

FAMILIES: tuple[VisionFamily, ...] = get_args(VisionFamily)


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {family: write_vision(root / family, family) for family in FAMILIES}


@pytest.mark.parametrize("family", FAMILIES)
def test_rotary_positions_are_those_of_transformers(paths: dict[str, Path], family: str) -> None:
    path = paths[family]
    model = AutoModelForImageTextToText.from_pretrained(path).model
    for row in [each for each in make_rows() if (each["token_ids"] == SHOWS).any()]:
        placed = place_images([row["token_ids"]], [row[IMAGES]], read_images(path, [row]))
        assert placed is not None
        given = oracle_inputs(path, row)
        expected, _ = model.get_rope_index(
            given["input_ids"], mm_token_type_ids=given["mm_token_type_ids"], image_grid_thw=given["image_grid_thw"]
        )
        assert np.array_equal(placed.position_3N, expected[:, 0].numpy())


def test_a_feature_is_shown_by_one_token_after_another_and_an_image_is_read_once(paths: dict[str, Path]) -> None:
    rows = [make_row([WIDE, TALL], [80]), make_row([TALL], [SHOWS, 80])]
    placed = place_images(
        [row["token_ids"] for row in rows],
        [row[IMAGES] for row in rows],
        read_images(paths["qwen3_vl"], rows, torch.bfloat16),
    )
    assert placed is not None
    assert [image.grid for image in placed.images] == [(1, 4, 10), (1, 10, 4)]
    assert {image.patches_PC.dtype for image in placed.images} == {torch.bfloat16}
    first, second = (feature_T[feature_T >= 0].tolist() for feature_T in placed.features)
    assert (first, second) == (list(range(20)), list(range(10, 20)))


def test_microbatches_that_show_an_image_have_one_copy_of_it(paths: dict[str, Path]) -> None:
    path, told = paths["qwen3_vl"], list[None]()
    images = ReadImages(ImageReader(path, torch.float32, lambda: told.append(None)))
    shown = []
    for row in (make_row([WIDE], [80]), make_row([TALL, WIDE], [81])):
        assert all(each is None for each in images.read([row]))
        microbatch = pack([row], [], temperature=1.0, device=CPU, images=images)
        assert microbatch.shown is not None
        shown.append(microbatch.shown.patches_PC)
    assert shown[0][0] is shown[1][1]
    assert len(told) == 2


def test_a_microbatch_without_images_is_packed_as_text(paths: dict[str, Path]) -> None:
    rows = [make_row([], [80, 81]), make_row([], [90])]
    images = read_images(paths["qwen3_vl"], rows)
    microbatch = pack(rows, [], temperature=1.0, device=CPU, images=images)
    assert microbatch.shown is None
    assert microbatch.position_ids_N.shape == microbatch.token_ids_N.shape
    assert pack([], [], temperature=1.0, device=CPU, images=images).shown is None


def test_patches_attend_to_all_of_their_image_and_to_nothing_else() -> None:
    lengths = [4, 7, 4, 1]
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32)
    query, key, value = torch.randn(3, sum(lengths), 2, 8, generator=torch.Generator().manual_seed(0))
    plan = plan_attention(lengths, cu_seqlens, torch.float32, causal=False)
    assert all(bucket.kept is None for bucket in plan.buckets)  # no padding, which a query would see
    found = attend_packed(query, key, value, plan, None)
    for start, end in zip(cu_seqlens.tolist(), cu_seqlens[1:].tolist(), strict=False):
        scores = torch.einsum("qhd,khd->hqk", query[start:end], key[start:end]) / 8**0.5
        expected = torch.einsum("hqk,khd->qhd", scores.softmax(-1), value[start:end])
        torch.testing.assert_close(found[start:end], expected)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tower_costs_what_torch_counts_when_transformers_runs_it(
    paths: dict[str, Path], family: str, frozen: bool
) -> None:
    path = paths[family]
    model = build_model(path, "policy", torch.float32)
    assert model.vision is not None
    model.vision.module.requires_grad_(not frozen)
    flops = count_flops(model)
    plain = AutoModelForImageTextToText.from_pretrained(path, attn_implementation="eager").model.visual
    plain.requires_grad_(not frozen)
    for row in (make_row([WIDE], [80]), make_row([SQUARE, TALL], [80])):
        given = oracle_inputs(path, row)
        with FlopCounterMode(display=False) as counter:
            output = plain(given["pixel_values"], grid_thw=given["image_grid_thw"])
            forward = counter.get_total_flops()
            if not frozen:
                deeper = output.deepstack_features if family.startswith("qwen3_vl") else []
                torch.cat([output.pooler_output, *deeper]).sum().backward()  # type: ignore[no-untyped-call]
        images, windows = model.vision.patches(given["image_grid_thw"])
        assert flops.tower_forward.total(images, windows) == forward
        assert flops.tower_update.total(images, windows) == counter.get_total_flops()


def test_adapters_are_of_the_language_model_and_counted_as_such(paths: dict[str, Path]) -> None:
    for family, path in paths.items():
        section = adapters(family, rank=3)
        model = build_model(path, "policy", torch.float32)
        assert len(layers(model)) == 4
        assert len(language_layers(model)) == 2
        add_adapters(model, section, "actor.lora")
        trained = {name: each.numel() for name, each in model.hf.named_parameters() if each.requires_grad}
        assert all(".language_model.layers." in name for name in trained)
        assert sum(trained.values()) == num_adapter_parameters(path, section)


def test_the_towers_parameters_are_told_by_the_files(paths: dict[str, Path]) -> None:
    for path in paths.values():
        model = build_model(path, "policy", torch.float32)
        assert model.vision is not None
        expected = sum(parameter.numel() for parameter in model.vision.module.parameters())
        assert read_model(path).num_tower_parameters == expected


@pytest.mark.parametrize("parallel", [{"tensor": 2}, {"sequence": 2}])
def test_ranks_that_share_matrices_or_sequences_are_refused(paths: dict[str, Path], parallel: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="is a model of text and images, whose matrices and sequences ranks do not"):
        check_parallel(paths["qwen3_vl"], ParallelSection(**parallel))
