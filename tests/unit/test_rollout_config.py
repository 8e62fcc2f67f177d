"""What a replica derives from the run's settings: cores, GPUs, EOS ids, the environment of its processes."""

import ast
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from rolecall.errors import ConfigError
from rolecall.settings import RunSettings
from rolecall.settings.engine_arguments import REFUSED
from rolecall.settings.rollout import PROBE_ROOM
from services.controller.publish.probe import MAX_PROBE_TOKENS, NUM_DECODED
from services.rollout.config import configure, start_environment
from tests.smallest import smallest_tree

TWO_LAYERS = {"max_position_embeddings": 128, "eos_token_id": 7, "num_hidden_layers": 2}
ARGUMENTS = importlib.util.find_spec("services.rollout.vllm.arguments")


def settings(
    tmp_path: Path,
    *,
    model: dict[str, Any] | None = None,
    generation: dict[str, Any] | None = None,
    algorithm: dict[str, Any] | None = None,
    **rollout: Any,
) -> RunSettings:
    (tmp_path / "config.json").write_text(
        json.dumps({"max_position_embeddings": 128, "eos_token_id": 7} if model is None else model)
    )
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    return RunSettings.model_validate(
        smallest_tree(
            tmp_path,
            model={"path": str(tmp_path)},
            rollout=rollout,
            algorithm={"groups_per_batch": 2} | (algorithm or {}),
        )
    )


def test_replicas_on_one_machine_share_no_core(tmp_path: Path) -> None:
    run = settings(tmp_path, num_replicas=3)
    taken = [configure(run, f"rollout-{i}", range(8)).cores for i in range(3)]
    assert taken == [((0, 1),), ((2, 3),), ((4, 5),)]
    assert start_environment(configure(run, "rollout-1", range(8)))["VLLM_CPU_OMP_THREADS_BIND"] == "2,3"


def test_one_setting_says_what_logits_are_computed_in_on_both_sides(tmp_path: Path) -> None:
    run = settings(tmp_path)
    assert not configure(run, "rollout-0", range(4)).float32_head
    wide = run.model_copy(update={"model": run.model.model_copy(update={"head_dtype": "float32"})})
    assert configure(wide, "rollout-0", range(4)).float32_head


def test_a_deterministic_run_sees_no_batch(tmp_path: Path) -> None:
    run = settings(tmp_path, devices=[[0]])
    assert "VLLM_BATCH_INVARIANT" not in start_environment(configure(run, "rollout-0", range(4)))
    again = run.model_copy(update={"run": run.run.model_copy(update={"deterministic": True})})
    assert start_environment(configure(again, "rollout-0", range(4)))["VLLM_BATCH_INVARIANT"] == "1"
    on_cpus = again.model_copy(update={"rollout": run.rollout.model_copy(update={"devices": ()})})
    config = configure(on_cpus, "rollout-0", range(4))
    assert config.batch_invariant
    assert config.max_groups == configure(settings(tmp_path), "rollout-0", range(4)).max_groups, "claims as much"
    assert "VLLM_BATCH_INVARIANT" not in start_environment(config), "vLLM has no such kernels there"


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"actor": {"router_replay": "r3"}}, "actor.router_replay r3: model.path .* has recurrent layers, .* use r2"),
        ({"run": {"deterministic": True}}, "run.deterministic: model.path .* has recurrent layers, .* batch-invariant"),
    ],
)
def test_what_a_gpu_cannot_do_with_recurrent_layers_is_said(
    tmp_path: Path, sections: dict[str, Any], said: str
) -> None:
    def run(kind: str) -> RunSettings:
        experts = {"num_experts": 4, "num_experts_per_tok": 2}
        model = {**TWO_LAYERS, **experts, "model_type": kind}
        return with_sections(settings(tmp_path, model=model, devices=[[0]]), sections)

    configure(run("qwen3_moe"), "rollout-0", range(4))
    with pytest.raises(ConfigError, match=said):
        configure(run("qwen3_next"), "rollout-0", range(4))


def test_a_float32_head_that_may_see_its_batch_is_refused_in_a_deterministic_run_on_gpus(tmp_path: Path) -> None:
    def run(dtype: str, **rollout: Any) -> RunSettings:
        sections = {"run": {"deterministic": True}, "model": {"head_dtype": "float32", "dtype": dtype}}
        return with_sections(settings(tmp_path, **rollout), sections)

    with pytest.raises(ConfigError, match=r"run\.deterministic: vLLM multiplies by a float32 head"):
        configure(run("bfloat16", devices=[[0]]), "rollout-0", range(4))
    configure(run("float32", devices=[[0]]), "rollout-0", range(4))
    configure(run("bfloat16"), "rollout-0", range(4))


def with_sections(run: RunSettings, sections: dict[str, Any]) -> RunSettings:
    changed = {name: getattr(run, name).model_copy(update=update) for name, update in sections.items()}
    return run.model_copy(update=changed)


def test_on_gpus_no_sampler_is_made_ready_that_draws_for_no_seed(tmp_path: Path) -> None:
    on_gpu = start_environment(configure(settings(tmp_path, devices=[[3]]), "rollout-0", range(4)))
    assert (on_gpu["VLLM_USE_FLASHINFER_SAMPLER"], on_gpu["CUDA_VISIBLE_DEVICES"]) == ("0", "3")


@pytest.mark.parametrize(("mask", "told"), [("GPU-8f3c2a1b", "nvidia-smi counts them"), ("0,1", "leaves out")])
def test_a_gpu_that_the_caller_hides_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: str, told: str
) -> None:
    config = configure(settings(tmp_path, devices=[[3]]), "rollout-0", range(4))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", mask)
    with pytest.raises(ConfigError, match=told):
        start_environment(config)


def test_float32_on_gpus_is_not_cut_to_tf32_by_triton(tmp_path: Path) -> None:
    """What triton's compiler reads: with its default the probe would refuse every version."""
    run = settings(tmp_path, devices=[[3]])
    exact = with_sections(run, {"model": {"dtype": "float32"}})
    assert start_environment(configure(exact, "rollout-0", range(4)))["TRITON_F32_DEFAULT"] == "ieee"
    rounded = with_sections(run, {"model": {"dtype": "bfloat16"}})
    assert "TRITON_F32_DEFAULT" not in start_environment(configure(rounded, "rollout-0", range(4)))


def test_ranks_of_a_replica_split_its_cores(tmp_path: Path) -> None:
    run = settings(tmp_path, num_replicas=2, tensor_parallel_size=2)
    config = configure(run, "rollout-1", range(8))
    assert config.cores == ((4, 5), (6, 7))
    environment = start_environment(config)
    assert environment["VLLM_CPU_OMP_THREADS_BIND"] == "4,5|6,7"
    assert environment["OMP_NUM_THREADS"] == "2"
    assert "OMP_PLACES" not in environment


def test_each_worker_of_each_stage_has_cores_and_a_rank_of_its_own(tmp_path: Path) -> None:
    run = settings(tmp_path, model=TWO_LAYERS, num_replicas=2, tensor_parallel_size=2, pipeline_parallel_size=2)
    config = configure(run, "rollout-1", range(8))
    assert config.cores == ((4,), (5,), (6,), (7,))
    assert (config.tensor_parallel_size, config.pipeline_parallel_size, config.num_workers) == (2, 2, 4)
    alone = configure(settings(tmp_path, model=TWO_LAYERS, pipeline_parallel_size=2), "rollout-0", range(4))
    assert alone.cores == ((0, 1), (2, 3))
    assert not alone.in_one_process
    assert "VLLM_ENABLE_V1_MULTIPROCESSING" not in start_environment(alone)


def test_a_stage_without_a_layer_is_refused(tmp_path: Path) -> None:
    assert (
        configure(settings(tmp_path, model=TWO_LAYERS, pipeline_parallel_size=2), "rollout-0", range(4)).num_workers
        == 2
    )
    with pytest.raises(ConfigError, match=r"rollout.pipeline_parallel_size 3: the model at .* has 2 layers; lower it"):
        configure(settings(tmp_path, model=TWO_LAYERS, pipeline_parallel_size=3), "rollout-0", range(4))


def test_an_eager_engine_on_cpus_needs_no_compiler(tmp_path: Path) -> None:
    environment = start_environment(configure(settings(tmp_path), "rollout-0", range(4)))
    assert environment["TORCHDYNAMO_DISABLE"] == "1"
    compiled = start_environment(configure(settings(tmp_path, enforce_eager=False), "rollout-0", range(4)))
    assert "TORCHDYNAMO_DISABLE" not in compiled


def test_a_lone_worker_is_bound_through_openmp_itself(tmp_path: Path) -> None:
    environment = start_environment(configure(settings(tmp_path, num_replicas=2), "rollout-1", range(4)))
    assert (environment["OMP_PLACES"], environment["OMP_PROC_BIND"]) == ("{2,3}", "true")


def test_replicas_overlap_only_when_cores_run_out(tmp_path: Path) -> None:
    run = settings(tmp_path, num_replicas=3)
    assert [configure(run, f"rollout-{i}", (4, 9)).cores for i in range(3)] == [((4,),), ((9,),), ((4,),)]


def test_a_replica_without_a_number_is_the_first_of_its_machine(tmp_path: Path) -> None:
    assert configure(settings(tmp_path, num_replicas=2), "rollout-1f3a9c2e", range(4)).cores == ((0, 1),)


def test_gpus_go_by_the_index_and_there_is_one_for_each_worker(tmp_path: Path) -> None:
    run = settings(tmp_path, num_replicas=2, devices=[[0, 1], [2, 3]], tensor_parallel_size=2)
    config = configure(run, "rollout-1", range(4))
    assert start_environment(config)["CUDA_VISIBLE_DEVICES"] == "2,3"
    assert config.enforce_eager is False
    assert config.kv_cache_bytes is None
    with pytest.raises(ConfigError, match="no entry for replica 2"):
        configure(run, "rollout-2", range(4))
    split: list[dict[str, Any]] = [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}]
    for sizes in split:
        with pytest.raises(ConfigError, match=r"names 1 GPUs, rollout.tensor_parallel_size x pipeline_paral.* is 2"):
            configure(settings(tmp_path, num_replicas=1, devices=[[0]], **sizes), "rollout-0", range(4))
    both = settings(
        tmp_path, model=TWO_LAYERS, devices=[[0, 1, 2, 3]], tensor_parallel_size=2, pipeline_parallel_size=2
    )
    assert configure(both, "rollout-0", range(4)).devices == (0, 1, 2, 3)


def test_eos_ids_are_those_of_both_configuration_files(tmp_path: Path) -> None:
    assert configure(settings(tmp_path, generation={"eos_token_id": [9, 7]}), "rollout-0", range(2)).eos_token_ids == (
        7,
        9,
    )


def test_a_model_that_could_never_stop_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="eos_token_id"):
        configure(settings(tmp_path, model={"max_position_embeddings": 128}), "rollout-0", range(2))


def test_a_model_directory_that_is_none_is_named(tmp_path: Path) -> None:
    run = settings(tmp_path)
    (tmp_path / "config.json").unlink()
    with pytest.raises(ConfigError, match=r"config\.json"):
        configure(run, "rollout-0", range(2))


def test_groups_in_hand_follow_from_the_engines_room(tmp_path: Path) -> None:
    assert configure(settings(tmp_path, max_num_seqs=64), "rollout-0", range(2)).max_groups == 8
    assert configure(settings(tmp_path, max_num_seqs=4), "rollout-0", range(2)).max_groups == 1
    assert configure(settings(tmp_path, max_groups=5), "rollout-0", range(2)).max_groups == 5


def test_an_argument_of_vllm_reaches_the_engine_and_an_unknown_one_is_named(tmp_path: Path) -> None:
    config = configure(settings(tmp_path, engine={"block_size": 64}), "rollout-0", range(4))
    assert config.engine == {"block_size": 64}
    with pytest.raises(ConfigError, match=r"rollout.engine.blok_size .*did you mean 'block_size'"):
        configure(settings(tmp_path, engine={"blok_size": 64}), "rollout-0", range(4))


def test_no_argument_of_vllm_breaks_a_promise(tmp_path: Path) -> None:
    for name, told in {
        "pipeline_parallel_size": "it follows from rollout.pipeline_parallel_size; set that",
        "data_parallel_size": r"replicas are the data parallelism .* run more of them \(rollout.num_replicas\)",
        "enable_expert_parallel": r".* as if each worker had every expert, .* rollout.tensor_parallel_size",
        "decode_context_parallel_size": r"a replica takes one rank .* rollout.pipeline_parallel_size",
        "kv_transfer_config": "a connector keeps keys and values past a publish",
        "kv_offloading_size": "a connector keeps keys and values past a publish",
        "kv_offloading_backend": "a connector keeps keys and values past a publish",
        "ec_transfer_config": "a connector keeps keys and values past a publish",
    }.items():
        with pytest.raises(ValidationError, match=f"{name}: {told}"):
            settings(tmp_path, engine={name: 2})
    with pytest.raises(ValidationError, match=r"max_model_len: it follows from data.max_prompt_tokens"):
        settings(tmp_path, engine={"max_model_len": 64})
    with pytest.raises(ValidationError, match=r"kv_cache_dtype fp8: .* algorithm.correction"):
        settings(tmp_path, algorithm={"correction": None}, engine={"kv_cache_dtype": "fp8"})
    assert settings(tmp_path, engine={"kv_cache_dtype": "fp8"}).rollout.engine


def test_a_cache_of_older_weights_is_corrected(tmp_path: Path) -> None:
    for idle in (None, {"weight": None}):
        with pytest.raises(ValidationError, match=r"rollout.pause_mode keep_cache: .* algorithm.correction"):
            settings(tmp_path, algorithm={"correction": idle}, pause_mode="keep_cache")
    bypass = settings(tmp_path, algorithm={"correction": {"proximal": "bypass"}}, pause_mode="keep_cache")
    assert configure(bypass, "rollout-0", range(2)).keeps_cache


def test_responses_that_are_kept_with_their_cache_leave_room_for_the_probe(tmp_path: Path) -> None:
    assert MAX_PROBE_TOKENS + NUM_DECODED <= PROBE_ROOM
    for name in ("max_num_batched_tokens", "max_num_scheduled_tokens"):
        with pytest.raises(ValidationError, match=rf"engine.{name} 575: .* set it to 576 or more"):
            settings(tmp_path, pause_mode="keep_cache", max_num_seqs=64, engine={name: 575})
        assert settings(tmp_path, pause_mode="keep_cache", max_num_seqs=64, engine={name: 576}).rollout.engine
        assert settings(tmp_path, max_num_seqs=64, engine={name: 575}).rollout.engine


def test_a_step_has_room_for_all_responses_and_the_probe(tmp_path: Path) -> None:
    def step_tokens(longest: int = 128, **rollout: Any) -> int:
        run = settings(tmp_path, model={"max_position_embeddings": longest, "eos_token_id": 7}, **rollout)
        run = with_sections(run, {"data": {"max_prompt_tokens": longest}})
        return configure(run, "rollout-0", range(2)).step_tokens

    assert (step_tokens(), step_tokens(longest=4000)) == (2048, 4000), "on CPUs no prompt is cut"
    assert (step_tokens(devices=[[0]]), step_tokens(longest=10000, devices=[[0]])) == (2048, 2048)
    assert step_tokens(max_num_seqs=5000) == 5000 + PROBE_ROOM
    assert step_tokens(max_num_seqs=10000, devices=[[0]]) == 10000 + PROBE_ROOM
    assert step_tokens(max_num_seqs=1, devices=[[0]]) == 2 * 128, "the response and the probe, whole"
    assert step_tokens(engine={"max_num_batched_tokens": 3000}) == 3000


def test_attention_is_split_evenly_or_the_setting_is_named(tmp_path: Path) -> None:
    def configured(num_workers: int) -> None:
        model = {**TWO_LAYERS, "num_attention_heads": 12, "num_key_value_heads": 6}
        configure(settings(tmp_path, model=model, tensor_parallel_size=num_workers), "rollout-0", range(16))

    for num_workers in (1, 2, 3, 6, 12):
        configured(num_workers)
    for num_workers in (4, 5, 24):
        with pytest.raises(ConfigError, match=rf"rollout.tensor_parallel_size {num_workers}: .* divisor"):
            configured(num_workers)


def test_whatever_a_replica_sets_itself_is_refused() -> None:
    """What engine_args gives vLLM could be overwritten otherwise."""
    assert ARGUMENTS is not None
    assert ARGUMENTS.origin is not None
    source = ast.parse(Path(ARGUMENTS.origin).read_text())
    (made,) = [
        node
        for node in ast.walk(source)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "AsyncEngineArgs"
    ]
    given = {keyword.arg for keyword in made.keywords}
    assert given - REFUSED.keys() == {
        "enable_prefix_caching",
        "max_num_batched_tokens",
        "disable_log_stats",
    }, "costs speed, or talks, at most"
