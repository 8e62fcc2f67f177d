"""Sizes that a file leaves out are right for what is run; those it gives stand."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from rolecall.columns import ROW_BYTES, TEXT_BYTES
from rolecall.commands.check import check
from rolecall.commands.check.footprint import store
from rolecall.errors import ConfigError
from rolecall.launcher.plan import write_config
from rolecall.settings import RunSettings, load_settings
from rolecall.settings.services import STORE_SHARE
from rolecall.store.budget import PromptBytes, StoreBudget
from tests.conftest import MakeSettings
from tests.twins.launched import write_light_config

QWEN3_32B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
LARGE: dict[str, Any] = {
    "sampling": {"num_responses": 16, "max_tokens": 32768},
    "algorithm": {"groups_per_batch": 64, "max_staleness": 1},
    "actor": {"num_ranks": 8, "devices": list(range(8))},
    "rollout": {"devices": [[8, 9, 10, 11]], "tensor_parallel_size": 4},
}


@pytest.fixture
def model_32b(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3_32B))
    return str(tmp_path)


def of(settings: RunSettings) -> dict[str, int | bool]:
    return {size.setting: size.value for size in settings.derived_sizes}


def test_a_small_run_on_cpus_keeps_the_defaults(make_settings: MakeSettings) -> None:
    settings = make_settings(sampling={"max_tokens": 16})
    assert (settings.actor.token_budget, settings.store.max_bytes) == (16384, 2 * 2**30)
    assert not settings.actor.gradient_checkpointing
    assert not settings.derived_sizes


def test_long_responses_fit_microbatches_memory_and_the_store_without_a_word(
    make_settings: MakeSettings, model_32b: str
) -> None:
    kl = {"kl": {"reference": "ref", "kl_coef": 0.1}, "advantage": {"kind": "gae"}}
    settings = make_settings(
        model={"path": model_32b},
        critic={"devices": [12]},
        references={"ref": {}},
        **LARGE | {"algorithm": LARGE["algorithm"] | kl},
    )
    assert settings.critic is not None
    trainers = [settings.actor, settings.critic, settings.references["ref"]]
    assert [section.token_budget for section in trainers] == [32768 + 1024] * 3
    assert settings.actor.gradient_checkpointing
    budget = StoreBudget.of(settings, PromptBytes(2**16))
    assert budget.num_batches * budget.batch_bytes <= budget.max_bytes, "or the run is refused"
    assert settings.store.max_bytes == 8 * 2**30, "with room for batches that no checkpoint covers yet"
    assert of(settings).keys() == {
        "actor.token_budget",
        "critic.token_budget",
        "references.ref.token_budget",
        "actor.gradient_checkpointing",
        "store.max_bytes",
    }


def test_a_store_of_somebody_s_has_the_memory_that_it_has(make_settings: MakeSettings) -> None:
    settings = make_settings(store={"url": "redis://elsewhere:6379"}, **LARGE)
    assert settings.store.max_bytes == 2 * 2**30
    with pytest.raises(ConfigError, match=r"store\.max_bytes \d+ cannot hold 3 batches"):
        StoreBudget.of(settings, PromptBytes(2**16))


def test_the_store_of_a_run_on_cpus_holds_what_it_must(make_settings: MakeSettings) -> None:
    on_cpus = {"actor": {"num_ranks": 8}, "rollout": {"tensor_parallel_size": 4}}
    settings = make_settings(**LARGE | on_cpus)
    batch = 64 * 16 * (33792 * (TEXT_BYTES + 22) + ROW_BYTES)
    assert 3 * batch / STORE_SHARE < settings.store.max_bytes < 1.02 * 3 * batch / STORE_SHARE


def test_batches_that_a_machine_cannot_hold_are_refused(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolecall.commands.check.footprint.host_memory_bytes", lambda: 2**31)
    list(store(make_settings(), []))
    with pytest.raises(ConfigError, match=r"store: the 3 batches .* and this machine has 2\.0 GiB of memory"):
        list(store(make_settings(**LARGE), []))


def test_a_batch_that_needs_more_than_room_gets_it(make_settings: MakeSettings) -> None:
    large = LARGE["algorithm"] | {"groups_per_batch": 512}
    settings = make_settings(**LARGE | {"algorithm": large})
    assert settings.store.max_bytes > 8 * 2**30
    StoreBudget.of(settings, PromptBytes(2**16))
    with pytest.raises(ConfigError, match=r"store\.max_bytes \d+ cannot hold 3 batches"):
        StoreBudget.of(settings, PromptBytes(2**24))


@pytest.mark.parametrize(
    ("section", "recomputed"),
    [
        ({}, True),
        ({"devices": []}, False),
        ({"parallel": {"sequence": 8}, "token_budget": 33792}, True),
        ({"token_budget": 1024}, False),
        ({"activation_offload": True}, False),
    ],
)
def test_activations_are_computed_again_where_a_gpu_would_not_hold_them(
    make_settings: MakeSettings, model_32b: str, section: dict[str, Any], recomputed: bool
) -> None:
    """1,024 tokens keep 23.3 GiB, 33,792 over eight ranks 96."""
    sampling = {"num_responses": 16, "max_tokens": 1 if section.get("token_budget") == 1024 else 32768}
    data = {"train": "train.jsonl", "max_prompt_tokens": 1000}
    actor = LARGE["actor"] | section
    settings = make_settings(model={"path": model_32b}, data=data, **LARGE | {"actor": actor, "sampling": sampling})
    assert settings.actor.gradient_checkpointing is recomputed


@pytest.mark.parametrize(("images", "recomputed"), [("images", True), (None, False)])
def test_a_tower_that_is_trained_counts_for_the_prompts_share_of_a_microbatch(
    make_settings: MakeSettings, tmp_path: Path, images: str | None, recomputed: bool
) -> None:
    """Of Qwen3-VL-2B 24 GiB in the language model, and 13 in the tower."""
    text = QWEN3_32B | {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28}
    config = {
        "model_type": "qwen3_vl",
        "text_config": text | {"model_type": "qwen3_vl_text", "num_attention_heads": 16},
        "vision_config": {"depth": 24, "hidden_size": 1024, "intermediate_size": 4096, "spatial_merge_size": 2},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    settings = make_settings(
        model={"path": str(tmp_path), "dtype": "bfloat16"},
        data={"train": "train.jsonl", "max_prompt_tokens": 4096, "images_field": images},
        sampling={"num_responses": 16, "max_tokens": 4096},
        actor={"devices": [0], "token_budget": 8192},
        rollout={"devices": [[1]]},
    )
    assert settings.actor.gradient_checkpointing is recomputed


def test_what_the_file_gives_stands_and_is_not_called_derived(make_settings: MakeSettings, model_32b: str) -> None:
    given = {"token_budget": 40000, "gradient_checkpointing": False}
    sections = LARGE | {"actor": LARGE["actor"] | given, "store": {"max_bytes": 3 * 2**30}}
    settings = make_settings(model={"path": model_32b}, **sections)
    assert not settings.derived_sizes
    assert (settings.actor.token_budget, settings.store.max_bytes) == (40000, 3 * 2**30)
    assert not settings.actor.gradient_checkpointing
    with pytest.raises(ValueError, match=r"token_budget 16384 is less than the longest trajectory"):
        make_settings(**LARGE | {"actor": LARGE["actor"] | {"token_budget": 16384}})


def test_a_resolved_file_means_what_the_original_meant(make_settings: MakeSettings, model_32b: str) -> None:
    settings = make_settings(model={"path": model_32b}, **LARGE)
    assert RunSettings.model_validate(settings.model_dump(mode="json")).model_dump() == settings.model_dump()


def test_a_loss_that_sees_trajectories_has_whole_episodes_in_a_microbatch(make_settings: MakeSettings) -> None:
    game = {"environments": {"game": {"address": "127.0.0.1:1", "max_row_tokens": 20_000}}}
    for aggregation, budget in (("token_mean", 16384), ("seq_mean_token_mean", 20_000)):
        algorithm = {"groups_per_batch": 1, "aggregation": aggregation}
        assert make_settings(algorithm=algorithm, **game).actor.token_budget == budget


def test_what_a_run_s_folder_keeps_is_derived_again_of_what_is_overridden(tmp_path: Path) -> None:
    for max_tokens in (16, 30000):
        settings = load_settings(write_light_config(tmp_path), [f"sampling.max_tokens={max_tokens}"])
        settings.run.dir.mkdir(exist_ok=True)
        resumed = load_settings(write_config(settings), ["sampling.max_tokens=40000"])
        assert resumed.actor.token_budget == resumed.conversation_tokens > 40000
        assert resumed.store.max_bytes == settings.store.max_bytes


def test_check_prints_each_with_its_reason(tmp_path: Path) -> None:
    out = io.StringIO()
    check(load_settings(write_light_config(tmp_path), ["sampling.max_tokens=30000"]), out)
    assert "\nactor.token_budget: 31024, derived: the longest trajectory; at least 16384\n" in out.getvalue()
    assert "store.max_bytes: " not in out.getvalue()
