"""What the back end over Megatron-Core does not compute is told by `rolecall check`, with field and remedy, before
anything starts.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from rolecall.commands.cli import main
from rolecall.data.megatron.limits import ABSENT, MODEL_TYPES
from rolecall.data.model.files import num_experts
from tests.twins.launched import write_light_config

DENSE: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 264,
}
MIXTURE = DENSE | {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 2}
OTHER_YARN = {"type": "yarn", "factor": 4.0}
YARN = {"rope_type": "yarn", "factor": 40.0, "mscale": 0.707, "mscale_all_dim": 0.707}
LATENT = DENSE | {
    "model_type": "deepseek_v2",
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "rope_parameters": YARN,
}
BY_SIGMOID = LATENT | {"model_type": "deepseek_v3", "n_group": 4, "topk_group": 2, "num_experts_per_tok": 4}
WITHOUT_GROUPS = {key: value for key, value in BY_SIGMOID.items() if key not in ("n_group", "topk_group")}
SEED_OSS = DENSE | {"model_type": "seed_oss", "attention_bias": True, "attention_out_bias": False}
QWEN2_MOE = MIXTURE | {"model_type": "qwen2_moe", "shared_expert_intermediate_size": 48, "mlp_only_layers": [0]}
MODELS = {
    "dense": DENSE,
    "yarn": DENSE | {"rope_scaling": OTHER_YARN},
    "seed_oss": SEED_OSS,
    "mixture": MIXTURE,
    "some_dense": MIXTURE | {"decoder_sparse_step": 2},
    "qwen2_moe": QWEN2_MOE,
    "latent": LATENT,
    "deepseek_v3": BY_SIGMOID,
    "glm4_moe": MIXTURE | {"model_type": "glm4_moe", "attention_bias": True},
    "one_expert": MIXTURE | {"num_experts_per_tok": 1},
}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_light_config(tmp_path)


def described(config: Path, described_as: dict[str, Any]) -> list[str]:
    """The words of a check of a run by this back end, whose model says this of itself."""
    path = config.parent / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | described_as))
    return ["check", str(config), "--actor.backend=megatron"]


def test_there_is_a_map_for_every_type_that_is_let_pass() -> None:
    from rolecall.training.megatron.families import FAMILIES  # takes seconds

    assert set(FAMILIES) == set(MODEL_TYPES)


@pytest.mark.parametrize("model_type", ABSENT)
def test_what_config_json_does_not_say_is_what_transformers_takes(model_type: str) -> None:
    from transformers import AutoConfig  # takes seconds

    config = AutoConfig.for_model(model_type)
    told = config.to_dict() | dict(config.rope_parameters)
    if "mlp_layer_types" in told:
        told["mlp_layer_types"] = sorted(set(told["mlp_layer_types"]) - {"sparse"})
    assert {name: told[name] for name in ABSENT[model_type]} == ABSENT[model_type]


@pytest.mark.parametrize("expert", [1, 2, 4])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_layout_that_fits_passes(
    config: Path, model: dict[str, Any], expert: int, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = ["--actor.num_ranks=8", "--actor.parallel.tensor=2", "--actor.parallel.pipeline=2"]
    if num_experts(model):
        layout.append(f"--actor.parallel.expert={expert}")
    assert main([*described(config, model), *layout]) == 0, capsys.readouterr().out


def test_the_stages_of_a_pipeline_are_told(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = write_light_config(config.parent / "other").parent / "model"
    described(other.parent / "light.yaml", DENSE | {"num_hidden_layers": 7})
    layouts = ["--actor.num_ranks=2", "--actor.parallel.pipeline=2", "--actor.megatron.virtual_stages=2"]
    critic = [f"--critic.path={other}", "--critic.num_ranks=2", "--critic.parallel.pipeline=2"]
    words = [*layouts, *critic, "--algorithm.advantage.kind=gae", "--critic.address=127.0.0.1:9"]
    main([*described(config, DENSE | {"num_hidden_layers": 5}), *words])
    said = capsys.readouterr().out
    assert "\npipeline of actor: 5 layers in stages of 1, 1, 2, 1, 2 on each rank\n" in said
    assert "\npipeline of critic: 7 layers in stages of 1, 2, 2, 2, 2 on each rank\n" in said


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"model_type": "gemma3_text"}, "no map for a model of type gemma3_text, only for llama, mistral, qwen2, "),
        ({"rope_parameters": {"rope_type": "proportional"}}, "rotary positions of type proportional"),
        ({"rope_scaling": OTHER_YARN, "partial_rotary_factor": 0.5}, "a part of queries and keys"),
        (MIXTURE | {"model_type": "glm4_moe", "rope_scaling": OTHER_YARN}, "a part of queries and keys"),
        (
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": OTHER_YARN, "partial_rotary_factor": 0.5},
            "a part of queries and keys",
        ),
        ({"model_type": "mistral", "layer_types": None}, "no map for a model of type ministral"),
        ({"hidden_act": "gelu"}, "activation gelu"),
        ({"attention_bias": True}, "attention_bias"),
        ({"model_type": "llama", "mlp_bias": True}, "mlp_bias"),
        (LATENT | {"topk_method": "group_limited_greedy"}, "experts that are chosen by group_limited_greedy"),
        (LATENT | {"rope_parameters": YARN | {"mscale": 1.0}}, "a part of queries and keys longer"),
        (LATENT | {"rope_parameters": YARN | {"attention_factor": 1.2}}, "a part of queries and keys longer"),
        (LATENT | {"rope_parameters": YARN | {"mscale": 0, "mscale_all_dim": 0}}, "a part of queries and keys longer"),
        (MIXTURE | {"norm_topk_prob": True, "num_experts_per_tok": 1}, "one expert for a token, whose weight"),
        (MIXTURE | {"model_type": "mixtral", "num_experts_per_tok": 1}, "one expert for a token, whose weight"),
        (WITHOUT_GROUPS | {"num_experts_per_tok": 6}, "groups of experts of which 4 are chosen for 6 experts"),
        (BY_SIGMOID | {"topk_group": 1}, "groups of experts of which 1 are chosen for 4 experts (topk_group)"),
        (BY_SIGMOID | {"norm_topk_prob": False}, "do not add up to 1 (norm_topk_prob)"),
        (BY_SIGMOID | {"num_experts_per_tok": 1, "n_group": 1}, "one expert for a token"),
        (BY_SIGMOID | {"rope_interleave": False}, "rotary positions in halves (rope_interleave)"),
        (SEED_OSS | {"attention_out_bias": True}, "biases on its output projections"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_model_that_is_not_computed_is_told(
    config: Path, model: dict[str, Any], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(described(config, DENSE | model)) == 2
    said = capsys.readouterr().out
    assert told in said
    assert "actor.backend" in said
    assert "or actor.backend fsdp" in said


@pytest.mark.parametrize(
    ("model", "layout", "told"),
    [
        (
            DENSE,
            {"num_ranks": 8, "parallel.tensor": 8},
            "parallel.tensor 8 does not divide the model's num_attention",
        ),
        (DENSE, {"num_ranks": 4, "parallel.tensor": 4}, "parallel.tensor 4 does not divide the model's num_key_value"),
        (
            DENSE,
            {"num_ranks": 3, "parallel.pipeline": 3, "megatron.virtual_stages": 2},
            "4 layers, fewer than parallel.pipeline x megatron.virtual_stages = 6; lower one of them",
        ),
        (
            DENSE | {"intermediate_size": 255},
            {"num_ranks": 2, "parallel.tensor": 2},
            "does not divide the model's intermediate_size 255; choose a divisor, or 1",
        ),
        (
            LATENT | {"q_lora_rank": 25},
            {"num_ranks": 2, "parallel.tensor": 2, "parallel.expert": 2},
            "parallel.tensor 2 does not divide the model's q_lora_rank 25",
        ),
        (
            QWEN2_MOE | {"shared_expert_intermediate_size": 49},
            {"num_ranks": 2, "parallel.tensor": 2},
            "parallel.tensor 2 does not divide the model's width of shared experts 49",
        ),
        (
            QWEN2_MOE | {"intermediate_size": 97},
            {"num_ranks": 2, "parallel.tensor": 2},
            "parallel.tensor 2 does not divide the model's intermediate_size 97",
        ),
        (
            MIXTURE | {"model_type": "glm4_moe_lite", "intermediate_size": 97},
            {"num_ranks": 2, "parallel.tensor": 2},
            "parallel.tensor 2 does not divide the model's intermediate_size 97",
        ),
        (DENSE, {"num_ranks": 2, "parallel.expert": 2}, "parallel.expert 2 does not divide the model's 0 experts"),
        (MIXTURE, {"num_ranks": 3, "parallel.expert": 3}, "parallel.expert 3 does not divide the model's 4 experts"),
        (MIXTURE, {"num_ranks": 2, "parallel.expert": 4}, "does not divide the 2 ranks of a pipeline stage"),
        (
            MIXTURE | {"num_experts": 8},
            {"num_ranks": 12, "parallel.pipeline": 2, "parallel.expert": 4},
            "parallel.expert 4 does not divide the 6 ranks of a pipeline stage",
        ),
        (
            MIXTURE,
            {"num_ranks": 2, "parallel.tensor": 2, "megatron.sequence_parallel": "false"},
            "actor.megatron.sequence_parallel is off",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_layout_that_the_model_does_not_fit_is_told(
    config: Path,
    model: dict[str, Any],
    layout: dict[str, int | str],
    told: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    words = [f"--actor.{key}={value}" for key, value in layout.items()]
    assert main([*described(config, model), *words]) == 2
    assert told in capsys.readouterr().out


@pytest.mark.parametrize(
    ("setting", "told"),
    [
        ("actor.optimizer.kind=muon", "optimizer.kind muon is not there with backend megatron; set adamw, or use"),
        (
            "actor.activation_offload=true",
            "activation_offload is not there with backend megatron; set gradient_checkpoint",
        ),
        (
            "actor.torch_compile=true",
            "torch_compile is not there with backend megatron; leave it out, or use backend f",
        ),
        (
            "actor.parallel.keep_gathered=true",
            "parallel.keep_gathered is not there with backend megatron; leave it out, or",
        ),
        (
            "actor.parallel.reduce_dtype=bfloat16",
            "parallel.reduce_dtype bfloat16 is not there with backend megatron; set f",
        ),
        (
            "actor.parallel.accumulate=unsharded",
            "parallel.accumulate unsharded is not there with backend megatron; set s",
        ),
        (
            "actor.lora={rank: 4, alpha: 4, target_modules: [q_proj, shared_expert_gate]}",
            "actor.lora.target_modules: shared_expert_gate gets no adapter with actor.backend megatron; leave it out",
        ),
        ("model.dtype=float16", "model.dtype float16 is not there with actor.backend megatron; set bfloat16, or use"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_setting_that_only_the_other_back_end_has_is_told(
    config: Path, setting: str, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*described(config, MIXTURE), f"--{setting}"]) == 2
    streams = capsys.readouterr()
    assert told in streams.out + streams.err


@pytest.mark.parametrize("role", ["critic", "references.old"])
def test_the_other_trainers_models_are_looked_at_too(
    config: Path, role: str, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_light_config(config.parent / "other").parent / "model"
    described(other.parent / "light.yaml", DENSE | {"model_type": "gemma3_text"})
    words = described(config, DENSE)
    more = {
        "critic": [f"--critic.path={other}", "--algorithm.advantage.kind=gae"],
        "references.old": [f"--references.old.path={other}", "--algorithm.kl={reference: old, kl_coef: 0.1}"],
    }
    assert main([*words, *more[role]]) == 2
    assert f"{role}.path {other}: actor.backend megatron has no map for a model of type gemma3_text" in (
        capsys.readouterr().out
    )
