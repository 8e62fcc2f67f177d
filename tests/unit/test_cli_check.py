"""`rolecall check`: what it derives, and that every mistake is named without anything being started."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rolecall.check import check
from rolecall.errors import ConfigError
from rolecall.settings import RunSettings, load_settings
from tests.light_run import write_light_config


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = write_light_config(tmp_path)
    model = {"architectures": ["Qwen3ForCausalLM"], "eos_token_id": 2, "max_position_embeddings": 2048, "vocab_size": 259}
    (tmp_path / "model" / "config.json").write_text(json.dumps(model))
    save_file({"weight": np.zeros((1000, 50), np.float32)}, tmp_path / "model" / "model.safetensors")
    return path


def findings(settings: RunSettings) -> tuple[int, str]:
    out = io.StringIO()
    return check(settings, out), out.getvalue()


def test_a_sound_configuration_gives_a_line_per_derived_value(config: Path) -> None:
    code, text = findings(load_settings(config))
    assert code == 0, text
    assert "EOS ids: 2" in text
    assert "0.05M parameters" in text
    assert "'<|im_start|>user\\n2 + 2<|im_end|>\\n<|im_start|>assistant\\n'" in text
    assert "2 groups x 2 responses = 4 trajectories" in text
    assert "max model length: 2048 tokens" in text
    assert not (config.parent / "run").exists()


@pytest.mark.parametrize(
    ("override", "told"),
    [
        ("data.prompt_field=question", "no field 'question'"),
        ("data.train=none.jsonl", "none.jsonl does not exist"),
        ("data.max_prompt_tokens=4", "more than data.max_prompt_tokens"),
        ("model.max_model_tokens=100", "exceed the model's 100"),
        ("model.path=elsewhere", "must be a Hugging Face model directory"),
        ("store.max_bytes=1000", "store.max_bytes 1000"),
        ("actor.devices=[7]", "GPU 7"),
    ],
)
def test_a_mistake_is_named(config: Path, override: str, told: str) -> None:
    code, text = findings(load_settings(config, [override]))
    assert code == 2
    assert told in text


def test_all_mistakes_are_told_in_one_go(config: Path) -> None:
    _, text = findings(load_settings(config, ["data.train=none.jsonl", "store.max_bytes=1000"]))
    assert "2 problems" in text


def test_two_roles_on_one_gpu_are_refused(config: Path) -> None:
    with pytest.raises(ConfigError, match="GPU 0 is given to actor and to"):
        load_settings(config, ["actor.devices=[0]", "rollout.num_replicas=1", "rollout.devices=[[0]]"])


def test_files_that_are_not_safetensors_are_named(config: Path) -> None:
    (config.parent / "model" / "model.safetensors").write_bytes(b"\xff" * 64)
    code, text = findings(load_settings(config))
    assert code == 2
    assert "is not a safetensors file" in text


def test_a_first_prompt_of_messages_keeps_its_system_turn(config: Path) -> None:
    row: dict[str, Any] = {"prompt": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]}
    (config.parent / "train.jsonl").write_text(json.dumps(row) + "\n")
    _, text = findings(load_settings(config, ["data.system_prompt=never used"]))
    assert "be brief" in text
    assert "never used" not in text
