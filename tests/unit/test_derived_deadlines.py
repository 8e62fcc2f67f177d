"""Deadlines that a file leaves out follow from what is run; those it gives stand."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from rolecall.commands.check import check
from rolecall.settings import RewardModelSettings, RunSettings, load_settings
from rolecall.settings.deadlines import reading_s
from tests.conftest import MakeSettings
from tests.smallest import judged
from tests.twins.launched import write_light_config

LARGE: dict[str, Any] = {
    "sampling": {"max_tokens": 32768},
    "algorithm": {"groups_per_batch": 64},
    "actor": {"num_ranks": 8, "devices": list(range(8)), "token_budget": 34000},
    "rollout": {"devices": [[8, 9, 10, 11]], "tensor_parallel_size": 4},
}


@pytest.fixture
def model_32b(tmp_path: Path) -> str:
    """The size of one, in a file without content."""
    folder = tmp_path / "32b"
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(65_500_000_000)
    return str(folder)


def of(settings: RunSettings) -> dict[str, float]:
    return {deadline.setting: deadline.seconds for deadline in settings.derived_deadlines}


def test_a_small_model_on_cpus_keeps_the_defaults(make_settings: MakeSettings) -> None:
    settings = make_settings(sampling={"max_tokens": 16})
    assert settings.rollout.generation_timeout_s == 608
    assert (settings.rollout.hang_s, settings.actor.hang_s) == (15, 30)
    assert (settings.weights.bucket_timeout_s, settings.weights.publish_timeout_s) == (
        10,
        600,
    )
    assert (settings.controller.start_timeout_s, settings.controller.stall_timeout_s) == (300, 600)
    assert (settings.actor.train_timeout_s, settings.actor.compute_timeout_s) == (3600, 600)


def test_layers_that_are_compiled_get_the_time_on_cpus_too(make_settings: MakeSettings) -> None:
    assert make_settings(actor={"torch_compile": True}).actor.hang_s == 300
    assert make_settings(actor={"torch_compile": True, "hang_s": 40}).actor.hang_s == 40
    assert make_settings(actor={"torch_compile": True}).controller.start_timeout_s == 600


def test_a_large_model_with_long_responses_on_gpus_gets_the_time_it_takes(
    make_settings: MakeSettings, model_32b: str
) -> None:
    settings = make_settings(
        model={"path": model_32b},
        critic={"token_budget": 34000},
        **LARGE | {"algorithm": {"groups_per_batch": 64, "advantage": {"kind": "gae"}}},
    )
    assert settings.rollout.generation_timeout_s >= 32768 / 20, "at 20 tokens a second"
    assert settings.actor.hang_s >= 300
    assert settings.rollout.hang_s >= 60
    assert settings.actor.hang_s > 2 * 32.75e9 * 34000 / 2e12, "the critic is on CPUs, where a pass takes long"
    assert settings.weights.bucket_timeout_s >= 60
    assert settings.weights.publish_timeout_s >= 600 + 2 * 65.5e9 / 200e6, "six copies over 10 Gbit/s"
    assert settings.controller.start_timeout_s >= 900 + 65.5e9 / 100e6
    assert settings.controller.stall_timeout_s >= settings.controller.start_timeout_s
    tokens, flops = 512 * (32768 + 1024), 6 * 32.75e9
    assert settings.actor.train_timeout_s > tokens * flops / 8 / 200e12, "at 200 TFLOP/s a GPU"
    assert settings.actor.compute_timeout_s > tokens * flops / 3 / 8 / 200e12


def test_the_end_of_a_load_leaves_time_for_the_probe_of_a_model_that_cpus_compute_slowly(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(1_200_000_000)
    assert make_settings(model={"path": str(folder)}).weights.bucket_timeout_s >= 2 * 0.6e9 * 2 * 256 / 30e9, (
        "two passes at 30 GFLOP/s"
    )


def test_what_the_file_gives_stands_and_is_not_called_derived(make_settings: MakeSettings, model_32b: str) -> None:
    sections = LARGE | {
        "weights": {"bucket_timeout_s": 5.0},
        "actor": LARGE["actor"] | {"hang_s": 12.0},
        "controller": {"start_timeout_s": 4000.0},
    }
    settings = make_settings(model={"path": model_32b}, **sections)
    assert (settings.weights.bucket_timeout_s, settings.actor.hang_s, settings.controller.start_timeout_s) == (
        5,
        12,
        4000,
    )
    assert settings.controller.stall_timeout_s == 4000, "what is derived follows what is given"
    assert {"weights.bucket_timeout_s", "actor.hang_s", "controller.start_timeout_s"}.isdisjoint(of(settings))


def test_a_reward_model_gets_the_time_to_load_that_a_role_of_a_run_does(tmp_path: Path, model_32b: str) -> None:
    def start_s(**keys: Any) -> float:
        return RewardModelSettings.model_validate({"path": tmp_path, **keys}).start_timeout_s

    assert start_s() == 300
    assert start_s(path=model_32b) == 300 + 655
    assert start_s(path=model_32b, devices=[0]) == 900 + 655
    assert start_s(path=model_32b, start_timeout_s=20) == 20


def test_every_rank_adds_to_the_time_in_which_an_epoch_forms(make_settings: MakeSettings) -> None:
    weights = make_settings(weights={"bucket_timeout_s": 5.0}).weights
    assert weights.meeting_timeout_s(2) == 5.4
    assert weights.meeting_timeout_s(65) >= 5 + 12.3, "the slowest meeting of 64 that was seen"


def test_calls_of_every_trainer_get_the_time_of_the_slowest(make_settings: MakeSettings, model_32b: str) -> None:
    references = {"small": {}, "large": {"path": model_32b}}
    algorithm = {
        "groups_per_batch": 2,
        "kl": {"reference": "small", "kl_coef": 0.1},
        "distillation": {"teacher": "large", "task_coef": 1.0},
    }
    settings = make_settings(references=references, algorithm=algorithm, actor={"compute_timeout_s": 50.0})
    assert settings.actor.hang_s > 30
    assert settings.actor.train_timeout_s == 3600, "a reference is not trained"
    assert settings.actor.compute_timeout_s == 50
    assert of(settings)["actor.hang_s"] == settings.actor.hang_s


def test_responses_that_a_publish_waits_for_are_part_of_its_time(make_settings: MakeSettings) -> None:
    sections: dict[str, Any] = {"sampling": {"max_tokens": 8000}, "actor": {"token_budget": 16384}}
    waits = make_settings(rollout={"pause_mode": "wait"}, **sections)
    assert waits.weights.publish_timeout_s == make_settings(**sections).weights.publish_timeout_s + 4000
    assert waits.controller.stall_timeout_s >= waits.weights.publish_timeout_s, "or the stall ends the publish"


def test_a_group_gets_the_time_of_the_longest_response_of_an_evaluation(make_settings: MakeSettings) -> None:
    sets = {"a": {"path": "a.jsonl"}, "b": {"path": "b.jsonl", "max_tokens": 4000}}
    settings = make_settings(evaluation={"sets": sets}, sampling={"max_tokens": 1000})
    assert settings.rollout.generation_timeout_s == 600 + 2000, "the longest response of all"


def test_attention_over_long_rows_is_part_of_a_pass(make_settings: MakeSettings, tmp_path: Path) -> None:
    """Of 0.6B it is fourteen times the rest at 132k tokens: 1,024 rows take eight GPUs 2,763 s at 100 TFLOP/s each."""
    config = {"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28}
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    (tmp_path / "config.json").write_text(json.dumps(config | heads))
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.truncate(1_192_000_000)
    long = {
        "sampling": {"num_responses": 16, "max_tokens": 131072},
        "actor": {"num_ranks": 8, "devices": list(range(8))},
        "algorithm": {"groups_per_batch": 64},
    }
    settings = make_settings(model={"path": str(tmp_path)}, **long)
    tokens = 1024 * (131072 + 1024)
    flops = (2 * 0.596e9 + 2 * 132096 * 2048 * 28) * tokens
    assert settings.actor.compute_timeout_s > 3 * flops / 8 / 1e14
    assert settings.actor.train_timeout_s > 3 * 5 * flops / 8 / 1e14


def test_models_that_are_read_or_written_at_once_share_the_disk(
    make_settings: MakeSettings, tmp_path: Path, model_32b: str
) -> None:
    other = tmp_path / "critic"
    other.mkdir()
    (other / "model.safetensors").symlink_to(Path(model_32b) / "model.safetensors")
    gae = {"groups_per_batch": 2, "advantage": {"kind": "gae"}}

    def of_critic(path: str) -> RunSettings:
        critic = {"path": path, "devices": [8], "token_budget": 34000}
        return make_settings(model={"path": model_32b}, algorithm=gae, actor=LARGE["actor"], critic=critic)

    both, one = of_critic(str(other)), of_critic(model_32b)
    assert both.controller.start_timeout_s == 900 + 2 * 655
    assert one.controller.start_timeout_s == 900 + 655, "one directory is read once"
    assert one.actor.train_timeout_s == both.actor.train_timeout_s == 2 * 32.75e9 * 12 / 100e6
    assert reading_s(both) == 655


def test_turns_in_an_environment_are_part_of_an_episode_s_time(make_settings: MakeSettings) -> None:
    """Three quarters of it are for turns: 100 of 25 s, and 2,048 tokens at 20 a second."""
    sampling = {"max_tokens": 2048}
    game = {"game": {"address": "127.0.0.1:1", "max_turns": 100}}
    settings = make_settings(sampling=sampling, environments=game)
    assert settings.rollout.generation_timeout_s == 600 + 1024 + 3000
    assert 0.75 * settings.rollout.generation_timeout_s > 100 * 25 + 2048 / 20
    assert make_settings(sampling=sampling).rollout.generation_timeout_s == 600 + 1024


def test_a_judge_has_the_time_to_come_to_its_verdict(make_settings: MakeSettings) -> None:
    """1,024 tokens unless its rubric says otherwise, at 20 a second."""

    def timeout_s(parameters: dict[str, Any] | None = None, **component: Any) -> float:
        tree = judged(model="model")
        verdict = tree["components"]["verdict"]
        verdict.update(component)
        if parameters is not None:
            verdict["scorer"]["rubric"] = verdict["scorer"]["rubric"] | {"parameters": parameters}
        return make_settings(reward=tree).reward.components["verdict"].timeout_s

    assert timeout_s() == 10 + 51
    assert timeout_s({"max_completion_tokens": 4000}) == 10 + 200
    assert timeout_s({"temperature": 0.5}) == 10
    assert timeout_s(timeout_s=30) == 30
    assert make_settings().reward.components["correct"].timeout_s == 10


def test_defaults_are_nobodys_to_change(make_settings: MakeSettings) -> None:
    make_settings(sampling={"max_tokens": 8000})
    assert make_settings(sampling={"max_tokens": 16}).rollout.generation_timeout_s == 608
    assert make_settings().rollout.__class__().generation_timeout_s == 600


def test_a_resolved_file_means_what_the_original_meant(make_settings: MakeSettings) -> None:
    settings = make_settings(sampling={"max_tokens": 8000}, actor={"token_budget": 16384})
    assert RunSettings.model_validate(settings.model_dump(mode="json")).model_dump() == settings.model_dump()


def test_check_prints_each_with_its_reason(tmp_path: Path) -> None:
    out = io.StringIO()
    check(load_settings(write_light_config(tmp_path), ["weights.bucket_timeout_s=7", "sampling.max_tokens=100"]), out)
    assert "rollout.hang_s: " in out.getvalue()
    assert "weights.bucket_timeout_s" not in out.getvalue()
