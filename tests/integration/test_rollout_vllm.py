"""A real rollout process with vLLM: weights over the channel, pulled groups and Generate, compared with Hugging Face
token by token.
"""

import gzip
import json
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import psutil
import pytest

from rolecall.errors import WeightsMismatchError
from rolecall.rpc.role_process import RESTART
from rolecall.trajectory import SAMPLED_COLUMNS, rows_of
from rolecall.v1 import rollout_pb2, training_pb2, trajectory_pb2
from rolecall.wire import decode_tensor
from tests.integration.rollout_process import PROBE, RolloutProcess, check_sampled_from, group, rollout_process
from tests.servers import until
from tests.tiny_models import write_qwen3
from tests.tiny_tokenizer import EOS_TOKEN_ID

pytestmark = pytest.mark.timeout(300)

PROMPT = [1, 60, 61, 62, 63, 2, 1, 70]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where torch keeps what it compiles for the replica: empty, as on a machine that never ran vLLM."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture(scope="module")
def rollout(tmp_path_factory: pytest.TempPathFactory, kernels: Path) -> Iterator[RolloutProcess]:
    """One process for the whole file; its tests run in order."""
    directory = tmp_path_factory.mktemp("rollout")
    environment = {"TORCHINDUCTOR_CACHE_DIR": str(kernels)}
    with rollout_process(directory, write_qwen3(directory / "model", hidden=128), environment) as running:
        yield running


def generate(
    rollout: RolloutProcess,
    *,
    num_responses: int = 4,
    temperature: float = 0.8,
    max_tokens: int = 24,
    prompt: list[int] | None = None,
    **cut: Any,
) -> list[rollout_pb2.GenerateResponse]:
    request = rollout_pb2.GenerateRequest(
        id="eval/0/heldout/1",
        prompt=trajectory_pb2.Prompt(uid="1", token_ids=np.array(prompt or PROMPT, dtype="<i4").tobytes()),
        num_responses=num_responses,
        sampling=trajectory_pb2.SamplingParams(temperature=temperature, max_tokens=max_tokens, **{"top_p": 1.0} | cut),
        seed=3,
    )
    return list(rollout.stub.Generate(request, timeout=60))


def test_nothing_is_served_before_the_first_weights(rollout: RolloutProcess) -> None:
    info = rollout.stub.GetInfo(rollout_pb2.GetRolloutInfoRequest(), timeout=30)
    assert (info.weights_state, info.num_weight_ranks, info.policy_version) == (rollout_pb2.WEIGHTS_STATE_EMPTY, 1, -1)
    with pytest.raises(grpc.RpcError) as refused:
        generate(rollout)
    assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


def test_the_first_weights_arrive_over_the_channel_and_the_probe_agrees_with_hugging_face(
    rollout: RolloutProcess, kernels: Path
) -> None:
    rollout.open_epoch()
    rollout.ledger.begin_publish(1, 1)
    sent, received = rollout.transfer()
    assert not list(kernels.rglob("*.so")), "an eager engine on CPUs compiled something; a machine may have no compiler"
    assert received.digest == sent.digest
    assert {item.name: item.value for item in received.fingerprints} == sent.fingerprints
    decoded, prefilled = (
        decode_tensor(given, "probe") for given in (received.probe.decoded_logprobs, received.probe.prefilled_logprobs)
    )
    assert decoded.shape == (4,)
    assert np.abs(decoded - prefilled).max() < 1e-4
    probe = decode_tensor(received.probe.logprobs, "probe")
    assert np.abs(probe - rollout.logprobs(PROBE)).max() < 1e-4
    info = rollout.stub.GetInfo(rollout_pb2.GetRolloutInfoRequest(), timeout=30)
    assert info.weights_state == rollout_pb2.WEIGHTS_STATE_LOADED
    with pytest.raises(grpc.RpcError):
        generate(rollout)
    rollout.attest()
    assert (
        rollout.stub.GetInfo(rollout_pb2.GetRolloutInfoRequest(), timeout=30).weights_state
        == rollout_pb2.WEIGHTS_STATE_ATTESTED
    )


def test_generate_returns_stopped_or_full_responses_with_the_samplers_own_logprobs(rollout: RolloutProcess) -> None:
    responses = generate(rollout, num_responses=8)
    assert sorted(response.meta.index for response in responses) == list(range(8))
    for response in responses:
        ids = np.frombuffer(response.response_token_ids, "<i4").tolist()
        given = np.frombuffer(response.response_logprobs, "<f4")
        expected = rollout.logprobs(PROMPT + ids, temperature=0.8)[len(PROMPT) :]
        assert np.abs(given - expected).max() < 1e-4
        stopped = response.meta.finish_reason == trajectory_pb2.FINISH_REASON_STOP
        assert stopped == (ids[-1] == EOS_TOKEN_ID)
        assert EOS_TOKEN_ID not in ids[:-1]
        assert stopped or len(ids) == 24
        assert [span.policy_version for span in response.meta.spans] == [1]
    again = {response.meta.index: response.response_token_ids for response in generate(rollout, num_responses=8)}
    assert again == {response.meta.index: response.response_token_ids for response in responses}


def test_greedy_responses_have_no_logprobs_and_follow_the_model(rollout: RolloutProcess) -> None:
    (response,) = generate(rollout, num_responses=1, temperature=0.0)
    assert response.response_logprobs == b""
    ids = np.frombuffer(response.response_token_ids, "<i4").tolist()
    assert rollout.logprobs(PROMPT + ids)[len(PROMPT) :].max() < 0


@pytest.mark.parametrize("cut", [{"top_k": 1}, {"min_p": 1.0}, {"top_p": 1e-6}], ids=lambda cut: next(iter(cut)))
def test_a_cut_to_the_likeliest_token_samples_what_greedy_does(rollout: RolloutProcess, cut: dict[str, Any]) -> None:
    (greedy,) = generate(rollout, num_responses=1, temperature=0.0)
    sampled = generate(rollout, temperature=0.8, **cut)
    assert {response.response_token_ids for response in sampled} == {greedy.response_token_ids}


def test_pulled_groups_are_committed_with_rows_that_hugging_face_confirms(rollout: RolloutProcess) -> None:
    for gid in range(6):
        rollout.ledger.admit(group(gid, [*PROMPT, 80 + gid], 4), b"")
    committed: list[trajectory_pb2.CommittedGroup] = []
    deadline = time.monotonic() + 60
    while len(committed) < 6 and time.monotonic() < deadline:
        committed = [one for _, one in rollout.ledger.read_committed("0", 10, 0.5)]
    assert sorted(one.gid for one in committed) == list(range(6))
    worst = 0.0
    for one in committed:
        refs = list(one.rows)
        for row, meta in zip(rollout.rows.read(refs, SAMPLED_COLUMNS), rollout.rows.read_meta(refs), strict=True):
            ids, mask = row["token_ids"].tolist(), row["response_mask"].astype(bool)
            assert mask.tolist() == [False] * meta.num_prompt_tokens + [True] * (len(ids) - meta.num_prompt_tokens)
            expected = rollout.logprobs(ids, temperature=0.8)
            worst = max(worst, float(np.abs(row["rollout_logprobs"] - expected)[mask].max()))
            assert (row["policy_versions"] == np.where(mask, 1, -1)).all()
            assert (meta.prompt.ground_truth, meta.prompt.token_ids, meta.gid) == (
                "" if meta.index else "x",
                b"",
                one.gid,
            )
    assert worst < 1e-4


def test_a_greedy_response_beside_the_others_takes_the_models_likeliest_token_each_time(
    rollout: RolloutProcess,
) -> None:
    gid = rollout.ledger.position().next_gid
    rollout.ledger.admit(group(gid, PROMPT, 3, greedy_response=True), b"")
    deadline = time.monotonic() + 60
    one = None
    while one is None and time.monotonic() < deadline:
        one = next((one for _, one in rollout.ledger.read_committed("0", 100, 0.5) if one.gid == gid), None)
    assert one is not None
    assert [ref.id for ref in rows_of(one)] == [f"{gid}/{i}" for i in range(4)]
    metas = rollout.rows.read_meta(rows_of(one))
    assert [round(meta.sampling.temperature, 3) for meta in metas] == [0.8, 0.8, 0.8, 0]
    (row,) = rollout.rows.read([one.greedy_row], SAMPLED_COLUMNS)
    assert not row["rollout_logprobs"].any()
    ids = row["token_ids"].tolist()
    for t in range(metas[3].num_prompt_tokens, len(ids)):
        others = [rollout.logprobs([*ids[:t], other])[t] for other in range(0, 259, 29)]
        assert rollout.logprobs(ids[: t + 1])[t] >= max(others) - 1e-4


@pytest.mark.parametrize("breaks", [False, True], ids=["whole", "broken first"])
def test_groups_kept_over_a_publish_carry_the_version_of_every_token(rollout: RolloutProcess, breaks: bool) -> None:
    before = rollout.version
    first = rollout.ledger.position().next_gid
    for gid in range(first, first + 8):
        rollout.ledger.admit(group(gid, [*PROMPT, gid], 4, max_tokens=480, temperature=1.5), b"")
    rollout.wait_for_groups()
    rollout.perturb(1)
    if breaks:
        with pytest.raises(WeightsMismatchError):
            rollout.transfer(num_sent=len(rollout.weights) // 2)
        info = rollout.stub.GetInfo(rollout_pb2.GetRolloutInfoRequest(), timeout=30)
        assert info.weights_state == rollout_pb2.WEIGHTS_STATE_TORN
        rollout.open_epoch()
    sent, received = rollout.publish()
    assert np.abs(decode_tensor(received.probe.logprobs, "probe") - rollout.logprobs(PROBE)).max() < 1e-4
    seen: set[int] = set()
    found: dict[int, trajectory_pb2.CommittedGroup] = {}
    deadline = time.monotonic() + 90
    while len(found) < 8 and time.monotonic() < deadline:
        found = {one.gid: one for _, one in rollout.ledger.read_committed("0", 100, 0.5) if one.gid >= first}
    assert sorted(found) == list(range(first, first + 8))
    mixed = 0
    for one in found.values():
        refs = list(one.rows)
        for row, meta in zip(rollout.rows.read(refs, SAMPLED_COLUMNS), rollout.rows.read_meta(refs), strict=True):
            versions = row["policy_versions"][row["response_mask"] == 1]
            seen |= set(versions.tolist())
            mixed += len(set(versions.tolist())) > 1
            assert (np.diff(versions) >= 0).all()
            new = row["policy_versions"] == rollout.version
            if new.any():
                check_sampled_from(
                    row["rollout_logprobs"][new], rollout.logprobs(row["token_ids"].tolist(), temperature=1.5)[new]
                )
            assert {span.weights_digest for span in meta.spans} <= {rollout.digests[before], sent.digest}
    assert seen <= {before, rollout.version}
    assert rollout.version in seen
    assert mixed > 0
    use = rollout.stub.GetInfo(rollout_pb2.GetRolloutInfoRequest(), timeout=30).engine_use
    assert 0 < use.kv_cache_usage < 1
    assert use.num_preemptions == 0, "what a publish paused gave way to nobody"


@pytest.mark.parametrize("mode", [rollout_pb2.PAUSE_MODE_WAIT, rollout_pb2.PAUSE_MODE_ABORT])
def test_groups_that_a_publish_finishes_or_aborts_hold_one_version_each(
    rollout: RolloutProcess, mode: rollout_pb2.PauseMode.ValueType
) -> None:
    first = rollout.ledger.position().next_gid
    for gid in range(first, first + 4):
        rollout.ledger.admit(group(gid, [*PROMPT, gid], 4, max_tokens=300, temperature=1.5), b"")
    rollout.wait_for_groups()
    rollout.publish(pause_mode=mode)
    found: dict[int, trajectory_pb2.CommittedGroup] = {}
    deadline = time.monotonic() + 60
    while len(found) < 4 and time.monotonic() < deadline:
        found = {one.gid: one for _, one in rollout.ledger.read_committed("0", 100, 0.5) if one.gid >= first}
    assert len(found) == 4
    for one in found.values():
        for row in rollout.rows.read(list(one.rows), SAMPLED_COLUMNS):
            assert len(set(row["policy_versions"][row["response_mask"] == 1].tolist())) == 1
    if mode == rollout_pb2.PAUSE_MODE_ABORT:
        assert {one.max_policy_version for one in found.values()} == {rollout.version}


def test_a_profile_holds_the_steps_that_were_asked_for_and_changes_no_token(rollout: RolloutProcess) -> None:
    expected = {response.meta.index: response.response_token_ids for response in generate(rollout)}
    waiting = rollout.stub.Profile(training_pb2.ProfileRequest(ctl=1, num_steps=5), timeout=60)
    assert not next(waiting).HasField("profile")
    with pytest.raises(grpc.RpcError) as refused:
        list(rollout.stub.Profile(training_pb2.ProfileRequest(ctl=1, num_steps=5), timeout=60))
    assert refused.value.code() == grpc.StatusCode.FAILED_PRECONDITION
    assert {response.meta.index: response.response_token_ids for response in generate(rollout)} == expected
    (profile,) = [message.profile for message in waiting if message.HasField("profile")]
    assert (profile.step, profile.num_passes) == (rollout.version, 5)
    (trace,) = profile.traces
    assert trace.path.endswith(f"/profiles/{rollout.join.worker}-version{rollout.version}-rank0.json.gz"), trace.failure
    with gzip.open(trace.path, "rt") as file:
        names = Counter(event["name"] for event in json.load(file)["traceEvents"] if event.get("ph") == "X")
    assert names["_C::cpu_attention_with_kv_cache"] == 5 * rollout.model.config.num_hidden_layers
    assert {operator.name for operator in trace.operators} <= names.keys()


def test_over_long_prompts_are_refused(rollout: RolloutProcess) -> None:
    with pytest.raises(grpc.RpcError) as refused:
        generate(rollout, prompt=[60] * 512)
    assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_sleep_is_not_for_cpus(rollout: RolloutProcess) -> None:
    rollout.stub.Pause(rollout_pb2.PauseRequest(ctl=1, mode=rollout_pb2.PAUSE_MODE_KEEP), timeout=10)
    with pytest.raises(grpc.RpcError) as refused:
        rollout.stub.Sleep(rollout_pb2.SleepRequest(ctl=1, level=1), timeout=10)
    assert refused.value.code() == grpc.StatusCode.UNIMPLEMENTED
    rollout.stub.Resume(
        rollout_pb2.ResumeRequest(ctl=1, policy_version=rollout.version, digest=rollout.digests[rollout.version]),
        timeout=10,
    )
    assert generate(rollout, num_responses=1)


def engine_of(rollout: RolloutProcess) -> list[psutil.Process]:
    """vLLM's processes."""
    children = psutil.Process(rollout.process.pid).children(recursive=True)
    return [child for child in children if "resource_tracker" not in " ".join(child.cmdline())]


def moves_in(rollout: RolloutProcess, seconds: float) -> list[tuple[bool, int]]:
    """Heartbeats of the next `seconds`."""
    seen = len(rollout.controller.moves)
    time.sleep(seconds)
    return rollout.controller.moves[seen:]


def test_an_engine_that_is_stopped_while_it_samples_is_seen_to_hang_and_an_idle_or_sampling_one_is_not(
    rollout: RolloutProcess,
) -> None:
    rollout.publish()
    until(lambda: {busy for busy, _ in moves_in(rollout, 1.0)} == {False}, "a second without work")
    cores = engine_of(rollout)
    with ThreadPoolExecutor(1) as pool:
        sampling = pool.submit(generate, rollout, num_responses=32, max_tokens=400)
        until(lambda: {busy for busy, _ in moves_in(rollout, 0.5)} == {True}, "work")
        for core in cores:
            core.suspend()
        until(lambda: len(set(moves_in(rollout, 3.0))) == 1, "work that stands still")
        ((busy, _),) = set(moves_in(rollout, 1.0))
        assert busy
        for core in cores:
            core.resume()
        until(lambda: len({progress for _, progress in moves_in(rollout, 1.5)}) > 1, "work that gets on")
        assert len(sampling.result()) == 32


def test_a_replica_that_is_given_up_while_its_engine_hangs_ends_at_once_to_be_restarted(
    rollout: RolloutProcess,
) -> None:
    cores = engine_of(rollout)
    for core in cores:
        core.suspend()
    rollout.controller.has_given_up = True
    assert rollout.process.wait(60) == RESTART
    _, left = psutil.wait_procs(cores, timeout=60)
    assert not left


def test_an_engine_that_a_signal_ends_is_one_that_died_and_no_stop_of_the_replica(tmp_path: Path) -> None:
    """The engine is a fork of the replica, whose event loop hears of signals by a socket that forks share."""
    with rollout_process(tmp_path, write_qwen3(tmp_path / "model", hidden=128)) as rollout:
        (core,) = engine_of(rollout)
        core.terminate()
        assert rollout.process.wait(60) == RESTART


def test_workers_of_a_forked_engine_are_spawned_on_cores_of_their_own_and_end_with_a_killed_replica(
    tmp_path: Path,
) -> None:
    """One core each: OpenMP reads which as it is loaded, which in a fork it is already."""
    model = write_qwen3(tmp_path / "model", hidden=128)
    with rollout_process(tmp_path, model, rollout={"tensor_parallel_size": 2}) as rollout:
        rollout.open_epoch()
        rollout.publish()
        assert len(generate(rollout)) == 4
        processes = engine_of(rollout)
        cores = [core for each in processes if "Worker" in each.name() for core in each.cpu_affinity()]
        assert len(cores) == len(set(cores)) > 1
        rollout.process.kill()
        _, left = psutil.wait_procs(processes, timeout=60)
        assert not left
