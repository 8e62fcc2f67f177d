"""A real rollout process with vLLM that serves the actor's adapters: only they travel, and its logprobs are the actor's
own, version after version.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import torch

from rolecall.settings import LoraSection, OptimizerSection
from rolecall.training.engine import TokenOutputs
from rolecall.training.fsdp.engine import FsdpEngine
from rolecall.training.options import EngineOptions
from rolecall.training.packing.pack import Row, pack, unpack
from rolecall.trajectory import SAMPLED_COLUMNS
from rolecall.v1 import rollout_pb2, trajectory_pb2, weights_pb2
from rolecall.wire import Array, decode_tensor
from tests.integration.fsdp_ranks import make_rows, train_step, weights_of
from tests.integration.rollout_process import PROBE, RolloutProcess, check_sampled_from, group, rollout_process
from tests.tiny_models import write_qwen3, write_qwen3_moe
from tests.tiny_tokenizer import write_tokenizer

pytestmark = [
    pytest.mark.thorough("test_what_is_published_is_an_adapter_that_makes_the_base_the_actors_model"),
    pytest.mark.timeout(300),
]

CPU = torch.device("cpu")
LORA = LoraSection(rank=4, alpha=12.0)
PROMPT = [1, 60, 61, 62, 63, 2, 1, 70]
TOLERANCE = 1e-4
"""What the probe allows in float32."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("lora") / "model", hidden=128)


@pytest.fixture(scope="module", params=[1, 2])
def num_stages(request: pytest.FixtureRequest) -> int:
    """Stages of the rollout's engine. Each holds the adapters of its own layers."""
    return int(request.param)


@pytest.fixture(scope="module")
def actor(one_rank: None, model: Path, num_stages: int) -> FsdpEngine:
    """The engine of an actor with new adapters, in this process."""
    optimizer = OptimizerSection(learning_rate=1e-2)
    return FsdpEngine(
        EngineOptions(path=model, head="policy", dtype="float32", optimizer=optimizer, lora=LORA), device=CPU
    )


@pytest.fixture(scope="module")
def rollout(
    actor: FsdpEngine, model: Path, num_stages: int, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RolloutProcess]:
    """One process for the whole file; its tests run in order."""
    sections: dict[str, Any] = {"actor": {"lora": LORA.model_dump()}, "rollout": {"pipeline_parallel_size": num_stages}}
    with rollout_process(tmp_path_factory.mktemp("rollout"), model, **sections) as running:
        running.adapter = weights_pb2.LoraAdapter(rank=LORA.rank, alpha=LORA.alpha)
        running.weights = list(weights_of(actor).items())
        running.open_epoch()
        yield running


def logprobs(actor: FsdpEngine, token_ids: list[int], temperature: float = 1.0) -> Array:
    """float32 [T] of the actor under its present adapters; index 0 is 0."""
    row: Row = {"token_ids": np.array(token_ids, np.int32), "response_mask": np.ones(len(token_ids), np.uint8)}
    (outputs,) = actor.forward([pack([row], (), temperature=temperature, device=CPU)])
    assert isinstance(outputs, TokenOutputs)
    return unpack(outputs.logprobs_N, (len(token_ids),))[0]


def train(actor: FsdpEngine, rollout: RolloutProcess) -> None:
    """Three steps, whose adapters are what the next publish sends."""
    for seed in range(3):
        train_step(actor, make_rows(8, seed), token_budget=256, seed=seed)
    rollout.weights = list(weights_of(actor).items())


def generated(rollout: RolloutProcess, actor: FsdpEngine) -> float:
    """Largest gap between the sampler's own logprobs of eight responses and the actor's."""
    request = rollout_pb2.GenerateRequest(
        id=f"eval/{rollout.version}/heldout/1",
        prompt=trajectory_pb2.Prompt(uid="1", token_ids=np.array(PROMPT, dtype="<i4").tobytes()),
        num_responses=8,
        sampling=trajectory_pb2.SamplingParams(temperature=0.8, top_p=1.0, max_tokens=24),
        seed=3,
    )
    gaps = []
    for response in rollout.stub.Generate(request, timeout=60):
        ids = np.frombuffer(response.response_token_ids, "<i4").tolist()
        given = np.frombuffer(response.response_logprobs, "<f4")
        gaps.append(np.abs(given - logprobs(actor, PROMPT + ids, 0.8)[len(PROMPT) :]).max())
    assert len(gaps) == 8
    return float(max(gaps))


def test_only_the_adapter_travels_and_a_new_one_leaves_the_base_as_it_is(
    rollout: RolloutProcess, actor: FsdpEngine
) -> None:
    rollout.ledger.begin_publish(1, 1)
    sent, received = rollout.transfer()
    assert received.digest == sent.digest
    assert [item.name for item in received.fingerprints] == [name for name, _ in actor.named_weights()]
    assert all("lora_" in item.name for item in received.fingerprints)
    assert sent.num_bytes < 0.2 * sum(parameter.nbytes for parameter in rollout.model.parameters())
    assert np.abs(decode_tensor(received.probe.logprobs, "probe") - rollout.logprobs(PROBE)).max() < TOLERANCE
    rollout.attest()
    assert generated(rollout, actor) < TOLERANCE


def test_trained_adapters_change_the_rollouts_logprobs_into_the_actors_own(
    rollout: RolloutProcess, actor: FsdpEngine
) -> None:
    for _ in range(2):
        before = logprobs(actor, PROBE)
        train(actor, rollout)
        _, received = rollout.publish()
        probe = decode_tensor(received.probe.logprobs, "probe")
        assert np.abs(probe - before).max() > 0.05
        assert np.abs(probe - logprobs(actor, PROBE)).max() < TOLERANCE
        assert generated(rollout, actor) < TOLERANCE


def test_groups_kept_over_a_publish_go_on_with_the_new_adapter(rollout: RolloutProcess, actor: FsdpEngine) -> None:
    first = rollout.ledger.position().next_gid
    for gid in range(first, first + 8):
        rollout.ledger.admit(group(gid, [*PROMPT, gid], 4, max_tokens=400, temperature=1.5), b"")
    rollout.wait_for_groups()
    train(actor, rollout)
    rollout.publish()
    found: dict[int, trajectory_pb2.CommittedGroup] = {}
    deadline = time.monotonic() + 90
    while len(found) < 8 and time.monotonic() < deadline:
        found = {one.gid: one for _, one in rollout.ledger.read_committed("0", 100, 0.5) if one.gid >= first}
    assert sorted(found) == list(range(first, first + 8))
    num_mixed = 0
    for one in found.values():
        for row in rollout.rows.read(list(one.rows), SAMPLED_COLUMNS):
            new = row["policy_versions"] == rollout.version
            num_mixed += bool(new.any() and (row["policy_versions"] == rollout.version - 1).any())
            if new.any():
                check_sampled_from(row["rollout_logprobs"][new], logprobs(actor, row["token_ids"].tolist(), 1.5)[new])
    assert num_mixed > 0


def test_an_adapter_that_does_not_fit_and_whole_weights_tear_and_the_next_publish_heals(
    rollout: RolloutProcess, actor: FsdpEngine
) -> None:
    good, adapter = rollout.weights, rollout.adapter
    odd = [(name.replace("q_proj", "odd_proj"), tensor) for name, tensor in good]
    half = [(name, tensor) for name, tensor in good if not name.endswith("layers.0.self_attn.o_proj.lora_B.weight")]
    wide = [
        (name, torch.cat([tensor, tensor], dim=1) if name.endswith("layers.1.mlp.down_proj.lora_A.weight") else tensor)
        for name, tensor in good
    ]
    whole = [(name, parameter.data) for name, parameter in rollout.model.named_parameters()]
    for weights, spec, words in (
        (odd, adapter, "odd_proj"),
        (half, adapter, "not a pair"),
        (wide, adapter, "could not load"),
        (whole, None, "actor.lora"),
    ):
        rollout.weights, rollout.adapter = weights, spec
        rollout.open_epoch()
        with pytest.raises(grpc.RpcError, match=words):
            rollout.transfer()
        assert (
            rollout.stub.GetInfo(rollout_pb2.GetRolloutInfoRequest(), timeout=30).weights_state
            == rollout_pb2.WEIGHTS_STATE_TORN
        )
    rollout.weights, rollout.adapter = good, adapter
    rollout.open_epoch()
    rollout.publish()
    assert generated(rollout, actor) < TOLERANCE


def test_merged_adapters_serve_a_mixture_which_vllm_computes_with_adapters_on_gpus_alone(
    one_rank: None, tmp_path: Path
) -> None:
    mixture = write_qwen3_moe(tmp_path / "mixture", vocab=288, head_dim=32, expert_hidden=64)
    write_tokenizer(mixture)
    lora = LORA.model_copy(update={"target_modules": ("q_proj", "k_proj", "v_proj", "o_proj"), "experts": True})
    optimizer = OptimizerSection(learning_rate=1e-2)
    options = EngineOptions(
        path=mixture, head="policy", dtype="float32", optimizer=optimizer, lora=lora, merges_adapters=True
    )
    merging = FsdpEngine(options, device=CPU)
    sections: dict[str, Any] = {"actor": {"lora": lora.model_dump(mode="json")}, "weights": {"merge_adapters": True}}
    with rollout_process(tmp_path, mixture, **sections) as rollout:
        rollout.open_epoch()
        before = logprobs(merging, PROBE)
        for _ in range(2):
            train(merging, rollout)
            _, received = rollout.publish()
            probe = decode_tensor(received.probe.logprobs, "probe")
            assert np.abs(probe - before).max() > 0.05
            assert np.abs(probe - logprobs(merging, PROBE)).max() < TOLERANCE
            assert generated(rollout, merging) < TOLERANCE


def test_a_replica_that_is_asked_to_end_leaves(rollout: RolloutProcess) -> None:
    rollout.process.terminate()
    assert rollout.process.wait(60) == 0
    assert rollout.controller.was_left
