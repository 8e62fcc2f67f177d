"""Model directories that are incomplete, broken or do not fit: each is told apart by its files alone, with what to do,
and `rolecall check` finds it.
"""

import ast
import importlib.util
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rolecall.commands.check import find_problems, require
from rolecall.data.model.engine_limits import CPU_BLOCK_TOKENS, CPU_HEAD_DIMS
from rolecall.data.model.files import read_model
from rolecall.errors import ConfigError
from rolecall.settings import load_settings
from tests.tiny_tokenizer import write_tokenizer
from tests.twins.launched import VOCAB_SIZE, write_light_config, write_model

LONG_ROPE: dict[str, Any] = {"type": "su"}
PHI3: dict[str, Any] = {"model_type": "phi3", "original_max_position_embeddings": 64}


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_light_config(tmp_path)


def problems(config: Path, *overrides: str) -> list[str]:
    return find_problems(load_settings(config, list(overrides)), io.StringIO())


def edit(file: str, **changes: Any) -> Callable[[Path], None]:
    """Changes keys of a JSON file; None removes one."""

    def damage(model: Path) -> None:
        tree = json.loads((model / file).read_text()) | changes
        (model / file).write_text(json.dumps({key: value for key, value in tree.items() if value is not None}))

    return damage


def without(*files: str) -> Callable[[Path], None]:
    def damage(model: Path) -> None:
        for file in files:
            (model / file).unlink()

    return damage


def write(file: str, data: bytes) -> Callable[[Path], None]:
    def damage(model: Path) -> None:
        (model / file).write_bytes(data)

    return damage


def cut(model: Path) -> None:
    data = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(data[:-100])


def half_of_two(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))


def without_index(model: Path) -> None:
    (model / "model.safetensors").rename(model / "model-00001-of-00002.safetensors")


def smaller_embedding(model: Path) -> None:
    save_file({"model.embed_tokens.weight": np.zeros((VOCAB_SIZE - 9, 32), np.float32)}, model / "model.safetensors")


def more_tokens(model: Path) -> None:
    tree = json.loads((model / "tokenizer.json").read_text())
    tree["added_tokens"].append({**tree["added_tokens"][-1], "id": VOCAB_SIZE, "content": "<|late|>"})
    (model / "tokenizer.json").write_text(json.dumps(tree))


DAMAGES: list[tuple[Callable[[Path], None], str]] = [
    (without("config.json"), "config.json: [Errno 2] No such file or directory: "),
    (write("config.json", b"{"), "; model.path must be a Hugging Face model directory"),
    (write("config.json", b"[]"), "config.json is not a JSON object; model.path must be"),
    (without("model.safetensors"), " has no *.safetensors; convert the weights with save_pretrained"),
    (
        write("model.safetensors", b"version https://git-lfs.github.com/spec/v1\n"),
        "(a Git LFS pointer is not the file)",
    ),
    (
        write("model.safetensors", b"\x02\0\0\0\0\0\0\0{}"),
        "model.safetensors is not a safetensors file that holds tensors; download or save it again",
    ),
    (cut, "model.safetensors is cut short: "),
    (
        half_of_two,
        "model.safetensors.index.json names model-00002-of-00002.safetensors, which is not there (1 missing); "
        "download the rest",
    ),
    (without_index, " has model-00001-of-00002.safetensors and no model.safetensors.index.json; download the rest"),
    (without("tokenizer.json"), " has no tokenizer.json; save the tokenizer with save_pretrained, as a fast tokenizer"),
    (
        write("tokenizer.json", b'{"version"'),
        "tokenizer.json: Expecting ':' delimiter: line 1 column 11 (char 10); save the tokenizer again with "
        "save_pretrained",
    ),
    (
        without("chat_template.jinja"),
        ": the tokenizer has no chat template; name a file of one as model.chat_template",
    ),
    (write("chat_template.jinja", b"{% for"), "line 1: the chat template cannot render the turns user ("),
    (
        edit("config.json", eos_token_id=None),
        "names no eos_token_id in generation_config.json or config.json; without one no response would stop",
    ),
    (
        edit("config.json", vocab_size=100),
        ": the tokenizer has ids up to 258, the model has embeddings for 0 to 99; save the tokenizer that",
    ),
    (
        edit("config.json", quantization_config={"quant_method": "awq"}),
        " is quantized (awq), and quantized weights cannot be trained; use the model in bfloat16",
    ),
    (
        edit("config.json", quantization_config={"quant_method": "mxfp4"}),
        "weights cannot be trained; make a copy in bfloat16, which transformers does: AutoModelForCausalLM.from_pretra",
    ),
    (
        edit("config.json", final_logit_softcapping=0),
        ": final_logit_softcapping 0 of config.json is no soft cap; write a number above 0, or null for none",
    ),
    (
        edit("config.json", attn_logit_softcapping=50.0),
        " caps the scores of attention softly (attn_logit_softcapping 50.0 of config.json), which is supported of ",
    ),
    (
        edit("config.json", use_bidirectional_attention="all"),
        " has tokens see what comes behind them (use_bidirectional_attention of config.json), which a language model",
    ),
    (
        edit("config.json", model_type="gemma4"),
        r': Gemma4ForCausalLM.from_pretrained(..., key_mapping={r"^(model\.language_model|language_model\.model)\.": ',
    ),
    (
        edit("config.json", rope_parameters={"full_attention": {"rope_type": "longrope"}}),
        " turns positions by the longest sequence of a pass (rope_type 'longrope' of config.json), and sequences of",
    ),
    (
        edit("config.json", rope_scaling={"type": "longrope"}),
        " turns positions by the longest sequence of a pass (rope_type 'longrope' of config.json), and sequences of",
    ),
    (
        edit("config.json", rope_scaling=LONG_ROPE, **PHI3 | {"original_max_position_embeddings": 1}),
        " has LongRoPE with original_max_position_embeddings 1 and max_position_embeddings 2048 of config.json; both",
    ),
    (
        edit("config.json", rope_scaling=LONG_ROPE | {"factor": 8.0}, **PHI3),
        " has LongRoPE whose queries and keys transformers scales by 1.224745 and vLLM by 1.354006 (factor, attention_",
    ),
    (
        edit("config.json", rope_scaling=LONG_ROPE | {"long_mscale": 1.5}, **PHI3),
        " has LongRoPE whose queries and keys transformers scales by 1.354006 and vLLM by 1.5 (factor, attention_fact",
    ),
    (
        edit("config.json", rope_scaling={"type": "dynamic"}, rope_parameters={"rope_type": "default"}),
        " turns positions by the longest sequence of a pass (rope_type 'dynamic' of config.json), and sequences of",
    ),
    (
        edit("config.json", model_type="qwen9"),
        ": the installed transformers knows no model_type 'qwen9' of config.json; correct it, or use another model",
    ),
    (write("config.json", b"[" * 10_000), "config.json: lists or objects are nested too deep to be read; model.path"),
    (edit("config.json", eos_token_id="</s>"), "eos_token_id '</s>' in generation_config.json or config.json is no id"),
    (edit("config.json", eos_token_id=[[2]]), "eos_token_id [2] in generation_config.json or config.json is no id"),
    (
        edit("config.json", eos_token_id=[2, 900]),
        ": eos_token_id [900] are not ids of the model, which knows 0 to 258; correct them",
    ),
    (
        edit("tokenizer.json", added_tokens=None),
        ": transformers cannot load its tokenizer (KeyError: 'added_tokens'); save it again with save_pretrained",
    ),
    (write("tokenizer_config.json", b"[]"), ": transformers cannot load its tokenizer (TypeError: "),
    (edit("tokenizer.json", model={}), ": transformers cannot load its tokenizer ("),
    (
        edit("config.json", model_type="mamba2"),
        " is of model_type 'mamba2', which keeps a state from token to token, and packed sequences would hand",
    ),
    (edit("config.json", is_encoder_decoder=True), " is an encoder-decoder model; use a causal language model"),
    (
        edit("config.json", num_attention_heads=4, num_key_value_heads=3),
        ": config.json has num_attention_heads 4, not a multiple of num_key_value_heads 3; correct it",
    ),
    (
        smaller_embedding,
        ": the tokenizer has ids up to 258, the model has embeddings for 0 to 249; save the tokenizer that",
    ),
    (more_tokens, ": the tokenizer has ids up to 259, the model has embeddings for 0 to 258; save the tokenizer that"),
]


@pytest.mark.parametrize(("damage", "told"), DAMAGES, ids=[told.strip(" :;")[:40] for _, told in DAMAGES])
def test_a_model_directory_that_lacks_something_is_named_with_what_to_do(
    config: Path, damage: Callable[[Path], None], told: str
) -> None:
    assert problems(config) == []
    damage(config.parent / "model")
    found = problems(config)
    assert any(told in problem for problem in found), found
    assert all(str(config.parent) in problem for problem in found), "every complaint names the file"
    with pytest.raises(ConfigError) as refused:
        require(load_settings(config), io.StringIO())
    assert told in refused.value.message


def test_a_directory_that_is_not_there_is_told_once(config: Path) -> None:
    (told,) = problems(config, "model.path=/elsewhere")
    assert told.startswith("model.path must be a Hugging Face model directory, and there is no /elsewhere; ")


@pytest.mark.parametrize("name", ["config.yaml", "COMMITTED"])
def test_a_run_or_a_checkpoint_is_told_once_with_what_makes_a_model_of_it(config: Path, name: str) -> None:
    (config.parent / "other").mkdir()
    (config.parent / "other" / name).touch()
    (told,) = problems(config, f"model.path={config.parent}/other")
    assert told.endswith(f"is a run or a checkpoint; `rolecall export {config.parent}/other DIR` makes one of it")


@pytest.mark.parametrize("sizes", [{"head_dim": 16}, {"head_dim": None, "hidden_size": 64, "num_attention_heads": 4}])
def test_heads_that_vllm_refuses_on_cpus_are_named_before_its_first_prompt(config: Path, sizes: dict[str, Any]) -> None:
    edit("config.json", **sizes)(config.parent / "model")
    (told,) = problems(config, "rollout.num_replicas=1")
    assert "head_dim 16 is not one that vLLM's attention takes on CPUs (32, 64, 80, 96, 112, 128" in told
    assert "use another model, or give rollout.devices" in told
    assert problems(config, "rollout.num_replicas=0") == []


@pytest.mark.parametrize(
    ("override", "model_type", "least"),
    [
        ("rollout.kv_cache_bytes=1", "qwen3", 1040 * 2 * 2 * 32 * 3 * 2),
        ("rollout.kv_cache_bytes=798719", "llama", 1040 * 2 * 2 * 32 * 3 * 2),
        ("rollout.kv_cache_bytes=798720", "qwen3", None),
        (
            "rollout={kv_cache_bytes: 1, tensor_parallel_size: 2, pipeline_parallel_size: 2}",
            "qwen3",
            1040 * 2 * 32 * 2 * 2,
        ),
        ("rollout.kv_cache_bytes=1", "mistral", 1040 * 2 * 2 * 32 * 3 * 2),
        ("rollout.kv_cache_bytes=1", "apertus", None),
        ("rollout={kv_cache_bytes: 798720, engine: {kv_cache_dtype: fp8}}", "qwen3", None),
    ],
)
def test_a_cache_that_holds_no_response_is_refused_where_it_is_sure(
    config: Path, override: str, model_type: str, least: int | None
) -> None:
    """Blocks of 16 tokens are whole."""
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 3, "model_type": model_type}
    edit("config.json", **sizes)(config.parent / "model")
    found = problems(config, override, "rollout.num_replicas=1", "model.dtype=bfloat16")
    refused = [problem for problem in found if problem.startswith("rollout.kv_cache_bytes")]
    assert len(refused) == (least is not None), found
    told = f"up to 1032 tokens, take {least} bytes on each worker; raise it, or lower data.max_prompt_tokens"
    assert all(told in problem for problem in refused)


def test_the_default_cache_on_cpus_holds_a_response_or_is_refused(config: Path) -> None:
    sizes = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 5000, "model_type": "qwen3"}
    edit("config.json", **sizes)(config.parent / "model")
    found = problems(config, "rollout.num_replicas=1", "model.dtype=bfloat16")
    told = f"rollout.kv_cache_bytes {2**30} (its default on CPUs): keys and values of a prompt and a response"
    assert any(told in problem for problem in found), found


def test_blocks_that_vllm_refuses_on_cpus_are_named_before_it_loads_the_model(config: Path) -> None:
    for size in (7, 16, 48, 0):
        (told,) = problems(config, "rollout.num_replicas=1", f"rollout.engine={{block_size: {size}}}")
        assert f"rollout.engine.block_size {size} is no multiple of 32" in told
    for good in ("32", "96", "null"):
        assert problems(config, "rollout.num_replicas=1", f"rollout.engine={{block_size: {good}}}") == []
    edit("config.json", kv_lora_rank=16)(config.parent / "model")
    found = problems(config, "rollout.num_replicas=1", "rollout.engine={block_size: 7}")
    assert not any("block_size" in problem for problem in found), "latent attention takes its own instead"


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ({}, None),
        ({"layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "swiglu_limit": 7.0}, None),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 32.0}}, None),
        ({"swiglu_limit": 5.0}, "a gpt-oss with swiglu_limit as its publisher has it, and not 5.0 of config.json"),
        ({"swiglu_alpha": 1.0}, "with swiglu_alpha as its publisher has it"),
        ({"rms_norm_eps": 1e-6}, "with rms_norm_eps as its publisher has it"),
        ({"attention_bias": False}, "with attention_bias as its publisher has it"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "with layer_types as its publisher has it"),
        ({"rope_parameters": {"rope_type": "default"}}, "with rope_parameters as its publisher has it"),
    ],
)
def test_a_gpt_oss_that_vllm_would_compute_as_another_is_refused(
    config: Path, other: dict[str, Any], told: str | None
) -> None:
    edit("config.json", model_type="gpt_oss", **other)(config.parent / "model")
    found = problems(config, "rollout.num_replicas=1")
    assert found == [] if told is None else any(told in problem for problem in found), found
    assert problems(config, "rollout.num_replicas=0") == []


def test_a_stablelm_of_which_vllm_leaves_something_out_is_refused(config: Path) -> None:
    for left_out in ("use_parallel_residual", "qk_layernorm"):
        edit("config.json", model_type="stablelm", **{left_out: True})(config.parent / "model")
        (told,) = problems(config, "rollout.num_replicas=1")
        assert f"vLLM computes a stablelm without {left_out} of config.json; use a model that has neither" in told
        assert problems(config, "rollout.num_replicas=0") == []
        edit("config.json", **{left_out: False})(config.parent / "model")
    assert problems(config, "rollout.num_replicas=1") == []


@pytest.mark.parametrize(
    "layers", [{}, {"layer_types": ["full_attention", "sliding_attention"]}], ids=["rule", "types"]
)
def test_a_qwen_of_which_some_layers_alone_have_a_window_is_refused(config: Path, layers: dict[str, Any]) -> None:
    windows = {"model_type": "qwen2", "num_hidden_layers": 2, "use_sliding_window": True, "sliding_window": 8}
    edit("config.json", **windows, **layers, max_window_layers=1)(config.parent / "model")
    (told,) = problems(config, "rollout.num_replicas=1")
    assert "vLLM takes no qwen2 whose layers attend within a window in part (from max_window_layers 1 of 2 on" in told
    assert problems(config, "rollout.num_replicas=0") == []
    for first in (0, 2) if not layers else (2,):
        edit("config.json", max_window_layers=first)(config.parent / "model")
        assert problems(config, "rollout.num_replicas=1") == []


def told_by_check(config: Path, *overrides: str) -> str:
    told = io.StringIO()
    assert find_problems(load_settings(config, list(overrides)), told) == []
    return told.getvalue()


def test_the_factors_of_long_rope_are_told_by_the_longest_sequence_of_the_engine(config: Path) -> None:
    """Training's or an evaluation's, and never more than the model's own bound."""
    edit("config.json", rope_scaling=LONG_ROPE, **PHI3)(config.parent / "model")
    short = ("data.max_prompt_tokens=32", "sampling.max_tokens=32")
    assert "LongRoPE's short factors for all tokens; the longest sequence, of 64 tokens, is within original_max_" in (
        told_by_check(config, *short)
    )
    longer = ("data.max_prompt_tokens=32", "sampling.max_tokens=33")
    assert "rotary positions of model.path: LongRoPE's long factors for all tokens; the longest sequence, of 65" in (
        told_by_check(config, *longer)
    )


GEMMA4 = {"model_type": "gemma4_text", "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}


@pytest.mark.parametrize("layers", [{"per_layer_config": {"1": {"head_dim": 48}}}, {"global_head_dim": 48}], ids=str)
def test_a_head_of_some_layers_that_vllm_refuses_on_cpus_is_named(config: Path, layers: dict[str, Any]) -> None:
    edit("config.json", **GEMMA4, **layers)(config.parent / "model")
    assert any("head_dim 48 is not one that vLLM's" in each for each in problems(config, "rollout.num_replicas=1"))


def test_ranks_share_sequences_of_a_gemma_4_as_its_fewest_key_heads_allow_and_no_matrices(config: Path) -> None:
    edit("config.json", **GEMMA4, per_layer_config={"1": {"num_key_value_heads": 1}})(config.parent / "model")
    assert problems(config, "actor.num_ranks=2", "actor.parallel.sequence=2") == []
    (told,) = problems(config, "actor.num_ranks=2", "actor.parallel.tensor=2")
    assert "is a Gemma 4, whose matrices ranks do not share: set parallel.tensor to 1" in told


def test_adapters_of_a_gemma_4_whose_values_are_keys_are_published_merged_alone(config: Path) -> None:
    edit("config.json", **GEMMA4, attention_k_eq_v=True)(config.parent / "model")
    lora = ("rollout.num_replicas=1", "actor.lora={rank: 4, target_modules: [up_proj]}")
    said = problems(config, *lora)
    assert any("has values that are keys (attention_k_eq_v of config.json)" in each for each in said), said
    merged = problems(config, *lora, "weights.merge_adapters=true")
    assert not any("attention_k_eq_v" in each for each in merged), merged


RECURRENT = {"model_type": "qwen3_next"}


@pytest.mark.parametrize(
    ("dtype", "sizes", "told"),
    [
        ("bfloat16", {}, None),
        ("bfloat16", {"linear_key_head_dim": 64, "linear_value_head_dim": 64}, None),
        ("float32", {}, "in bfloat16 alone, keys and values of one head dimension, 64 or 128; set model.dtype"),
        ("bfloat16", {"linear_key_head_dim": 64}, "keys and values of one head dimension, 64 or 128; set model.dtype"),
        ("bfloat16", {"linear_key_head_dim": 128, "linear_value_head_dim": 128}, None),
        ("bfloat16", {"linear_key_head_dim": 96, "linear_value_head_dim": 96}, "one head dimension, 64 or 128"),
        ("bfloat16", {"model_type": "qwen3_5_text"}, "vLLM's code for qwen3_5_text imports torchvision, which is not"),
    ],
)
def test_recurrent_layers_that_vllm_refuses_on_cpus_are_named_before_its_first_prompt(
    config: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, sizes: dict[str, Any], told: str | None
) -> None:
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torchvision" else find_spec(name))
    edit("config.json", **(RECURRENT | sizes))(config.parent / "model")
    said = io.StringIO()
    found = find_problems(load_settings(config, ["rollout.num_replicas=1", f"model.dtype={dtype}"]), said)
    assert "recurrent layers: each sequence goes through them by itself" in said.getvalue()
    assert found == [] if told is None else any(told in problem for problem in found), found
    assert problems(config, "rollout.num_replicas=0", f"model.dtype={dtype}") == []


def test_prefixes_of_recurrent_layers_are_not_kept_on_cpus(config: Path) -> None:
    keeping = ("rollout.num_replicas=1", "model.dtype=bfloat16", "rollout.engine={enable_prefix_caching: true}")
    assert problems(config, *keeping) == []
    edit("config.json", **RECURRENT)(config.parent / "model")
    (told,) = problems(config, *keeping)
    assert told.startswith("rollout.engine.enable_prefix_caching: with recurrent layers it needs prompts that are cut")


def test_what_attention_takes_on_cpus_is_what_vllm_lists() -> None:
    """Read in vLLM's source: importing it takes ten seconds, and changes logging and torch for good."""
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or vllm.origin is None:
        pytest.skip("vllm is not installed")
    source = (Path(vllm.origin).parent / "v1" / "attention" / "backends" / "cpu_attn.py").read_text()
    functions = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)]
    answers = {one.name: ast.unparse(one.body[-1]) for one in functions}
    assert answers["get_supported_head_sizes"] == f"return {list(CPU_HEAD_DIMS)}"
    assert answers["get_supported_kernel_block_sizes"] == f"return [MultipleOf({CPU_BLOCK_TOKENS})]"


def test_a_reference_of_another_family_is_refused_and_one_with_more_tokens_is_not(config: Path, tmp_path: Path) -> None:
    pieces = [f"<{number}>" for number in range(1300)]
    for name, more in (("model", pieces), ("teacher", pieces), ("stranger", ["<other>", *pieces])):
        folder = write_model(tmp_path / name)
        edit("config.json", vocab_size=2000)(folder)
        save_file({"model.embed_tokens.weight": np.zeros((2000, 32), np.float32)}, folder / "model.safetensors")
        fast = write_tokenizer(folder, more_tokens=more)
        if name == "teacher":
            fast.add_tokens(["<think>"])
            fast.save_pretrained(folder)

    def told(name: str) -> list[str]:
        reference = f"references={{ref: {{path: {name}, address: 'localhost:1'}}}}"
        return problems(config, reference, "algorithm.kl={reference: ref, kl_coef: 0.1}")

    assert told("teacher") == []
    (problem,) = told("stranger")
    assert "stranger has the tokenizer of another family, and reads the policy's token ids" in problem


def test_a_critic_and_a_reference_of_another_vocabulary_are_named_by_their_setting(
    config: Path, tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other")
    edit("config.json", vocab_size=200)(other)
    critic = ["critic={path: other, address: 'localhost:1'}", "algorithm.advantage={kind: gae}"]
    reference = [
        "references={ref: {path: other, address: 'localhost:1'}}",
        "algorithm.kl={reference: ref, kl_coef: 0.1}",
    ]
    for setting, overrides in (("critic.path", critic), ("references.ref.path", reference)):
        (told,) = problems(config, *overrides)
        assert told.startswith(
            f"{setting} {other}: the tokenizer has ids up to 258, the model has embeddings for 0 to 199"
        )


def test_stop_ids_that_the_model_does_not_know_are_named(config: Path) -> None:
    (told,) = problems(config, "sampling.stop_token_ids=[2, 259]")
    assert told == "sampling.stop_token_ids [259] are not ids of the model, which knows 0 to 258; correct them"


@pytest.mark.parametrize("asked", ["actor.moe.balance_coef=0.1", "model.freeze_routers=true"])
def test_what_routers_are_to_do_is_refused_where_there_are_none(config: Path, asked: str) -> None:
    setting = asked.partition("=")[0].removesuffix(".balance_coef")
    (told,) = problems(config, asked)
    assert told.startswith(f"{setting}: model.path ")
    lacks = "its config.json has no num_experts_per_tok or top_k_experts"
    assert told.endswith(f"is no mixture of experts ({lacks}); remove {setting}")


def test_the_largest_layer_is_told_where_a_gpu_has_to_hold_it(config: Path, tmp_path: Path) -> None:
    model = write_model(tmp_path / "experts")
    experts = {f"model.layers.1.mlp.experts.{i}.up_proj.weight": np.zeros((4, 3), np.float32) for i in range(10)}
    others = {
        "model.embed_tokens.weight": np.zeros((20, 4), np.float32),
        "model.layers.0.mlp.up_proj.weight": np.zeros((5, 4), np.float32),
    }
    for file in model.glob("*.safetensors"):
        file.unlink()
    save_file(experts | others, model / "model.safetensors")
    assert read_model(model).largest_layer == 10 * 12
    out = io.StringIO()
    find_problems(load_settings(config, ["rollout.devices=[[0]]", "rollout.num_replicas=1"]), out)
    assert "of each GPU for the largest layer, as it arrives and in place, beside three buckets" in out.getvalue()


def test_blocks_that_predict_further_tokens_are_not_counted_and_those_of_a_vision_tower_are(config: Path) -> None:
    path = config.parent / "model"
    tree = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(tree | {"num_hidden_layers": 2}))
    loaded = ["lm_head.weight", "model.layers.1.up.weight", "model.layers.1.mlp.experts.5.up.weight"]
    tower = ["model.visual.blocks.30.up.weight"]
    further = ["model.layers.2.eh_proj.weight", "model.layers.2.mlp.experts.0.up.weight", "mtp.layers.0.up.weight"]
    matrix = np.zeros((2, 3), np.float32)
    save_file(dict.fromkeys([*loaded, *tower, *further], matrix), path / "model.safetensors")
    facts = read_model(path)
    assert (facts.num_parameters, facts.num_tower_parameters, facts.largest_layer) == (6 * 4, 6, 6 * 2)
