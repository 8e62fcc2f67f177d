"""Publishes into a real vLLM engine on a CPU, judged by Hugging Face: good ones are exact, and every planted fault is
caught by the check that is there for it.

The engine runs in a process of its own per kind of model and plays all scenarios of weights_engine_process.py; each
test reads one outcome.
"""

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from tests.twins.launched import wait_until_gone

MAX_GAP = 2e-5
"""Largest float32 logprob difference between two correct implementations, with room; planted faults make 1 and more."""
PROBE_BOUND = 1e-4
"""What the probe allows in float32."""
Outcomes = dict[str, Any]

pytestmark = pytest.mark.timeout(300)  # importing vLLM and starting the engine on a busy machine


def _play(kind: str, directory: Path) -> Outcomes:
    command = [sys.executable, "-m", "tests.integration.weights_engine_process", kind, str(directory)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert process.returncode == 0, process.stderr[-4000:]
    return said(process.stdout.splitlines())


def said(lines: Iterable[str]) -> Outcomes:
    """What the process made known, among what else it printed."""
    (line,) = itertools.islice((line for line in lines if line.startswith("OUTCOMES ")), 1)
    outcomes: Outcomes = json.loads(line.removeprefix("OUTCOMES "))
    return outcomes


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Outcomes of a dense model."""
    return _play("dense", tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def tied(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Outcomes of a model whose head is its embedding, and whose logits have a factor."""
    return _play("tied", tmp_path_factory.mktemp("tied"))


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Outcomes of a mixture of experts in buckets smaller than a layer."""
    return _play("moe", tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def sinks(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """Outcomes of a gpt-oss."""
    return _play("sinks", tmp_path_factory.mktemp("sinks"))


def is_exact(outcome: dict[str, Any]) -> bool:
    """Every fingerprint, every greedy token and every logprob as it should be."""
    return bool(
        outcome["agreed"]
        and not outcome["different"]
        and outcome["greedy"]
        and outcome["gap"] < MAX_GAP
        and outcome["state"] == "loaded"
    )


def test_a_dense_engine_started_on_dummy_weights_is_exact_after_the_first_and_the_second_publish(
    dense: Outcomes,
) -> None:
    assert is_exact(dense["first"]), dense["first"]
    assert is_exact(dense["second"]), dense["second"]


@pytest.mark.thorough("test_a_dense_engine_started_on_dummy_weights_is_exact_after_the_first_and_the_second_publish")
def test_a_tied_engine_is_exact_after_every_publish(tied: Outcomes) -> None:
    assert is_exact(tied["first"]), tied["first"]
    assert is_exact(tied["second"]), tied["second"]
    assert is_exact(tied["third"]), tied["third"]


@pytest.mark.thorough("test_a_dense_engine_started_on_dummy_weights_is_exact_after_the_first_and_the_second_publish")
def test_a_mixture_of_experts_in_buckets_smaller_than_a_layer_is_exact_after_every_publish(moe: Outcomes) -> None:
    assert is_exact(moe["first"]), moe["first"]
    assert is_exact(moe["second"]), moe["second"]


@pytest.mark.thorough("test_a_dense_engine_started_on_dummy_weights_is_exact_after_the_first_and_the_second_publish")
def test_biases_that_experts_are_chosen_with_are_exact_after_every_publish(tmp_path: Path) -> None:
    outcomes = _play("balanced", tmp_path)
    assert is_exact(outcomes["first"]), outcomes["first"]
    assert is_exact(outcomes["second"]), outcomes["second"]


@pytest.mark.thorough("test_a_dense_engine_started_on_dummy_weights_is_exact_after_the_first_and_the_second_publish")
def test_fused_experts_with_biases_and_sinks_are_exact_after_every_publish(sinks: Outcomes) -> None:
    for name in ("first", "second", "whole", "delta", "healed"):
        assert is_exact(sinks[name]), (name, sinks[name])
    assert sinks["delta"]["wire_share"] < 0.03


@pytest.mark.thorough("test_a_dense_engine_started_on_dummy_weights_is_exact_after_the_first_and_the_second_publish")
@pytest.mark.parametrize("kind", ["short_rope", "long_rope", "stablelm", "nemotron"])
def test_long_rope_within_and_beyond_its_first_length_and_layer_norms_are_exact_after_every_publish(
    kind: str, tmp_path: Path
) -> None:
    outcomes = _play(kind, tmp_path)
    assert is_exact(outcomes["first"]), outcomes["first"]
    assert is_exact(outcomes["delta"]), outcomes["delta"]


@pytest.mark.parametrize("kind", ["gemma2", "gemma4", "gemma4 mixture"])
def test_soft_caps_and_what_layers_of_gemma_4_share_are_exact_after_every_publish(kind: str, tmp_path: Path) -> None:
    outcomes = _play(kind, tmp_path)
    for name in ("first", "second", "whole", "delta"):
        assert is_exact(outcomes[name]), (name, outcomes[name])
    assert outcomes["delta"]["wire_share"] < 0.03


@pytest.mark.thorough("test_parameters_that_the_actor_does_not_export_are_caught_by_coverage_and_named")
def test_missing_sinks_and_biases_of_experts_are_caught_by_coverage_and_named(sinks: Outcomes) -> None:
    assert sinks["not exported"]["error"][0] == "TornWeightsError"
    assert "model.layers.0.attn.sinks got 0 of 4 elements" in sinks["not exported"]["error"][1]
    assert "w13_bias got 0 of 512 elements" in sinks["not exported"]["error"][1]


def test_loaders_that_are_partial_functions_as_minimax_m2_s_are_taken_by_the_reload() -> None:
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload, record_metadata_for_reloading
    from vllm.model_executor.model_loader.weight_utils import default_weight_loader

    from rolecall.weights.reload import name_loaders

    layer = torch.nn.Linear(2, 2, bias=False)
    vars(layer.weight)["weight_loader"] = partial(default_weight_loader)
    record_metadata_for_reloading(layer)
    name_loaders(layer)
    initialize_layerwise_reload(layer)
    assert vars(layer.weight)["weight_loader"].__name__ == "online_process_loader"


def test_an_engine_is_exact_after_what_changed_and_after_a_change_of_everything(dense: Outcomes) -> None:
    for name, least, most in (("whole", 1.0, 1.001), ("delta", 0.02, 0.03), ("all changed", 1.0, 1.001)):
        assert is_exact(dense[name]), dense[name]
        assert least < dense[name]["wire_share"] < most


def test_swapped_queries_and_keys_show_in_exactly_their_fingerprints_and_in_the_probe(dense: Outcomes) -> None:
    outcome = dense["swapped on the way"]
    assert outcome["different"] == ["model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.q_proj.weight"]
    # catches them also when the actor's own export swapped them, and both sides agree on the fingerprints
    assert outcome["gap"] > PROBE_BOUND
    assert outcome["agreed"]


@pytest.mark.thorough("test_swapped_queries_and_keys_show_in_exactly_their_fingerprints_and_in_the_probe")
def test_a_stale_tied_head_is_caught_by_the_probe_alone(tied: Outcomes) -> None:
    outcome = tied["stale head"]
    assert outcome["agreed"]
    assert outcome["state"] == "loaded"
    assert outcome["gap"] > PROBE_BOUND


@pytest.mark.thorough("test_parameters_that_the_actor_does_not_export_are_caught_by_coverage_and_named")
def test_a_missing_expert_is_caught_by_coverage_and_counted(moe: Outcomes) -> None:
    outcome = moe["missing expert"]
    assert outcome["error"][0] == "TornWeightsError"
    assert "model.layers.1.mlp.experts" in outcome["error"][1]
    assert "w13_weight got 28672 of 32768 elements" in outcome["error"][1]
    assert outcome["state"] == "torn"


def test_parameters_that_the_actor_does_not_export_are_caught_by_coverage_and_named(dense: Outcomes) -> None:
    outcome = dense["not exported"]
    assert outcome["error"][0] == "TornWeightsError"
    assert "model.layers.0.self_attn.qkv_proj.weight got 32768 of 49152 elements" in outcome["error"][1]
    assert "model.norm.weight got 0 of 128 elements" in outcome["error"][1]
    assert outcome["state"] == "torn"


def test_a_tensor_that_the_engine_cannot_take_tears_the_weights_and_leaves_the_engine_alive(dense: Outcomes) -> None:
    outcome = dense["wrong shape"]
    assert outcome["error"][0] == "TornWeightsError"
    assert "could not load" in outcome["error"][1]
    assert outcome["state"] == "torn"


@pytest.mark.thorough("test_a_torn_receiver_gets_the_weights_again_under_a_new_version")
def test_torn_weights_are_healed_by_the_next_full_load(dense: Outcomes, moe: Outcomes) -> None:
    assert is_exact(dense["healed"]), dense["healed"]
    assert is_exact(dense["healed again"]), dense["healed again"]
    assert is_exact(moe["healed"]), moe["healed"]


def test_a_version_that_goes_back_is_refused_before_anything_is_touched(dense: Outcomes) -> None:
    outcome = dense["stale version"]
    assert outcome["error"][0] == "StaleVersionError"
    assert outcome["state"] == "loaded"


def test_an_actor_that_is_late_to_say_what_it_sends_leaves_the_weights_whole(dense: Outcomes) -> None:
    outcome = dense["late actor"]
    assert outcome["error"][0] == "ChannelBrokenError"
    assert "'manifest', which the actor did not offer" in outcome["error"][1]
    assert outcome["state"] == "loaded"


@pytest.mark.thorough("test_a_dense_engine_started_on_dummy_weights_is_exact_after_the_first_and_the_second_publish")
@pytest.mark.parametrize(
    ("scenario", "num_workers"),
    [("worker", 1), ("workers", 2), ("stages", 2), ("sink_workers", 2), ("sink_stages", 2)],
)
def test_parallel_workers_receive_exact_weights_and_end_when_the_service_is_killed(
    tmp_path: Path, scenario: str, num_workers: int
) -> None:
    """A real AsyncLLM, whose engine runs in processes of its own: each worker is a rank."""
    if num_workers > len(os.sched_getaffinity(0)):
        pytest.skip("each worker needs a core of its own")
    module = "tests.integration.weights_engine_process"
    command = [sys.executable, "-m", module, scenario, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as service:
        assert service.stdout is not None
        try:
            outcomes = said(service.stdout)
            children = [psutil.Process(pid) for pid in outcomes["children"]]
            mapped = {Path(each.path) for child in children for each in child.memory_maps()}
            queues = {path.name: path.stat().st_ino for path in mapped if path.name.startswith("psm_")}
        finally:
            service.kill()
    assert (queues, len(queues) > 0) == (dict(outcomes["shared"]), num_workers > 1)
    shared = [path for path in mapped if "cpushm" in path.name]
    num_shared = num_workers if num_workers > 1 and shares_memory() else 0
    assert (len(shared), [path for path in shared if path.exists()]) == (num_shared, [])
    assert outcomes["num_ranks"] == num_workers
    for version, name in enumerate(("first", "second", "whole", "delta"), start=1):
        assert is_exact(outcomes[name]), outcomes[name]
        assert outcomes[name]["versions"] == [[str(version), 0, 12]]
    assert outcomes["delta"]["wire_share"] < 0.1 * outcomes["whole"]["wire_share"]
    healed = outcomes["after one that was abandoned"]
    assert is_exact(healed), healed
    assert wait_until_gone(children, 100.0) == []
    if scenario == "stages":
        stages_prove_together_that_all_was_loaded(outcomes)


def shares_memory() -> bool:
    """Whether vLLM's build for this processor has its workers talk through memory: the one for AVX-512 has."""
    return "avx512f" in Path("/proc/cpuinfo").read_text()


def stages_prove_together_that_all_was_loaded(outcomes: Outcomes) -> None:
    """Each stage answers for its own parameters and leaves the other's; a tensor that is none's is named."""
    first, last = outcomes["first"]["unread"]
    assert {".".join(name.split(".")[1:3]) for name in first} == {"layers.1", "norm.weight"}
    assert {".".join(name.split(".")[1:3]) for name in last} == {"layers.0"}
    assert len(first) == len(last) + len(["model.norm.weight"])
    for name, torn in (
        ("dropped own", "model.layers.1.mlp.down_proj.weight got 0 of 32768 elements"),
        ("dropped both", "model.embed_tokens.weight got "),
        ("nowhere", "no worker of the engine has a place for model.layers.0.self_attn.rotary_emb.inv_freq"),
    ):
        assert outcomes[name]["error"][0] == "TornWeightsError"
        assert torn in outcomes[name]["error"][1]
    assert is_exact(outcomes["dropped other"]), "it was never this stage's"
    assert is_exact(outcomes["healed"]), outcomes["healed"]
