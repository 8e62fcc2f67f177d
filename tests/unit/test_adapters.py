"""Adapters as far as files tell: the matrices that get one, their size, and the one that training begins with, which is
told where it is none, or another than `actor.lora` says.
"""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rolecall.checkpoint.manifest import RunCheckpoints
from rolecall.checkpoint.storage import open_storage
from rolecall.commands.check import find_problems
from rolecall.data.model.adapters import expert_parameters, num_adapter_parameters, with_modules
from rolecall.errors import ConfigError
from rolecall.settings import LoraSection, load_settings
from tests.twins.launched import VOCAB_SIZE, write_light_config

LAYER = "model.layers.0.self_attn"
MODULES = ("q_proj", "v_proj")
LORA = "actor.lora={rank: 4, target_modules: [q_proj, v_proj]}"


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """Of a run whose model has two matrices [48, 16] that may have adapters."""
    path = write_light_config(tmp_path)
    save_matrices(path, *(f"{LAYER}.{name}.weight" for name in MODULES))
    return path


def save_matrices(config: Path, *names: str) -> None:
    """A model directory whose files hold [48, 16] matrices of these names beside the embedding."""
    matrices = {name: np.zeros((48, 16), np.float32) for name in names}
    embedding = {"model.embed_tokens.weight": np.zeros((VOCAB_SIZE, 16), np.float32)}
    save_file(embedding | matrices, config.parent / "model" / "model.safetensors")


def problems(config: Path, *overrides: str) -> list[str]:
    return find_problems(load_settings(config, list(overrides)), io.StringIO())


def test_adapters_are_counted_from_the_shapes_and_alone_take_optimizer_and_disk(config: Path) -> None:
    save_matrices(config, f"{LAYER}.q_proj.weight", f"{LAYER}.k_proj.weight", f"{LAYER}.v_proj.weight")
    section = LoraSection(rank=4, target_modules=("q_proj", "v_proj"))
    assert num_adapter_parameters(config.parent / "model", section) == 2 * 4 * (48 + 16)
    out = io.StringIO()
    assert find_problems(load_settings(config, [LORA]), out) == []
    assert "adapters: 0.00M parameters are trained, published and kept; the base stays as it is" in out.getvalue()
    assert find_problems(load_settings(config, [LORA, "weights.merge_adapters=true"]), out) == []
    assert "0.00M parameters are trained and kept; the base stays as it is, and published with them" in out.getvalue()


def test_experts_with_adapters_are_counted_and_what_their_sums_take_is_told(config: Path) -> None:
    names = [f"mlp.experts.{expert}.{name}_proj" for expert in (0, 1) for name in ("gate", "up", "down")]
    experts = [f"model.layers.{layer}.{name}.weight" for layer in (0, 1, 2) for name in names]
    save_matrices(config, f"{LAYER}.q_proj.weight", *experts)
    section, path = LoraSection(rank=4, target_modules=("q_proj",), experts=True), config.parent / "model"
    # of an expert gate and up share what they read, 16, and are [96, 16] together
    of_expert = (96 + 16) + (48 + 16)
    assert num_adapter_parameters(path, section) == 4 * ((48 + 16) + 3 * 2 * of_expert)
    assert expert_parameters(path) == 3 * [2 * 3 * 48 * 16]
    lora = ["actor.lora={rank: 4, target_modules: [q_proj], experts: true}", "weights.merge_adapters=true"]
    for checkpointing, words in (("true", "their sums of one layer\n"), ("false", "their sums of all layers; ")):
        out = io.StringIO()
        find_problems(load_settings(config, [*lora, f"actor.gradient_checkpointing={checkpointing}"]), out)
        assert f"experts with adapters: 0.0 MiB more per rank in an update, for {words}" in out.getvalue()
    save_matrices(config, f"{LAYER}.q_proj.weight")
    (problem,) = set(problems(config, *lora))
    assert problem == f"actor.lora.experts: the model {path} has no experts; leave it out"


def test_all_linear_is_every_matrix_of_the_language_model_that_may_have_an_adapter(config: Path) -> None:
    tower = [f"{tower}.blocks.0.attn.qkv.weight" for tower in ("visual", "model.visual")]
    experts = ["experts.0.gate_proj", "gate", "shared_expert_gate", "shared_expert.up_proj"]
    of_block = [
        "self_attn.q_proj",
        "self_attn.kv_b_proj",
        "linear_attn.in_proj_ba",
        *(f"mlp.{name}" for name in experts),
    ]
    blocks = [f"model.layers.{layer}.{name}.weight" for layer in (0, 1) for name in of_block]
    save_matrices(config, *blocks, *tower, "lm_head.weight")
    section, path = LoraSection(rank=4, target_modules="all-linear"), config.parent / "model"
    named = with_modules(section, path)
    assert named.target_modules == ("in_proj_ba", "q_proj", "up_proj")
    assert num_adapter_parameters(path, section) == num_adapter_parameters(path, named) == 2 * 3 * 4 * (48 + 16)
    out = io.StringIO()
    find_problems(load_settings(config, ["actor.lora={target_modules: all-linear}", "rollout.num_replicas=0"]), out)
    assert "adapters: actor.lora.target_modules all-linear are in_proj_ba, q_proj, up_proj" in out.getvalue()


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.2.eh_proj.weight",
        "model.layers.2.embed_tokens.weight",
        "model.layers.2.shared_head.head.weight",
        "mtp.layers.0.self_attn.o_proj.weight",
        "model.layers.0.block_sparse_moe.router.layer.weight",
        "model.layers.0.mlp.gate.wg.weight",
        "model.layers.0.linear_attn.A_log",
    ],
)
def test_all_linear_leaves_out_what_no_trainer_gives_an_adapter(config: Path, name: str) -> None:
    path = config.parent / "model"
    tree = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(tree | {"num_hidden_layers": 2}))
    save_matrices(config, f"{LAYER}.q_proj.weight", name)
    assert with_modules(LoraSection(target_modules="all-linear"), path).target_modules == ("q_proj",)


def test_all_linear_of_no_module_is_refused(config: Path) -> None:
    save_matrices(config, "model.layers.0.mlp.gate.weight")
    with pytest.raises(ConfigError, match=r"^actor\.lora\.target_modules all-linear: the model .* has no matrix in"):
        with_modules(LoraSection(target_modules="all-linear"), config.parent / "model")


def test_a_target_of_the_critics_adapters_is_looked_for_in_its_own_model(config: Path) -> None:
    save_matrices(config, f"{LAYER}.q_proj.weight", f"{LAYER}.v_proj.weight")
    critic, own = config.parent / "critic", config.parent / "model"
    shutil.copytree(own, critic)
    save_matrices(config, f"{LAYER}.q_proj.weight", f"{LAYER}.k_proj.weight")
    gae = "algorithm={groups_per_batch: 2, advantage: {kind: gae}}"
    section = "lora: {rank: 4, target_modules: [q_proj, v_proj]}"
    assert problems(config, gae, f"critic={{path: {critic}, {section}}}") == []
    (problem,) = set(problems(config, gae, f"critic={{{section}}}"))
    assert problem.startswith(f"critic.lora.target_modules: the model {own} has no v_proj; its matrices are")


def test_a_target_of_adapters_that_the_model_lacks_is_named_before_anything_starts(config: Path) -> None:
    save_matrices(config, f"{LAYER}.q_proj.weight", "model.layers.0.mlp.experts.0.v_proj.weight")
    (problem,) = set(problems(config, LORA, "rollout.num_replicas=0"))
    assert "has no v_proj; its matrices are called embed_tokens, q_proj" in problem


def test_experts_with_adapters_are_refused_where_vllm_would_die_of_the_probe(config: Path) -> None:
    save_matrices(
        config, f"{LAYER}.q_proj.weight", f"{LAYER}.v_proj.weight", "model.layers.0.mlp.experts.0.gate_proj.weight"
    )
    assert any("with adapters on GPUs only" in problem for problem in problems(config, LORA, "rollout.num_replicas=1"))
    merged = problems(config, LORA, "rollout.num_replicas=1", "weights.merge_adapters=true")
    assert not any("with adapters" in problem for problem in merged)
    assert problems(config, LORA, "rollout.num_replicas=0") == []


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
