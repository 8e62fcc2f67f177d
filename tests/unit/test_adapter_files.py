"""The adapter that training begins with: what is none, or another than `actor.lora` says, is told from its files."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rolecall.checkpoint.manifest import RunCheckpoints
from rolecall.checkpoint.storage import open_storage
from rolecall.commands.check import find_problems
from rolecall.settings import load_settings
from tests.twins.launched import VOCAB_SIZE, write_light_config

LAYER = "model.layers.0.self_attn"
MODULES = ("q_proj", "v_proj")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Of a run whose model has two matrices [48, 16] that may have adapters."""
    path = write_light_config(tmp_path)
    matrices = {f"{LAYER}.{name}.weight": np.zeros((48, 16), np.float32) for name in MODULES}
    embedding = {"model.embed_tokens.weight": np.zeros((VOCAB_SIZE, 16), np.float32)}
    save_file(embedding | matrices, tmp_path / "model" / "model.safetensors")
    return path


def write_adapter(folder: Path, *, rank: int = 4, modules: tuple[str, ...] = MODULES, **changes: Any) -> Path:
    folder.mkdir()
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 32, "bias": "none", "use_dora": False, "rank_pattern": {}}
    (folder / "adapter_config.json").write_text(json.dumps(config | changes))
    tensors = {}
    for name in modules:
        tensors[f"base_model.model.{LAYER}.{name}.lora_A.weight"] = np.zeros((rank, 16), np.float32)
        tensors[f"base_model.model.{LAYER}.{name}.lora_B.weight"] = np.zeros((48, rank), np.float32)
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def told(config: Path, start: Path, role: str = "actor") -> tuple[list[str], str]:
    """The problems that `check` finds, and what it says."""
    out = io.StringIO()
    lora = {"rank": 4, "target_modules": list(MODULES), "start": str(start)}
    gae = [] if role == "actor" else ["algorithm={groups_per_batch: 2, advantage: {kind: gae}}", "critic={}"]
    return find_problems(load_settings(config, [*gae, f"{role}.lora={json.dumps(lora)}"]), out), out.getvalue()


@pytest.mark.parametrize("role", ["actor", "critic"])
def test_an_adapter_like_the_section_is_taken(config: Path, tmp_path: Path, role: str) -> None:
    start = write_adapter(tmp_path / "adapter")
    problems, said = told(config, start, role)
    assert problems == []
    assert f"adapters: {role}.lora begins as those in {start}" in said


def test_one_with_a_head_inside_is_no_critics_to_begin_with(config: Path, tmp_path: Path) -> None:
    start = write_adapter(tmp_path / "adapter", modules_to_save=["score"])
    (problem,) = told(config, start, "critic")[0]
    assert problem.startswith(f"critic.lora.start {start}: adapter_config.json sets modules_to_save")


@pytest.mark.parametrize(
    ("adapter", "words"),
    [
        ({"rank": 8}, "has rank 8, actor.lora.rank is 4; write the adapter's"),
        ({"lora_alpha": 16}, "has alpha 16, actor.lora.alpha is 32.0"),
        ({"modules": ("q_proj",)}, "has target_modules ['q_proj'], actor.lora.target_modules is ['q_proj', 'v_proj']"),
        ({"use_rslora": True}, "sets use_rslora, which is not computed here"),
        ({"use_dora": True}, "sets use_dora"),
        ({"rank_pattern": {"q_proj": 8}}, "sets rank_pattern"),
        ({"alora_invocation_tokens": [1]}, "sets alora_invocation_tokens"),
        ({"init_lora_weights": "pissa_niter_4"}, "init_lora_weights pissa_niter_4, which changed the base weights too"),
        ({"init_lora_weights": "olora"}, "convert it with peft's save_pretrained"),
        ({"bias": "all"}, "sets bias"),
        ({"peft_type": "IA3"}, "says that it is of IA3; use one of LORA"),
    ],
)
def test_another_adapter_is_told_by_what_is_other(
    config: Path, tmp_path: Path, adapter: dict[str, Any], words: str
) -> None:
    (problem,) = told(config, write_adapter(tmp_path / "adapter", **adapter))[0]
    assert problem.startswith(f"actor.lora.start {tmp_path}/adapter")
    assert words in problem


def test_an_adapter_of_another_model_or_none_at_all_is_told(config: Path, tmp_path: Path) -> None:
    start = write_adapter(tmp_path / "adapter")
    matrices = {f"{LAYER}.{name}.weight": np.zeros((24, 16), np.float32) for name in MODULES}
    embedding = {"model.embed_tokens.weight": np.zeros((VOCAB_SIZE, 16), np.float32)}
    save_file(embedding | matrices, tmp_path / "model" / "model.safetensors")
    (problem,) = told(config, start)[0]
    assert "has 512 numbers, and adapters beside " in problem
    (start / "adapter_config.json").write_text("[]")
    (problem,) = told(config, start)[0]
    assert "is no adapter in peft's format (not an object)" in problem
    (problem,) = told(config, tmp_path / "nowhere")[0]
    assert "rolecall export writes one to the folder `adapter`" in problem


def test_a_run_that_has_a_checkpoint_needs_the_folder_no_more(config: Path, tmp_path: Path) -> None:
    checkpoints = RunCheckpoints(open_storage(str(tmp_path / "run" / "checkpoints")), 9)
    checkpoints.commit(checkpoints.begin(0), [], {"run": "light"})
    gone = tmp_path / "gone"
    assert "is no adapter in peft's format" in " ".join(told(config, gone)[0]), "that of step 0 is never loaded"
    checkpoints.commit(checkpoints.begin(2), [], {"run": "light"})
    problems, said = told(config, gone)
    assert [problem for problem in problems if "adapter" in problem] == []
    assert f"adapters: actor.lora.start {gone} is gone; those of the newest checkpoint go on" in said
