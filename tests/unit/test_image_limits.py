"""What `rolecall check` says of models of text and images, and what it refuses before anything starts."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rolecall.commands.check.footprint import memory_and_disk
from rolecall.data.images.limits import check_images
from rolecall.data.model.engine_limits import check_engine
from rolecall.data.model.files import read_model
from rolecall.data.model.parameter_counts import actor_parameters, critic_parameters
from rolecall.data.model.trainable import check_trainable
from rolecall.errors import ConfigError
from rolecall.settings import RewardModelSettings, RunSettings
from services.reward_model.config import check_files
from tests.conftest import MakeSettings
from tests.tiny_models import VisionFamily, write_image_processor, write_qwen3, write_vision

REFERENCE: dict[str, Any] = {"groups_per_batch": 2, "kl": {"reference": "ref", "kl_coef": 0.1}}


@pytest.fixture(scope="module")
def vision(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_vision(tmp_path_factory.mktemp("model") / "vision", "qwen2_5_vl")


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("model") / "text")


def shown(make_settings: MakeSettings, path: Path, images: str | None = "images", **sections: Any) -> RunSettings:
    """A run of the model `path` whose prompts may show images."""
    model = {"path": str(path), **sections.pop("model", {})}
    return make_settings(model=model, data={"train": "train.jsonl", "images_field": images}, **sections)


def lines(settings: RunSettings) -> list[str]:
    return list(check_images(settings, read_model(settings.model.path)))


def test_what_becomes_of_the_tower_is_told(make_settings: MakeSettings, vision: Path, text: Path) -> None:
    for told, settings in {
        "trained with the rest (model.freeze_vision_tower)": shown(make_settings, vision),
        "stay as they are, as it is asked to": shown(make_settings, vision, model={"freeze_vision_tower": True}),
        "stay as they are, as adapters are of the": shown(make_settings, vision, actor={"lora": {}}),
        "stay as they are, as no images are shown (data.images_field, environments.*.max_image_bytes)": shown(
            make_settings, vision, None
        ),
    }.items():
        (line,) = lines(settings)
        assert line.startswith("vision tower: 0.1")
        assert told in line
    assert lines(shown(make_settings, text, None)) == []


def test_a_tower_that_stays_as_it_is_has_no_gradients_nor_moments(make_settings: MakeSettings, vision: Path) -> None:
    facts, gae = read_model(vision), {"groups_per_batch": 2, "advantage": {"kind": "gae"}}
    for images in (None, "images"):
        settings = shown(make_settings, vision, images, critic={}, algorithm=gae)
        frozen = facts.num_tower_parameters if settings.freezes_vision_tower else 0
        for counts in (actor_parameters(settings, facts), critic_parameters(settings, facts)):
            assert (counts.trained, counts.frozen) == (facts.num_parameters - frozen, frozen)
        assert not any("adapters" in line for line in memory_and_disk(settings, facts))


def test_the_memory_that_pixels_take_is_told(make_settings: MakeSettings, vision: Path) -> None:
    told = []
    for num_ranks, num_responses in ((1, 8), (4, 2), (4, 8)):
        settings = shown(
            make_settings,
            vision,
            model={"dtype": "bfloat16"},
            actor={"num_ranks": num_ranks},
            sampling={"num_responses": num_responses},
        )
        (line,) = (line for line in memory_and_disk(settings, read_model(vision)) if "pixels" in line)
        assert "768 bytes for each token of an image" in line  # 8 x 8 pixels, three colours, twice, of two bytes
        told.append(line)
    one, halves, all_at_each = told
    assert one == all_at_each != halves  # responses to a prompt may be at as many ranks as there are of either


def test_what_a_tower_keeps_of_a_pass_is_told_where_it_is_trained(make_settings: MakeSettings, vision: Path) -> None:
    def told(images: str | None = "images", **sections: Any) -> bool:
        settings = shown(make_settings, vision, images, **sections)
        return any("of the vision tower's" in line for line in memory_and_disk(settings, read_model(vision)))

    assert told()
    assert not told(None)
    assert not told(model={"freeze_vision_tower": True})
    assert not told(actor={"lora": {"rank": 2, "target_modules": ["q_proj"]}})


def test_a_tower_to_freeze_must_be_there(make_settings: MakeSettings, text: Path) -> None:
    settings = shown(make_settings, text, None, model={"freeze_vision_tower": True})
    with pytest.raises(
        ConfigError, match=r"model.freeze_vision_tower: model.path \S+ has no vision tower; leave it out"
    ):
        lines(settings)


def test_float16_is_refused(make_settings: MakeSettings, vision: Path) -> None:
    with pytest.raises(ConfigError, match=r"model.dtype float16: model.path \S+ is a model of text and images"):
        lines(shown(make_settings, vision, model={"dtype": "float16"}))


def test_critics_and_references_must_see_what_the_policy_sees(
    make_settings: MakeSettings, vision: Path, text: Path, tmp_path: Path
) -> None:
    blind = shown(make_settings, vision, algorithm=REFERENCE, references={"ref": {"path": str(text)}})
    with pytest.raises(
        ConfigError,
        match=r"references.ref.path \S+ is no model that sees images, which this run shows \(data\.images_field, ",
    ):
        lines(blind)
    other = write_vision(tmp_path / "other", "qwen2_5_vl")
    write_image_processor(other, "qwen2_5_vl", patch=4, max_tokens=16)
    gae = {"groups_per_batch": 2, "advantage": {"kind": "gae"}}
    with pytest.raises(ConfigError, match=r"critic.path \S+ takes other tokens for an image than model.path"):
        lines(shown(make_settings, vision, algorithm=gae, critic={"path": str(other)}))
    processor = other / "preprocessor_config.json"
    processor.write_bytes((vision / processor.name).read_bytes())
    lines(shown(make_settings, vision, algorithm=gae, critic={"path": str(other)}))
    processor.write_text(json.dumps(json.loads(processor.read_text()) | {"image_std": [0.5, 0.25, 0.5]}))
    with pytest.raises(ConfigError, match=r"critic.path \S+ is given other pixels of an image than model.path"):
        lines(shown(make_settings, vision, algorithm=gae, critic={"path": str(other)}))
    lines(shown(make_settings, vision, algorithm=REFERENCE, references={"ref": {}}))


def test_a_reward_model_reads_text_alone(vision: Path) -> None:
    settings = RewardModelSettings.model_validate({"name": "judge", "path": str(vision)})
    with pytest.raises(ConfigError, match="is a model of text and images, and a reward model reads text alone"):
        check_files(settings, 10)


def test_a_model_of_text_and_images_is_trainable_and_others_are_named(vision: Path, tmp_path: Path) -> None:
    check_trainable(vision)
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "internvl", "text_config": {}, "vision_config": {"a": 1}}')
    with pytest.raises(ConfigError, match=r"of model_type 'internvl', and only qwen2_vl, .* and glm4v are trained"):
        check_trainable(tmp_path)


@pytest.mark.parametrize(("width", "is_square"), [(64, True), (128, True), (96, False)])
def test_experts_of_which_nobody_can_tell_which_way_round_they_are_are_refused(
    tmp_path: Path, width: int, is_square: bool
) -> None:
    text = {"hidden_size": 128, "moe_intermediate_size": width}
    tree = {"model_type": "qwen3_vl_moe", "text_config": text, "vision_config": {"a": 1}}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match="its experts' matrices are square") if is_square else nullcontext():
        check_trainable(tmp_path)


@pytest.mark.parametrize(("shape", "is_refused"), [([4, 32, 24], False), ([4, 24, 32], True)])
def test_experts_that_vllm_would_read_the_other_way_round_beside_adapters_are_refused(
    tmp_path: Path, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, shape: list[int], is_refused: bool
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)  # torchvision
    vision = {"patch_size": 14, "spatial_merge_size": 2}
    text = {"model_type": "qwen3_vl_moe_text", "hidden_size": 32, "num_attention_heads": 2, "num_key_value_heads": 2}
    text |= {"norm_topk_prob": True}
    tree = {"model_type": "qwen3_vl_moe", "text_config": text, "vision_config": vision, "image_token_id": 7}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    (tmp_path / "preprocessor_config.json").write_text("{}")
    name = "model.language_model.layers.0.mlp.experts.gate_up_proj"
    save_file({name: np.zeros(shape, np.float32)}, tmp_path / "model.safetensors")
    given: dict[str, Any] = {
        "model": {"path": tmp_path},
        "rollout": {"devices": [[1]]},
        "actor": {"lora": {"rank": 4}, "devices": [0]},
    }
    with pytest.raises(ConfigError, match="holds its experts as trans") if is_refused else nullcontext():
        check_engine(make_settings(**given))
    given["weights"] = {"merge_adapters": True}
    check_engine(make_settings(**given))


@pytest.mark.parametrize(
    ("family", "part", "changed", "complaint"),
    [
        (
            "qwen3_vl_moe",
            "text_config",
            {"norm_topk_prob": None},
            "text_config.norm_topk_prob .* is true, and it is n",
        ),
        ("qwen3_vl_moe", "text_config", {"norm_topk_prob": False}, "is true, and it is false"),
        ("glm4v", "text_config", {"attention_bias": False}, "text_config.attention_bias .* is true, and it is false"),
        ("glm4v", "text_config", {"rope_parameters": {"rope_type": "default"}}, "partial_rotary_factor of .* is 0.5"),
        ("glm4v", "vision_config", {"rms_norm_eps": 1e-6}, "vision_config.rms_norm_eps .* is 1e-05, and it is 1e-06"),
        ("glm4v", "vision_config", {}, ""),
    ],
)
def test_numbers_that_vllm_or_transformers_has_written_in_its_code_are_held_to_it(
    tmp_path: Path,
    make_settings: MakeSettings,
    monkeypatch: pytest.MonkeyPatch,
    family: VisionFamily,
    part: str,
    changed: dict[str, Any],
    complaint: str,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: True)  # torchvision
    path = write_vision(tmp_path, family)
    tree = json.loads((path / "config.json").read_text())
    tree[part] |= changed
    (path / "config.json").write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=complaint) if complaint else nullcontext():
        check_engine(make_settings(model={"path": str(path)}))


RUN = {"name": "run", "dir": "run", "num_steps": 1, "deterministic": True}


@pytest.mark.parametrize(("model", "is_refused"), [({}, True), ({"freeze_vision_tower": True}, False)])
def test_a_tower_whose_gradients_differ_each_time_is_refused_where_none_may(
    tmp_path: Path, make_settings: MakeSettings, model: dict[str, Any], is_refused: bool
) -> None:
    path = write_vision(tmp_path, "glm4v")
    gae = {"groups_per_batch": 2, "advantage": {"kind": "gae"}}
    actor = shown(make_settings, path, model=model, run=RUN, actor={"devices": [0]})
    critic: dict[str, Any] = {"actor": {"devices": [0], "lora": {}}, "critic": {"devices": [1]}, "algorithm": gae}
    for settings in (actor, shown(make_settings, path, model=model, run=RUN, **critic)):
        with pytest.raises(ConfigError, match=r"set model\.freeze_vision_tower") if is_refused else nullcontext():
            lines(settings)
