"""What cannot fit a machine is refused with figures; what may is not."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from rolecall.commands.check.capacity import check_capacity, host_memory_bytes
from rolecall.commands.check.footprint import host_memory, memory_and_disk
from rolecall.commands.check.gpus import cache
from rolecall.data.model.files import ModelFacts, read_model
from rolecall.data.model.parameter_counts import UPDATED_AT_A_TIME
from rolecall.data.shift_plan import (
    CONTEXT_BYTES,
    GRAPHS_BYTES,
    ShiftPlan,
    check_cpu_sleep,
    gpu_memory_bytes,
    plan_shifts,
)
from rolecall.errors import ConfigError
from rolecall.settings import RunSettings
from rolecall.weights.shared_memory.device_slots import CHUNK_BYTES, NUM_SLOTS
from rolecall.weights.transfer import IN_FLIGHT
from tests.conftest import MakeSettings
from tests.twins.launched import write_model
from tests.unit.test_megatron_stages import write_shapes

SEVEN_B = ModelFacts(architecture="Qwen3ForCausalLM", num_parameters=7_000_000_000, largest_layer=200_000_000)


@pytest.fixture
def gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four GPUs of 80 GiB, by an nvidia-smi that says so."""
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\nfor i in 0 1 2 3; do echo $i, 81920; done\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr("rolecall.commands.check.footprint.host_memory_bytes", lambda: 512 * 2**30)


def lines(settings: RunSettings) -> list[str]:
    return list(check_capacity(settings, SEVEN_B))


def test_memory_is_the_machines_or_what_its_control_group_leaves(tmp_path: Path) -> None:
    (tmp_path / "meminfo").write_text("MemTotal:       1048576 kB\nMemFree:        1 kB\n")
    assert host_memory_bytes(tmp_path, tmp_path / "none") == 2**30
    (tmp_path / "memory.max").write_text("max\n")
    assert host_memory_bytes(tmp_path, tmp_path) == 2**30
    (tmp_path / "memory.max").write_text(f"{2**29}\n")
    assert host_memory_bytes(tmp_path, tmp_path) == 2**29


@pytest.mark.usefixtures("gpus")
def test_roles_on_gpus_are_held_against_the_memory_of_each(make_settings: MakeSettings) -> None:
    assert gpu_memory_bytes() == dict.fromkeys(range(4), 80 * 2**30)
    rollout = {"devices": [[3]], "kv_cache_bytes": 2**33}
    (told,) = lines(make_settings(actor={"devices": [0, 1], "num_ranks": 2}, rollout=rollout))
    assert "GPU 3 80.0 GiB" in told
    with pytest.raises(
        ConfigError,
        match=r"actor needs at least 104.3 GiB on GPU 0, and no GPU of this machine has more than 80.0 GiB; "
        r"use more GPUs for it, actor.optimizer.offload, actor.lora, or a smaller model",
    ):
        lines(make_settings(actor={"devices": [0]}, rollout=rollout))
    lines(make_settings(actor={"devices": [0], "optimizer": {"offload": True}}, rollout=rollout))
    lines(make_settings(actor={"address": "elsewhere:1"}, rollout=rollout))
    with pytest.raises(
        ConfigError, match=r"rollout needs at least 109.8 GiB on GPU 3, and no GPU of this machine has more"
    ):
        lines(
            make_settings(
                actor={"devices": [0, 1], "num_ranks": 2}, rollout={"devices": [[3]], "kv_cache_bytes": 96 * 2**30}
            )
        )


@pytest.mark.usefixtures("gpus")
@pytest.mark.parametrize("role", ["actor", "critic", "reference ref"])
def test_over_megatron_the_fullest_rank_is_what_has_to_fit(
    make_settings: MakeSettings, tmp_path: Path, role: str
) -> None:
    """Embedding and head stand whole at the ends of a pipeline, while an even share would fit."""
    num_held, per_held = (60 * 10**9, 2) if role == "reference ref" else (6 * 10**9, 2 + 4 + 12)
    path = write_model(tmp_path / "model")
    shapes = {f"model.layers.{index}.mlp.gate_proj.weight": [10**8] for index in range(3)}
    shapes |= {"model.embed_tokens.weight": [num_held, 1], "lm_head.weight": [1, num_held]}
    write_shapes(path, shapes, {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": 3})
    here = {"devices": [0, 1, 2], "num_ranks": 3, "parallel": {"pipeline": 3}}
    placed = {
        each: here if each == role else {"address": "elsewhere:1"} for each in ("actor", "critic", "reference ref")
    }
    settings = make_settings(
        model={"path": str(path)},
        algorithm={"groups_per_batch": 3, "advantage": {"kind": "gae"}, "kl": {"reference": "ref", "kl_coef": 0.1}},
        actor={"backend": "megatron", **placed["actor"]},
        critic=placed["critic"],
        references={"ref": placed["reference ref"]},
        rollout={"devices": [[3]]},
    )
    need = (num_held + 10**8) * per_held / 2**30
    with pytest.raises(ConfigError, match=rf"{role} needs at least {need:.1f} GiB on GPU 0"):
        lines(settings)


def test_gpus_that_nobody_tells_of_are_not_judged(make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    lines(make_settings(actor={"devices": [0]}, rollout={"devices": [[1]]}))


@pytest.mark.usefixtures("gpus")
def test_a_run_of_no_steps_has_weights_alone_and_writes_no_checkpoint(
    make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `rolecall evaluate` makes of a run."""
    run = {"name": "held-out", "dir": "run", "num_steps": 0}
    for rollout in ({"devices": [[0]]}, {"devices": [[1]], "kv_cache_bytes": 2**33}):
        lines(make_settings(run=run, actor={"devices": [0]}, rollout=rollout))
        with pytest.raises(ConfigError, match="GPU"):
            lines(make_settings(actor={"devices": [0]}, rollout=rollout))
    full = SimpleNamespace(free=2**30)
    monkeypatch.setattr("shutil.disk_usage", lambda path: full)
    told = list(memory_and_disk(make_settings(run=run), SEVEN_B))
    assert not any("a checkpoint" in line for line in told)
    with pytest.raises(ConfigError, match="make room"):
        list(memory_and_disk(make_settings(), SEVEN_B))


@pytest.mark.usefixtures("gpus")
def test_a_shared_gpu_is_held_against_each_shift_with_the_bytes_that_are_missing(make_settings: MakeSettings) -> None:
    def shared(num_gpus: int, **rollout: float) -> RunSettings:
        devices = list(range(num_gpus))
        rollouts = {"devices": [devices], "tensor_parallel_size": num_gpus, **rollout}
        return make_settings(actor={"devices": devices, "num_ranks": num_gpus}, rollout=rollouts)

    both = make_settings(
        actor={"devices": [0], "optimizer": {"offload": True}},
        rollout={"devices": [[0]]},
        critic={"devices": [0]},
        algorithm={"groups_per_batch": 2, "advantage": {"kind": "gae"}},
    )
    with pytest.raises(
        ConfigError,
        match=r"they and a sleeping rollout take 111\.6 GiB of each, 31\.6 GiB more than it has",
    ):
        lines(both)
    kept = make_settings(
        actor={"devices": [0], "optimizer": {"offload": True}},
        rollout={"devices": [[0]]},
        critic={"devices": [0], "optimizer": {"offload": False}},
        algorithm={"groups_per_batch": 2, "advantage": {"kind": "gae"}},
    )
    with pytest.raises(ConfigError, match=r"critic needs at least 104\.3 GiB on GPU 0"):
        lines(kept)
    moments = [plan_shifts(one, SEVEN_B, gpu_memory_bytes()).training for one in (kept, both)]
    assert moments[0] - moments[1] == 8 * (7e9 - UPDATED_AT_A_TIME), "the critic's, but for those of a step"
    alone = make_settings(actor={"devices": [0], "optimizer": {"offload": True}}, rollout={"devices": [[0]]})
    lines(alone)
    wide = replace(SEVEN_B, largest_layer=10**9)
    larger, small = (plan_shifts(alone, facts, gpu_memory_bytes()).trained for facts in (wide, SEVEN_B))
    assert larger - small == 8 * (10**9 - UPDATED_AT_A_TIME), "a tensor that is larger is alone"
    lines(shared(2))
    with pytest.raises(ConfigError, match=r"while the actor publishes, its parameters \(13\.0 GiB\), weights on"):
        lines(shared(2, kv_cache_bytes=64 * 2**30))
    plan = plan_shifts(shared(2), SEVEN_B, gpu_memory_bytes())
    assert plan.training == 7e9 * 16 / 2 + 2 * CONTEXT_BYTES + GRAPHS_BYTES, "the actor's, and a sleeping rollout's"
    eager = plan_shifts(shared(2, enforce_eager=True), SEVEN_B, gpu_memory_bytes())
    assert plan.training - eager.training == GRAPHS_BYTES
    assert plan.beside_rollouts == 7e9 * 4 / 2 + CONTEXT_BYTES + plan.passing
    assert plan.passing == NUM_SLOTS * CHUNK_BYTES + 2 * (IN_FLIGHT + 1) * 16 * 2**20 + 200_000_000 * 2 * 3.5
    assert plan.share == pytest.approx(1 - (plan.beside_rollouts + CONTEXT_BYTES) / (80 * 2**30))
    stages = shared(2, tensor_parallel_size=1, pipeline_parallel_size=2)
    assert plan_shifts(stages, SEVEN_B, gpu_memory_bytes()).rollout == plan.rollout
    assert plan_shifts(shared(4, gpu_memory_utilization=0.8), SEVEN_B, gpu_memory_bytes()).share == 0.8


@pytest.mark.usefixtures("gpus")
def test_the_plan_of_a_shared_gpu_counts_who_stays_and_who_leaves(make_settings: MakeSettings) -> None:
    gae = {"groups_per_batch": 2, "advantage": {"kind": "gae"}, "kl": {"reference": "ref", "kl_coef": 0.1}}

    def planned(critic: list[int], reference: list[int], **more: bool) -> ShiftPlan:
        settings = make_settings(
            actor={"devices": [0]},
            rollout={"devices": [[0]]},
            critic={"devices": critic},
            algorithm=gae,
            references={"ref": {"devices": reference, **more}},
        )
        return plan_shifts(settings, SEVEN_B, gpu_memory_bytes())

    apart, together, staying = planned([1], [2]), planned([0], [0]), planned([0], [0], offload=False)
    assert together.trained == 2 * apart.trained
    assert together.resident - apart.resident == 2 * CONTEXT_BYTES
    assert staying.resident - together.resident == 7e9 * 2
    assert (apart.scored, together.scored, staying.scored) == (0, 7e9 * 2, 0)
    assert together.scoring == together.resident + 7e9 * 2 + together.asleep
    assert together.parameters == apart.parameters
    replace(together, trained=8e10).require_room()
    with pytest.raises(ConfigError, match=r"the references score .* 87\.8 GiB of each, 7\.8 GiB more than .*num_ranks"):
        replace(together, trained=8e10, scored=9e10).require_room()
    with pytest.raises(ConfigError, match=r"leave references\.<name>\.offload out"):
        replace(staying, trained=8e10).require_room()


@pytest.mark.usefixtures("gpus")
def test_rolecall_check_says_what_each_shift_takes(make_settings: MakeSettings, tmp_path: Path) -> None:
    run = {"name": "test", "dir": str(tmp_path), "num_steps": 1, "checkpoint_url": "memory://checkpoints"}
    shared = {"run": run, "actor": {"devices": [0]}, "rollout": {"devices": [[0]]}}
    said = "\n".join(memory_and_disk(make_settings(**shared), SEVEN_B))
    for line in ("training: 106.8 GiB, rollouts asleep", "publishing: 28.5 GiB", "sampling: 768.0 MiB beside"):
        assert line in said
    assert "rollouts take 63% of the GPU" in said
    assert "scoring" not in said
    kl = {"groups_per_batch": 2, "kl": {"reference": "ref", "kl_coef": 0.1}}
    beside = make_settings(**shared, algorithm=kl, references={"ref": {"devices": [0]}})
    said = "\n".join(memory_and_disk(beside, SEVEN_B))
    assert "scoring: 16.3 GiB, of which the references are 13.0 GiB, rollouts asleep and all state" in said
    assert "sampling: 1.5 GiB beside the rollouts, all state of the trainers and references in host" in said


def test_rollouts_on_cpus_are_not_told_to_sleep(make_settings: MakeSettings) -> None:
    with pytest.raises(ConfigError, match=r"rollout\.sleep_mode: vLLM gives memory up on GPUs only"):
        check_cpu_sleep(make_settings(rollout={"sleep_mode": True}))
    check_cpu_sleep(make_settings())


@pytest.mark.usefixtures("gpus")
def test_a_critic_with_adapters_has_its_base_in_the_models_dtype_and_optimizes_them_alone(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    path = write_model(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "num_hidden_layers": 1}))
    save_file({"model.layers.0.self_attn.q_proj.weight": np.zeros((48, 16), np.float32)}, path / "model.safetensors")
    adapters = 4 * (48 + 16)
    gae = {"groups_per_batch": 2, "advantage": {"kind": "gae"}}
    run = {"name": "test", "dir": str(tmp_path), "num_steps": 1, "checkpoint_url": "memory://checkpoints"}

    def settings(shared: bool, backend: str = "fsdp", **critic: Any) -> RunSettings:
        return make_settings(
            run=run,
            model={"path": str(path)},
            algorithm=gae,
            actor={"devices": [0, 1], "num_ranks": 2, "backend": backend},
            critic={"devices": [0, 1] if shared else [2], "num_ranks": 2 if shared else 1, **critic},
            rollout={"devices": [[0], [1]] if shared else [[3]], "num_replicas": 2 if shared else 1},
        )

    lora = {"rank": 4, "target_modules": ["q_proj"]}
    with pytest.raises(ConfigError, match=r"critic needs at least 104\.3 GiB on GPU 2"):
        lines(settings(shared=False))
    lines(settings(shared=False, lora=lora))
    said = "\n".join(memory_and_disk(settings(shared=False, lora=lora), SEVEN_B))
    assert "\n  critic 13.0 GiB per rank x 1\n    its adapters: 0.00M parameters and the value head are" in said
    assert "checkpoints (estimate): 78.2 GiB each" in said, "as many as the actor's alone"
    variants: list[dict[str, Any]] = [{}, {"lora": lora}]
    whole, adapted = (plan_shifts(settings(shared=True, **more), SEVEN_B, gpu_memory_bytes()) for more in variants)
    assert whole.trained - adapted.trained == (7e9 * 16 - 7e9 * 2 - adapters * 16) / 2
    whole, adapted = (
        plan_shifts(settings(shared=True, backend="megatron", **more), SEVEN_B, gpu_memory_bytes()) for more in variants
    )
    assert whole.trained - adapted.trained == 48 * 16 * (4 + 12 / 2) - adapters * (4 + 4 + 8 / 2)
    assert whole.lighter == ", actor.lora, critic.lora"


@pytest.mark.usefixtures("gpus")
def test_a_critic_of_another_model_is_counted_by_that_one_s_files(make_settings: MakeSettings, tmp_path: Path) -> None:
    path = write_model(tmp_path / "critic")
    gae = {"groups_per_batch": 2, "advantage": {"kind": "gae"}}
    run = {"name": "test", "dir": str(tmp_path), "num_steps": 1, "checkpoint_url": "memory://checkpoints"}
    settings = make_settings(
        algorithm=gae,
        actor={"address": "elsewhere:1"},
        critic={"devices": [0], "path": str(path)},
        run=run,
        rollout={"devices": [[1]]},
    )
    lines(settings)
    said = "\n".join(memory_and_disk(settings, SEVEN_B))
    assert "\n  critic 0.1 MiB per rank x 1" in said


@pytest.mark.usefixtures("gpus")
def test_a_reference_of_another_model_is_counted_by_that_one_s_files(
    make_settings: MakeSettings, tmp_path: Path
) -> None:
    path = write_model(tmp_path / "small")
    run = {"name": "test", "dir": str(tmp_path), "num_steps": 1, "checkpoint_url": "memory://checkpoints"}

    def settings(reference: dict[str, Any]) -> RunSettings:
        kl = {"groups_per_batch": 2, "kl": {"reference": "ref", "kl_coef": 0.1}}
        return make_settings(
            run=run,
            algorithm=kl,
            actor={"devices": [0, 1], "num_ranks": 2},
            references={"ref": {"devices": [0], **reference}},
            rollout={"devices": [[0], [1]], "num_replicas": 2},
        )

    own = settings({"path": str(path)})
    assert "\n  reference ref 0.0 MiB per rank x 1" in "\n".join(memory_and_disk(own, SEVEN_B))
    the_policy_s = plan_shifts(settings({}), SEVEN_B, gpu_memory_bytes()).scored
    small = read_model(path).num_parameters
    assert the_policy_s - plan_shifts(own, SEVEN_B, gpu_memory_bytes()).scored == 2 * (7e9 - small)
    elsewhere = {"actor": {"address": "elsewhere:1"}, "rollout": {"devices": [[1]]}}
    need = {"algorithm": {"groups_per_batch": 2, "kl": {"reference": "ref", "kl_coef": 0.1}}, **elsewhere}
    huge = make_settings(references={"ref": {"devices": [0]}}, **need)
    with pytest.raises(ConfigError, match=r"reference ref needs at least 130\.4 GiB on GPU 0"):
        list(check_capacity(huge, replace(SEVEN_B, num_parameters=70_000_000_000)))
    lines(make_settings(references={"ref": {"devices": [0], "path": str(path)}}, **need))


QWEN3_32B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_hidden_layers": 64,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "max_position_embeddings": 40960,
}
FACTS_32B = ModelFacts(architecture="Qwen3ForCausalLM", num_parameters=32_762_000_000, largest_layer=487_600_000)


@pytest.fixture
def told_of_32b(make_settings: MakeSettings, tmp_path: Path, gpus: None) -> Callable[..., str]:
    """The lines on memory and disk of a run of 32k responses on eight GPUs of a trainer and as many of rollouts."""
    path = write_model(tmp_path / "model")
    (path / "config.json").write_text(json.dumps(QWEN3_32B))
    base: dict[str, Any] = {
        "run": {"name": "test", "dir": str(tmp_path), "num_steps": 1, "checkpoint_url": "memory://checkpoints"},
        "sampling": {"max_tokens": 32768},
        "actor": {"devices": list(range(8)), "num_ranks": 8},
        "rollout": {"devices": [[8, 9, 10, 11]], "tensor_parallel_size": 4},
    }

    def told(facts: ModelFacts = FACTS_32B, **sections: dict[str, Any]) -> str:
        merged = {name: base.get(name, {}) | section for name, section in (base | sections).items()}
        settings = make_settings(**merged)
        return "\n".join(
            [*memory_and_disk(settings, facts), *host_memory(settings, facts), *cache(settings, facts), ""]
        )

    return told


def test_state_that_shares_gpus_of_two_machines_is_divided_by_all_ranks_and_half_of_it_waits_on_each(
    told_of_32b: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    eight = list(range(8))
    kl = {"groups_per_batch": 2, "kl": {"reference": "ref", "kl_coef": 0.1}}
    one: dict[str, Any] = {
        "actor": {"devices": eight, "num_ranks": 8},
        "rollout": {"devices": [eight[:4], eight[4:]], "num_replicas": 2},
    }
    two: dict[str, Any] = {
        "actor": {"devices": eight, "num_ranks": 16, "address": "one:1"},
        "rollout": {"devices": [eight[:4], eight[4:]] * 2, "num_replicas": 0, "sleep_mode": True},
        "weights": {"host": "one"},
    }
    asleep = 32.762e9 * 12 / 2**30
    published = "of which the actor's parameters are {:.1f} GiB"
    assert published.format(32.762e9 * 4 / 8 / 2**30) in told_of_32b(**one)
    said = told_of_32b(**two)
    assert published.format(32.762e9 * 4 / 16 / 2**30) in said
    waits = f"beside {asleep / 2:.1f} GiB of state that waits for its shift, on each of the trainers' machines"
    assert waits in said
    ref = {"address": "one:2", "devices": eight, "num_ranks": 16}
    apart = told_of_32b(**two, algorithm=kl, references={"ref": ref})
    assert waits in apart, "it has other machines"
    assert "scoring" not in apart
    beside = told_of_32b(**two, algorithm=kl, references={"ref": {**ref, "offload": True}})
    assert f"beside {asleep / 2 + 32.762e9 / 2**30:.1f} GiB of state" in beside
    assert "scoring" in beside
    monkeypatch.setattr("rolecall.commands.check.footprint.host_memory_bytes", lambda: 256 * 2**30)
    assert "GiB into the memory of each of their machines; this one has 256.0 GiB" in told_of_32b(**two)


def test_state_is_sixteen_bytes_a_parameter_and_whole_ones_are_told_apart(told_of_32b: Callable[..., str]) -> None:
    """Loaded 4 bytes, 12 once there are moments, and 4 of gradients: what an engine of one rank was seen to hold."""
    said = told_of_32b()
    assert f"actor {32.762e9 * 16 / 8 / 2**30:.1f} GiB of state per rank x 8" in said
    assert f"actor's gathered parameters, up to {32.762e9 * 2 / 2**30:.1f} GiB per rank" in said


def test_a_pass_that_outgrows_a_gpu_is_noted_before_anything_is_booked(
    told_of_32b: Callable[..., str], tmp_path: Path
) -> None:
    said = told_of_32b()
    assert "a pass of 33792 tokens (estimate): 34.5 GiB of activations a rank, with gradient_checkpointing, and" in said
    assert "NOTE actor: at the height of a pass a rank takes about 100.1 GiB, and a GPU has 80.0 GiB; raise" in said
    remedy = (
        "raise num_ranks or parallel.sequence (4 would do), set actor.activation_offload or actor.optimizer.offload"
    )
    assert remedy in said
    kept = told_of_32b(actor={"gradient_checkpointing": False})
    assert "765.6 GiB of activations a rank, without gradient_checkpointing" in kept
    adapters = told_of_32b(actor={"lora": {"rank": 4, "target_modules": ["embed_tokens"]}})
    assert "with gradient_checkpointing, and 4.5 GiB of layers" in said
    assert "with gradient_checkpointing, and 1.8 GiB of layers" in adapters, "of which none has a gradient"
    shared = told_of_32b(actor={"parallel": {"sequence": 8}})
    assert "4.3 GiB of activations a rank" in shared
    assert "NOTE actor" not in shared
    waiting = {"activation_offload": True, "gradient_checkpointing": True, "optimizer": {"offload": True}}
    offloaded = told_of_32b(actor=waiting)
    assert "13.9 GiB of activations a rank" in offloaded
    assert "NOTE actor" not in offloaded
    elsewhere = told_of_32b(actor={"address": "elsewhere:1"})
    assert "34.5 GiB of activations a rank" in elsewhere
    assert "and a GPU, if its machine has those of this one, has 80.0 GiB" in elsewhere
    one = {"devices": [0], "num_ranks": 1}
    assert "layers and embeddings while they are whole" in told_of_32b(actor=one), "one rank casts them"
    alone = told_of_32b(actor=one, model={"path": str(tmp_path / "model"), "dtype": "float32"})
    assert "layers and embeddings while they are whole" not in alone, "and gathers nothing"


def test_over_megatron_ranks_that_share_matrices_share_tokens_too(told_of_32b: Callable[..., str]) -> None:
    actor = {"backend": "megatron", "parallel": {"tensor": 4}, "gradient_checkpointing": True}
    assert "8.6 GiB of activations a rank, with gradient_checkpointing\n" in told_of_32b(actor=actor)


def test_how_many_responses_a_cache_holds_is_told_and_none_is_refused(told_of_32b: Callable[..., str]) -> None:
    said = told_of_32b()
    assert (
        "keys and values (estimate): 64 KiB a token on each worker; 52.7 GiB hold 864,158 tokens, 25 responses" in said
    )
    assert "of up to 256 at a time (rollout.max_num_seqs): where more grow long, vLLM puts some off" in said
    few = told_of_32b(rollout={"max_num_seqs": 16})
    assert "25 responses at their longest\n" in few
    given = told_of_32b(rollout={"kv_cache_bytes": 2**32})
    assert "4.0 GiB hold 65,536 tokens, 1 responses" in given
    on_cpus = told_of_32b(rollout={"devices": [], "kv_cache_bytes": 2**32})
    assert "4.0 GiB hold 65,536 tokens, 1 responses at their longest, of up to 256 at a time" in on_cpus
    unknown = told_of_32b(rollout={"num_replicas": 0})
    assert "64 KiB a token on each worker\n" in unknown
    one = {"devices": [[8]], "tensor_parallel_size": 1}
    scarce = told_of_32b(rollout=one)
    assert "NOTE rollout: its cache has about 7.0 GiB, and vLLM starts only where it holds a prompt and" in scarce
    assert "of 33,792 tokens, 8.2 GiB; raise rollout.tensor_parallel_size" in scarce
    with pytest.raises(
        ConfigError, match=r"at most 0\.0 MiB for keys and values beside the weights, and those of a prompt and"
    ):
        told_of_32b(rollout=one, facts=replace(FACTS_32B, num_parameters=40_000_000_000))
    assert "keys and values" not in told_of_32b(rollout={"engine": {"kv_cache_dtype": "fp8"}})


def test_remedies_of_a_pass_are_those_that_the_model_takes(told_of_32b: Callable[..., str], tmp_path: Path) -> None:
    """Recurrent layers share no sequence."""
    linear = {"num_key_heads": 16, "num_value_heads": 48, "key_head_dim": 128, "value_head_dim": 128}
    recurrent = QWEN3_32B | {
        "model_type": "qwen3_5_text",
        "full_attention_interval": 4,
        **{f"linear_{name}": number for name, number in linear.items()},
    }
    (tmp_path / "model" / "config.json").write_text(json.dumps(recurrent))
    said = told_of_32b()
    assert "raise num_ranks, set actor.activation_offload or actor.optimizer.offload, or shorten" in said
    assert "keys and values (estimate): 16 KiB a token on each worker and" in said, "of sixteen layers in four"
    assert "of layers that keep a window or a state" in said


def test_a_gpu_that_a_role_does_not_have_says_nothing_of_it(told_of_32b: Callable[..., str], tmp_path: Path) -> None:
    alike = told_of_32b()
    (tmp_path / "nvidia-smi").write_text(
        "#!/bin/sh\nfor i in 0 1 2 3 4 5 6 7 8 9 10 11; do echo $i, 81920; done\necho 12, 4096\n"
    )
    assert told_of_32b() == alike


def test_a_publish_that_vllm_leaves_no_room_for_is_noted_with_the_share_that_does(
    told_of_32b: Callable[..., str],
) -> None:
    """A layer of 256 experts of 2,048 numbers, of which a worker has a quarter in place."""
    assert "NOTE rollout.gpu_memory_utilization" not in told_of_32b()
    wide = replace(FACTS_32B, largest_layer=11_500_000_000)
    said = told_of_32b(facts=wide)
    assert (
        "NOTE rollout.gpu_memory_utilization 0.9 leaves 8.0 GiB of a GPU, and a publish takes 26.8 GiB: set it to"
        in said
    )
    assert "to 0.66 or less" in said
    assert "NOTE rollout.gpu" not in told_of_32b(facts=wide, rollout={"gpu_memory_utilization": 0.66})
    assert "NOTE rollout.gpu" not in told_of_32b(facts=wide, rollout={"kv_cache_bytes": 2**32})


def test_checkpoints_that_outgrow_disk_or_memory_are_noted(
    told_of_32b: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=10**12))
    said = told_of_32b(run={"checkpoint_url": None})
    assert "host memory (estimate): 366.1 GiB while a checkpoint is copied and written" in said
    assert "NOTE the trainers put" not in said
    assert "NOTE run.keep_checkpoints 2: with one being written they take about 1,098.4 GiB" in said
    assert "so that checkpoint 3 fails" in said
    assert "NOTE run.keep" not in told_of_32b(run={"checkpoint_url": None, "keep_checkpoints": 1})
    assert "host memory" not in told_of_32b(actor={"address": "elsewhere:1"})
    shared = {"devices": [list(range(4)), list(range(4, 8))], "num_replicas": 2}
    said = told_of_32b(rollout=shared)
    assert "beside 366.1 GiB of state that waits for its shift" in said
    assert "NOTE the trainers put up to 732.3 GiB into this machine's memory, and the store up to" in said
    offloaded = {"devices": list(range(8)), "num_ranks": 8, "optimizer": {"offload": True}}
    assert "beside 244.1 GiB of moments (optimizer.offload)" in told_of_32b(actor=offloaded)
    monkeypatch.setattr("rolecall.commands.check.footprint.host_memory_bytes", lambda: 256 * 2**30)
    told_of_32b(actor=offloaded)
    with pytest.raises(ConfigError, match=r"the trainers keep at least 366\.1 GiB in this machine's memory, which has"):
        told_of_32b(rollout=shared)


def test_shared_gpus_of_other_machines_are_not_held_against_those_of_this_one(
    make_settings: MakeSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, eight = write_model(tmp_path / "model"), list(range(8))
    (path / "config.json").write_text(json.dumps(QWEN3_32B))
    monkeypatch.setattr("rolecall.commands.check.capacity.gpu_memory_bytes", lambda: {0: 24 * 2**30})
    rollout = {"devices": [eight[:4], eight[4:]] * 2, "tensor_parallel_size": 4, "sleep_mode": True}

    def check(num_replicas: int) -> None:
        settings = make_settings(
            run={"name": "test", "dir": str(tmp_path), "num_steps": 1, "checkpoint_url": "memory://checkpoints"},
            actor={"devices": eight, "num_ranks": 16, "address": "one:1"},
            rollout={**rollout, "num_replicas": num_replicas},
            weights={"host": "one"},
            store={"url": "redis://x:1"},
        )
        list(check_capacity(settings, FACTS_32B))

    check(0)
    with pytest.raises(ConfigError, match="more than it has"):
        check(2)
