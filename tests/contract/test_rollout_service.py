"""RolloutService over a real server: what Generate, the weights and the gate promise their callers."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from rolecall.errors import (
    AsleepError,
    ChannelBrokenError,
    ConflictError,
    DeadlineError,
    FencedError,
    GenerationError,
    InvalidInputError,
    NotAttestedError,
    NotOnThisDeviceError,
    PromptTooLongError,
    StaleEpochError,
    StaleVersionError,
    StoreRolledBackError,
    TornWeightsError,
    UnavailableError,
    WeightsMismatchError,
    WrongVersionError,
)
from rolecall.settings.data import TEMPERATURES
from rolecall.v1 import rollout_pb2, trajectory_pb2, weights_pb2
from rolecall.wire import decode_tensor
from services.rollout.sampling import PauseMode
from services.rollout.scripted import ScriptedEngine, digest_of
from services.rollout.service import SERVICE_NAME
from tests.contract.rollout_replica import PROMPT, ReplicaUnderTest, generate_request, replica_under_test
from tests.fixtures_store import StoreUnderTest
from tests.tiny_tokenizer import write_tokenizer
from tests.waiting import until


@pytest.fixture
async def rollout(store: StoreUnderTest, tmp_path: Path) -> AsyncIterator[ReplicaUnderTest]:
    write_tokenizer(tmp_path)
    async with replica_under_test(store, tmp_path, ScriptedEngine(token_s=0.002, sleep_levels=(1, 2))) as running:
        yield running


async def serving(rollout: ReplicaUnderTest) -> bool:
    check = health_pb2.HealthCheckRequest(service=SERVICE_NAME)
    answer: health_pb2.HealthCheckResponse = await cast(Any, health_pb2_grpc.HealthStub)(rollout.channel).Check(check)
    return answer.status == health_pb2.HealthCheckResponse.SERVING


async def test_nothing_is_served_before_the_first_version_is_attested(rollout: ReplicaUnderTest) -> None:
    assert not await serving(rollout)
    with pytest.raises(NotAttestedError):
        await rollout.generate()
    await rollout.receive(1)
    assert not await serving(rollout)
    with pytest.raises(NotAttestedError):
        await rollout.generate()
    await rollout.resume(1)
    assert await serving(rollout)
    assert len(await rollout.generate()) == 4


async def test_generate_streams_each_response_with_its_tokens_logprobs_and_spans(rollout: ReplicaUnderTest) -> None:
    await rollout.publish(1)
    responses = await rollout.generate(8)
    assert sorted(response.meta.index for response in responses) == list(range(8))
    for response in responses:
        ids = np.frombuffer(response.response_token_ids, "<i4")
        assert len(np.frombuffer(response.response_logprobs, "<f4")) == len(ids) > 0
        (span,) = response.meta.spans
        assert (span.policy_version, span.weights_digest, span.start, span.end) == (
            1,
            digest_of(1),
            len(PROMPT),
            len(PROMPT) + len(ids),
        )
        assert response.meta.id == f"eval/0/heldout/{1}/{response.meta.index}"
        assert response.meta.finish_reason in (trajectory_pb2.FINISH_REASON_STOP, trajectory_pb2.FINISH_REASON_LENGTH)
        assert (response.meta.finish_reason == trajectory_pb2.FINISH_REASON_STOP) == (ids[-1] == 2)
        assert not response.meta.prompt.token_ids
        assert response.meta.tokenizer_digest
        assert "<|" not in response.meta.response_text


async def test_the_same_seed_gives_the_same_responses(rollout: ReplicaUnderTest) -> None:
    await rollout.publish(1)
    first, second, other = [
        {response.meta.index: response.response_token_ids for response in await rollout.generate(seed=seed)}
        for seed in (5, 5, 6)
    ]
    assert first == second != other


async def test_greedy_responses_carry_no_logprobs(rollout: ReplicaUnderTest) -> None:
    await rollout.publish(1)
    request = generate_request(1)
    request.sampling.temperature = 0
    responses = [response async for response in rollout.stub.Generate(request)]
    assert responses[0].response_logprobs == b""


async def test_bad_requests_name_the_field(rollout: ReplicaUnderTest) -> None:
    await rollout.publish(1)
    with pytest.raises(PromptTooLongError):
        await rollout.generate(prompt=trajectory_pb2.Prompt(token_ids=np.full(64, 5, "<i4").tobytes()))
    odd_temperatures = [("temperature", value) for value in (-1.0, 0.005, 2.5, float("nan"))]
    for change, field in [*odd_temperatures, ("top_p", 1.5), ("top_k", -1), ("min_p", 1.5), ("max_tokens", 0)]:
        request = generate_request()
        setattr(request.sampling, change, field)
        with pytest.raises(InvalidInputError, match=change):
            [response async for response in rollout.stub.Generate(request)]
    for limit in TEMPERATURES:
        request = generate_request()
        request.sampling.temperature = limit  # float32 on the wire, so 0.01 is a little less
        assert [response async for response in rollout.stub.Generate(request)]
    request = generate_request()
    request.num_responses = 0
    with pytest.raises(InvalidInputError, match="num_responses"):
        [response async for response in rollout.stub.Generate(request)]
    request = generate_request()
    request.prompt.token_ids = b""
    with pytest.raises(InvalidInputError, match="no prompt tokens"):
        [response async for response in rollout.stub.Generate(request)]


async def test_a_failed_generation_is_an_error_and_never_an_empty_response(rollout: ReplicaUnderTest) -> None:
    await rollout.publish(1)
    rollout.engine.sample_failures["eval/0/heldout/1/2:call-1"] = GenerationError("the engine choked")
    with pytest.raises(GenerationError, match="choked"):
        await rollout.generate()
    assert rollout.engine.num_running == 0


async def test_a_caller_that_leaves_aborts_its_requests(rollout: ReplicaUnderTest) -> None:
    await rollout.publish(1)
    rollout.engine.hold = True
    call = rollout.stub.Generate(generate_request())
    await until(lambda: rollout.engine.num_running >= 4)
    call.cancel()
    await until(lambda: not rollout.engine.num_running)


async def test_a_pinned_version_is_that_version_or_an_error(rollout: ReplicaUnderTest) -> None:
    await rollout.publish(1)
    with pytest.raises(WrongVersionError):
        await rollout.generate(policy_version=2)
    assert len(await rollout.generate(policy_version=1)) == 4


async def test_the_probe_runs_on_the_loaded_weights(rollout: ReplicaUnderTest) -> None:
    for version in (1, 2):
        received = await rollout.receive(version)
        assert decode_tensor(received.probe.logprobs, "probe").tolist() == [0.0] + [-(version + 1) / 8] * 3
        assert decode_tensor(received.probe.decoded_logprobs, "decoded").shape == (2,)
        assert decode_tensor(received.probe.prefilled_logprobs, "prefilled").shape == (2,)
        assert received.digest == digest_of(version)
        assert [item.value for item in received.fingerprints] == [version]


async def test_a_response_kept_over_a_publish_leaves_only_after_resume_and_names_both_versions(
    rollout: ReplicaUnderTest,
) -> None:
    await rollout.publish(1)
    rollout.engine.hold = True
    call = asyncio.create_task(rollout.generate(3))
    await until(lambda: rollout.engine.num_running >= 3)
    rollout.engine.step(2)
    await asyncio.sleep(0.05)
    await rollout.receive(2)
    rollout.engine.hold = False
    await asyncio.sleep(0.1)
    assert not call.done()
    await rollout.resume(2)
    for response in await call:
        versions = [span.policy_version for span in response.meta.spans]
        assert versions in ([1], [1, 2])
        assert [span.weights_digest for span in response.meta.spans] == [digest_of(version) for version in versions]


async def test_what_an_unattested_version_sampled_never_leaves(rollout: ReplicaUnderTest) -> None:
    await rollout.publish(1)
    rollout.engine.hold = True
    call = asyncio.create_task(
        rollout.generate(1, prompt=trajectory_pb2.Prompt(token_ids=np.array([9, 9], "<i4").tobytes()))
    )
    await until(lambda: rollout.engine.num_running)
    await rollout.receive(2)
    rollout.engine.hold = False
    await rollout.engine.resume()  # the scheduler runs, as it does beside a probe with keep_cache
    await asyncio.sleep(0.2)
    assert not call.done()
    await rollout.receive(3)
    await rollout.resume(3)
    with pytest.raises(NotAttestedError):
        await call


async def test_a_torn_engine_serves_nothing_until_a_full_load(rollout: ReplicaUnderTest) -> None:
    await rollout.publish(1)
    rollout.engine.failures.append(WeightsMismatchError("expert 3 never came"))
    with pytest.raises(TornWeightsError, match="expert 3"):
        await rollout.receive(2)
    assert (await rollout.info()).weights_state == rollout_pb2.WEIGHTS_STATE_TORN
    for version in (1, 2):
        with pytest.raises(TornWeightsError):
            await rollout.resume(version)
    with pytest.raises(NotAttestedError):
        await rollout.generate()
    assert not await serving(rollout)
    with pytest.raises(StaleVersionError):
        await rollout.receive(2)
    await rollout.publish(3)
    assert len(await rollout.generate()) == 4


@pytest.mark.parametrize("error", [WeightsMismatchError("a bucket was skipped"), RuntimeError("out of memory")])
async def test_kept_work_of_an_engine_that_tears_is_given_up(rollout: ReplicaUnderTest, error: Exception) -> None:
    await rollout.publish(1)
    rollout.engine.hold = True
    call = asyncio.create_task(rollout.generate())
    await until(lambda: rollout.engine.num_running >= 4)
    rollout.engine.failures.append(error)
    with pytest.raises(TornWeightsError, match=str(error)):
        await rollout.receive(2)
    with pytest.raises(UnavailableError):
        await call


async def test_kept_work_outlasts_a_channel_that_broke_midway(rollout: ReplicaUnderTest) -> None:
    await rollout.publish(1)
    rollout.engine.hold = True
    call = asyncio.create_task(rollout.generate())
    await until(lambda: rollout.engine.num_running >= 4)
    rollout.engine.failures.append(TornWeightsError("a peer is gone", cause=ChannelBrokenError.reason))
    with pytest.raises(TornWeightsError, match="a peer is gone"):
        await rollout.receive(2, mode=rollout_pb2.PAUSE_MODE_KEEP_CACHE)
    assert (await rollout.info()).weights_state == rollout_pb2.WEIGHTS_STATE_TORN
    await rollout.publish(3, mode=rollout_pb2.PAUSE_MODE_KEEP_CACHE)
    rollout.engine.hold = False
    assert len(await call) == 4
    assert rollout.engine.pauses[-1] is PauseMode.KEEP, "what stands in the cache of torn weights is computed again"


async def test_a_channel_that_breaks_before_the_first_bucket_leaves_the_weights_whole(
    rollout: ReplicaUnderTest,
) -> None:
    await rollout.publish(1)
    rollout.engine.failures.append(ChannelBrokenError("the actor went away"))
    with pytest.raises(ChannelBrokenError):
        await rollout.receive(2)
    assert not await serving(rollout)
    await rollout.resume(1)
    assert len(await rollout.generate(policy_version=1)) == 4


@pytest.mark.parametrize("tears", [False, True])
async def test_kept_work_is_given_up_when_nobody_resumes(store: StoreUnderTest, tmp_path: Path, tears: bool) -> None:
    write_tokenizer(tmp_path)
    async with replica_under_test(store, tmp_path, ScriptedEngine(token_s=0.002), keep_timeout_s=0.3) as rollout:
        await rollout.publish(1)
        rollout.engine.hold = True
        call = asyncio.create_task(rollout.generate())
        await until(lambda: rollout.engine.num_running >= 4)
        if tears:
            rollout.engine.failures.append(TornWeightsError("a peer is gone", cause=ChannelBrokenError.reason))
            with pytest.raises(TornWeightsError):
                await rollout.receive(2)
        else:
            await rollout.receive(2)
        with pytest.raises(UnavailableError):
            await call
        await (rollout.publish(3) if tears else rollout.resume(2))
        rollout.engine.hold = False
        assert len(await rollout.generate()) == 4


async def test_kept_work_of_an_engine_that_does_not_come_to_rest_is_given_up(
    store: StoreUnderTest, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path)
    engine = ScriptedEngine(token_s=0.002)
    async with replica_under_test(store, tmp_path, engine, pause_timeout_s=0.3, keep_timeout_s=0.3) as rollout:
        await rollout.publish(1)
        engine.hold = True
        call = asyncio.create_task(rollout.generate())
        await until(lambda: engine.num_running >= 4)
        with pytest.raises(DeadlineError, match="did not come to rest"):
            await rollout.receive(2, mode=rollout_pb2.PAUSE_MODE_WAIT)
        with pytest.raises(UnavailableError):
            await call
        await rollout.publish(3)
        engine.hold = False
        assert len(await rollout.generate()) == 4


async def test_nothing_goes_on_from_what_weights_computed_that_nobody_attested(
    rollout: ReplicaUnderTest,
) -> None:
    await rollout.publish(1, mode=rollout_pb2.PAUSE_MODE_KEEP_CACHE)
    await rollout.publish(2, mode=rollout_pb2.PAUSE_MODE_KEEP_CACHE)
    await rollout.receive(3, mode=rollout_pb2.PAUSE_MODE_KEEP_CACHE)  # which nobody attests
    await rollout.receive(4, mode=rollout_pb2.PAUSE_MODE_KEEP_CACHE)
    await rollout.receive(5, mode=rollout_pb2.PAUSE_MODE_WAIT)
    await rollout.resume(5)
    await rollout.receive(6, mode=rollout_pb2.PAUSE_MODE_WAIT)
    assert rollout.engine.pauses == [
        PauseMode.KEEP,
        PauseMode.KEEP_CACHE,
        PauseMode.KEEP_CACHE,
        PauseMode.KEEP,
        PauseMode.KEEP,
        PauseMode.WAIT,
    ]


async def test_pausing_finishes_keeps_or_aborts_as_asked(rollout: ReplicaUnderTest) -> None:
    await rollout.publish(1)
    kept = (rollout_pb2.PAUSE_MODE_KEEP, rollout_pb2.PAUSE_MODE_KEEP_CACHE)
    for mode in (*kept, rollout_pb2.PAUSE_MODE_WAIT, rollout_pb2.PAUSE_MODE_ABORT):
        rollout.engine.hold = True
        call = asyncio.create_task(rollout.generate(8))
        await until(lambda: rollout.engine.num_running >= 8)
        rollout.engine.pauses.clear()
        pausing = asyncio.ensure_future(rollout.stub.Pause(rollout_pb2.PauseRequest(ctl=1, mode=mode)))
        await until(lambda: rollout.engine.pauses)
        rollout.engine.hold = False
        await pausing
        assert (rollout.engine.num_running == 0) == (mode not in kept)
        await asyncio.sleep(0.05)
        with pytest.raises(UnavailableError):
            await rollout.generate()
        await rollout.resume(1)
        if mode == rollout_pb2.PAUSE_MODE_ABORT:
            with pytest.raises(UnavailableError):
                await call
        else:
            assert len(await call) == 8


async def test_an_epoch_is_joined_once_and_only_the_last_one_receives(rollout: ReplicaUnderTest) -> None:
    await rollout.open_epoch(3)
    for epoch in (2, 3):
        with pytest.raises(StaleEpochError):
            await rollout.open_epoch(epoch)
    rollout.epoch = 2
    with pytest.raises(StaleEpochError):
        await rollout.receive(1)
    rollout.epoch = 3
    await rollout.receive(1)
    assert rollout.engine.joined == [3]


async def test_a_meeting_without_a_backend_is_refused(rollout: ReplicaUnderTest) -> None:
    place = weights_pb2.JoinWeightChannelRequest(
        ctl=1, epoch=1, address="127.0.0.1:1", rank=1, world_size=2, timeout_s=1
    )
    with pytest.raises(InvalidInputError, match="backend"):
        await rollout.stub.JoinWeightChannel(place)


async def test_a_controller_that_the_store_does_not_know_is_refused_and_changes_nothing(
    rollout: ReplicaUnderTest,
) -> None:
    await rollout.open_epoch(1)
    for call in (
        rollout.receive(1, ctl=2**62),
        rollout.stub.Drain(rollout_pb2.DrainRequest(ctl=2, finish_s=1)),
    ):
        with pytest.raises(StoreRolledBackError, match="is not known to the store, whose newest is 1"):
            await call
    await rollout.publish(1)
    assert await rollout.generate()


async def test_a_replaced_controller_is_refused(rollout: ReplicaUnderTest) -> None:
    await rollout.open_epoch(1)
    assert await asyncio.to_thread(rollout.store.replaced) == 2
    await rollout.receive(1, ctl=2)
    for call in (
        rollout.stub.Resume(rollout_pb2.ResumeRequest(ctl=1, policy_version=1, digest=digest_of(1))),
        rollout.stub.Pause(rollout_pb2.PauseRequest(ctl=1, mode=rollout_pb2.PAUSE_MODE_KEEP)),
        rollout.stub.Drain(rollout_pb2.DrainRequest(ctl=1, finish_s=1)),
        rollout.stub.Sleep(rollout_pb2.SleepRequest(ctl=1, level=1)),
        rollout.stub.WakeUp(rollout_pb2.WakeUpRequest(ctl=1)),
    ):
        with pytest.raises(FencedError):
            await call


async def test_sleep_needs_a_pause_and_level_two_needs_a_full_load(rollout: ReplicaUnderTest) -> None:
    await rollout.publish(1)
    with pytest.raises(ConflictError):
        await rollout.stub.Sleep(rollout_pb2.SleepRequest(ctl=1, level=1))
    await rollout.stub.Pause(rollout_pb2.PauseRequest(ctl=1, mode=rollout_pb2.PAUSE_MODE_KEEP))
    await rollout.stub.Sleep(rollout_pb2.SleepRequest(ctl=1, level=1))
    await rollout.stub.WakeUp(rollout_pb2.WakeUpRequest(ctl=1))
    await rollout.resume(1)
    assert await rollout.generate()
    await rollout.stub.Pause(rollout_pb2.PauseRequest(ctl=1, mode=rollout_pb2.PAUSE_MODE_KEEP))
    await rollout.stub.Sleep(rollout_pb2.SleepRequest(ctl=1, level=2))
    await rollout.stub.WakeUp(rollout_pb2.WakeUpRequest(ctl=1))
    with pytest.raises(TornWeightsError):
        await rollout.resume(1)
    await rollout.publish(2)
    assert await rollout.generate()


async def test_an_engine_that_sleeps_neither_resumes_nor_loads_until_it_wakes(rollout: ReplicaUnderTest) -> None:
    await rollout.publish(1)
    await rollout.stub.Pause(rollout_pb2.PauseRequest(ctl=1, mode=rollout_pb2.PAUSE_MODE_KEEP))
    await rollout.stub.Sleep(rollout_pb2.SleepRequest(ctl=1, level=1))
    await rollout.stub.Sleep(rollout_pb2.SleepRequest(ctl=1, level=1))
    with pytest.raises(AsleepError, match="level 1"):
        await rollout.stub.Sleep(rollout_pb2.SleepRequest(ctl=1, level=2))
    with pytest.raises(AsleepError):
        await rollout.resume(1)
    with pytest.raises(AsleepError):
        await rollout.receive(2)
    assert (await rollout.info()).weights_state == rollout_pb2.WEIGHTS_STATE_ASLEEP
    for _ in range(2):
        await rollout.stub.WakeUp(rollout_pb2.WakeUpRequest(ctl=1))
    await rollout.resume(1)
    assert await rollout.generate()
    await rollout.publish(2)


@pytest.mark.parametrize("level", [1, 2])
async def test_a_group_kept_over_a_sleep_goes_on_with_the_next_weights_and_its_deadline_stands_still(
    store: StoreUnderTest, tmp_path: Path, level: int
) -> None:
    write_tokenizer(tmp_path)
    engine = ScriptedEngine(token_s=0.002, sleep_levels=(1, 2))
    async with replica_under_test(store, tmp_path, engine, generation_timeout_s=2.0, keep_timeout_s=30.0) as rollout:
        await rollout.publish(1)
        engine.hold = True
        rollout.admit(1, num_responses=8)
        await rollout.runs(8)
        engine.step(2)
        await until(lambda: engine.num_running < 8 or all(len(each.tokens) == 2 for each in engine.running))
        for _ in range(2):  # the controller may ask again
            await rollout.stub.Pause(rollout_pb2.PauseRequest(ctl=1, mode=rollout_pb2.PAUSE_MODE_KEEP))
            await rollout.stub.Sleep(rollout_pb2.SleepRequest(ctl=1, level=level))
        engine.hold = False
        await asyncio.sleep(2.5)  # longer than the deadline
        assert engine.num_running > 0
        for _ in range(2):
            await rollout.stub.WakeUp(rollout_pb2.WakeUpRequest(ctl=1))
        await rollout.publish(2)
        (group,) = await rollout.committed(1)
        assert (group.min_policy_version, group.max_policy_version) == (1, 2)
        assert max(meta.generation_s for meta in store.rows.read_meta(group.rows)) < 2.0


async def test_what_waits_for_the_weights_of_a_publish_that_failed_is_given_up_by_a_sleep(
    rollout: ReplicaUnderTest,
) -> None:
    await rollout.publish(1)
    rollout.engine.hold = True
    rollout.admit(1)
    await rollout.runs(4)
    await rollout.receive(2)  # and nobody attests it
    rollout.engine.hold = False
    await rollout.stub.Sleep(rollout_pb2.SleepRequest(ctl=1, level=2))
    await rollout.runs(0)
    await rollout.stub.WakeUp(rollout_pb2.WakeUpRequest(ctl=1))
    await rollout.publish(3)
    (group,) = await rollout.committed(1)  # given back, and begun again
    assert (group.min_policy_version, group.max_policy_version) == (3, 3)


class HalfAwake(ScriptedEngine):
    """As vLLM, it is slow to wake, and goes on as a whole for a moment where it is put to sleep half awake."""

    def __init__(self) -> None:
        super().__init__(token_s=0.002, sleep_levels=(1, 2))
        self.is_half_awake = False

    async def sleep(self, level: int) -> None:
        if self.is_half_awake:
            await self.resume()
            await asyncio.sleep(0.1)
        self.is_half_awake = False
        await super().sleep(level)

    async def wake_up(self) -> None:
        self.is_half_awake = True
        await asyncio.sleep(0.1)


async def test_what_is_kept_samples_nothing_from_dropped_weights_though_the_caller_of_wake_up_left(
    store: StoreUnderTest, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path)
    engine = HalfAwake()
    async with replica_under_test(store, tmp_path, engine) as rollout:
        await rollout.publish(1)
        engine.hold = True
        rollout.admit(1)
        await rollout.runs(4)
        await rollout.sleep()
        engine.hold = False
        call = rollout.stub.WakeUp(rollout_pb2.WakeUpRequest(ctl=1))
        await until(lambda: engine.is_half_awake)
        call.cancel()
        await rollout.sleep()  # the controller that comes after
        await rollout.stub.WakeUp(rollout_pb2.WakeUpRequest(ctl=1))
        await rollout.publish(2)
        (group,) = await rollout.committed(1)
        assert (group.min_policy_version, group.max_policy_version) == (2, 2)


async def test_rows_that_lay_at_the_gate_while_it_slept_are_there_when_their_group_is_committed(
    store: StoreUnderTest, tmp_path: Path
) -> None:
    write_tokenizer(tmp_path)
    engine = ScriptedEngine(token_s=0.002, sleep_levels=(1, 2))
    async with replica_under_test(store, tmp_path, engine, row_expiry_s=2) as rollout:
        await rollout.publish(1)
        stage, staged, asleep = rollout.pull._staging.stage, asyncio.Event(), asyncio.Event()

        async def stage_before_the_sleep(*args: Any) -> list[trajectory_pb2.RowRef]:
            refs = await stage(*args)
            staged.set()
            await asleep.wait()
            return refs

        rollout.pull._staging.stage = stage_before_the_sleep  # type: ignore[method-assign, assignment]
        rollout.admit(1)
        await staged.wait()
        await rollout.sleep()
        asleep.set()
        await asyncio.sleep(3)
        await rollout.stub.WakeUp(rollout_pb2.WakeUpRequest(ctl=1))
        await rollout.publish(2)
        (group,) = await rollout.committed(1)
        assert len(await asyncio.to_thread(store.rows.read_meta, list(group.rows))) == 4


async def test_a_pause_that_is_left_while_it_sleeps_gives_nothing_up(store: StoreUnderTest, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    engine = ScriptedEngine(token_s=0.002, sleep_levels=(1, 2))
    async with replica_under_test(store, tmp_path, engine, keep_timeout_s=0.3) as rollout:
        await rollout.publish(1)
        engine.hold = True
        rollout.admit(1)
        await rollout.runs(4)
        await rollout.sleep()
        engine.frozen = True
        call = rollout.stub.Pause(rollout_pb2.PauseRequest(ctl=1, mode=rollout_pb2.PAUSE_MODE_KEEP))
        await until(lambda: len(engine.pauses) == 3)
        call.cancel()
        await asyncio.sleep(0.1)
        engine.frozen = False
        await asyncio.sleep(0.6)
        assert engine.num_running == 4


async def test_what_is_aborted_before_a_sleep_is_not_waited_for(rollout: ReplicaUnderTest) -> None:
    await rollout.publish(1)
    rollout.engine.hold = True
    rollout.admit(1)
    await rollout.runs(4)
    await rollout.sleep(mode=rollout_pb2.PAUSE_MODE_ABORT)
    await rollout.runs(0)


async def test_sleep_is_not_for_cpus(store: StoreUnderTest, tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    async with replica_under_test(store, tmp_path, ScriptedEngine()) as rollout:
        with pytest.raises(NotOnThisDeviceError):
            await rollout.stub.Sleep(rollout_pb2.SleepRequest(ctl=1, level=1))
        with pytest.raises(NotOnThisDeviceError):
            await rollout.stub.WakeUp(rollout_pb2.WakeUpRequest(ctl=1))


async def test_unspecified_pause_modes_are_refused(rollout: ReplicaUnderTest) -> None:
    with pytest.raises(InvalidInputError):
        await rollout.stub.Pause(rollout_pb2.PauseRequest(ctl=1))


async def test_info_says_what_is_held_and_done(rollout: ReplicaUnderTest) -> None:
    await rollout.publish(4)
    before = await rollout.info()
    responses = await rollout.generate(8)
    info = await rollout.info()
    assert (info.weights_state, info.policy_version, info.digest) == (
        rollout_pb2.WEIGHTS_STATE_ATTESTED,
        4,
        digest_of(4),
    )
    assert info.num_sampled_tokens - before.num_sampled_tokens == sum(
        len(response.response_token_ids) // 4 for response in responses
    )
    assert info.busy_s > before.busy_s
    assert (info.max_model_tokens, info.num_weight_ranks, info.consumer) == (64, 1, "rollout-0.abc")
    assert not info.HasField("engine_use"), "a scripted engine has no cache"


async def test_health_watchers_see_every_change(rollout: ReplicaUnderTest) -> None:
    watch = cast(Any, health_pb2_grpc.HealthStub)(rollout.channel).Watch(
        health_pb2.HealthCheckRequest(service=""), timeout=60
    )
    states = []

    async def follow() -> None:
        async for answer in watch:
            states.append(answer.status)

    following = asyncio.create_task(follow())
    up, down = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
    await until(lambda: states == [down])
    await rollout.publish(1)
    await until(lambda: states == [down, up])
    await rollout.receive(2)
    await until(lambda: states == [down, up, down])
    watch.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert states == [down, up, down]
