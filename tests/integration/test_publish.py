"""One publish at a time, with something going wrong in each of its phases: the rest is served soon, and what was left
out claims nothing.
"""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from rolecall.errors import (
    ChannelUnreachableError,
    DeadlineError,
    NotAttestedError,
    StaleVersionError,
    UnavailableError,
    WorkerLostError,
)
from rolecall.settings.services import MEETING_S_PER_RANK
from rolecall.v1 import controller_pb2
from services.controller.publish.delivery import ANSWER_S
from services.rollout.config import keep_timeout_s
from services.rollout.replica import Replica
from services.rollout.sampling import MeetingPlace, PauseMode
from services.rollout.state import State
from tests.fixtures_store import StoreUnderTest
from tests.twins.collective import PHASES, Fault, Kind, RogueReplica
from tests.twins.publishing import LEASE_S, Publishing, gone, publishing_run
from tests.waiting import until

SOON_S = 14.0
"""Less than weights.publish_timeout_s: on a quiet machine a bucket's deadline, the wait for answers and the attempt
without the culprit take a third of it.
"""

PATIENT = {
    "controller": {"lease_s": 30.0, "stall_timeout_s": 60.0},
    "rollout": {"hang_s": 60.0},
    "weights": {"bucket_timeout_s": 30.0, "publish_timeout_s": 60.0},
}
"""Where nobody is to be given up, on a busy machine either."""

KINDS = [
    pytest.param(
        kind,
        marks=()
        if kind is Kind.DIE
        else pytest.mark.thorough("test_whoever_fails_in_any_phase_is_left_out_and_the_others_serve_soon"),
        id=kind.value,
    )
    for kind in (Kind.DIE, Kind.HANG, Kind.STOP, Kind.LATE, Kind.FAIL)
]


@pytest.fixture
async def rig(store: StoreUnderTest, tmp_path: Path) -> AsyncIterator[Publishing]:
    async with publishing_run(store, {}, tmp_path) as running:
        yield running


@pytest.fixture
async def patient(store: StoreUnderTest, tmp_path: Path) -> AsyncIterator[Publishing]:
    async with publishing_run(store, PATIENT, tmp_path) as running:
        yield running


async def three(rig: Publishing) -> None:
    """Three rollouts that serve version 0."""
    for i in range(3):
        await rig.rollout(f"rollout-{i}")
    await rig.publisher.publish(0)


def serving(rig: Publishing) -> list[str]:
    """Names of those that serve the current version, by their own account."""
    held = [
        twin
        for twin in rig.alive
        if twin.replica.gate.is_open and twin.replica.held.policy_version == rig.publisher.policy_version
    ]
    return sorted(twin.name for twin in held)


async def test_a_publish_reaches_everyone_and_a_second_one_goes_over_the_same_epoch(patient: Publishing) -> None:
    await three(patient)
    patient.actor.step = 1
    await patient.publisher.publish(1)
    assert serving(patient) == ["rollout-0", "rollout-1", "rollout-2"]
    assert patient.publisher.holds(1)
    assert not patient.publisher.holds(0)
    assert len(patient.collective.meetings) == 1
    await patient.admit(6)
    await patient.committed(6)
    assert patient.violations() == []


async def test_every_receiver_is_told_the_backend_that_the_actor_chose_for_all_of_them(patient: Publishing) -> None:
    first = await patient.rollout("rollout-0", on_gpus=True)
    await patient.publisher.publish(0)
    assert first.engine.backend == "nccl"
    second = await patient.rollout("rollout-1")
    await patient.publisher.publish(0)
    assert (first.engine.backend, second.engine.backend) == ("gloo", "gloo")


async def test_the_ranks_of_a_larger_fleet_have_longer_to_meet(patient: Publishing) -> None:
    await patient.rollout("rollout-0")
    await patient.publisher.publish(0)
    alone_s = patient.actor.meeting_timeout_s
    await patient.rollout("rollout-1")
    await patient.publisher.publish(0)
    assert patient.actor.meeting_timeout_s == pytest.approx(alone_s + MEETING_S_PER_RANK)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("phase", PHASES)
async def test_whoever_fails_in_any_phase_is_left_out_and_the_others_serve_soon(
    rig: Publishing, phase: str, kind: Kind
) -> None:
    await three(rig)
    if phase == "join":
        await rig.rollout("rollout-3")  # so that a new epoch is opened
    await rig.admit(4)
    doomed = rig.twins[1]
    doomed.engine.fault = Fault(phase, kind)
    rig.actor.step = 1
    started = time.monotonic()
    told = (await rig.publisher.publish(1)).values()
    assert time.monotonic() - started < SOON_S
    assert set(serving(rig)) >= {"rollout-0", "rollout-2"}
    if kind is Kind.FAIL:  # it lives, in whichever attempt it was left out
        assert told["publish/left_out"] == 1
    if doomed.name not in serving(rig):
        with pytest.raises(NotAttestedError):
            await asyncio.to_thread(rig.store.worker(doomed.consumer).claim, 1)
    else:
        assert kind is Kind.LATE  # it came back for the second attempt
    await rig.committed(4)
    assert rig.violations() == []


async def test_a_receiver_that_holds_something_else_is_left_out_and_nothing_is_sent_again_for_it(
    patient: Publishing,
) -> None:
    await three(patient)
    patient.twins[0].engine.fault = Fault("bucket", Kind.LIE)
    await patient.publisher.publish(0)
    assert serving(patient) == ["rollout-1", "rollout-2"]
    assert patient.publisher.policy_version == 1
    assert patient.twins[0].replica.held.state is State.LOADED
    assert not patient.publisher.holds(0)
    await patient.publisher.publish(0)
    assert patient.publisher.holds(0)


async def test_a_receiver_that_did_nothing_wrong_is_sent_the_weights_again_at_once(patient: Publishing) -> None:
    await three(patient)
    patient.twins[1].engine.fault = Fault("probe", Kind.BREAK)
    patient.actor.step = 1
    await patient.publisher.publish(1)
    assert serving(patient) == ["rollout-0", "rollout-1", "rollout-2"]
    assert patient.publisher.policy_version == 2


async def test_one_that_cannot_reach_the_actor_costs_the_others_one_attempt(
    store: StoreUnderTest, tmp_path: Path
) -> None:
    async with publishing_run(store, PATIENT, tmp_path) as rig:
        await three(rig)
        outside = await rig.rollout("rollout-3")

        async def join(place: MeetingPlace) -> None:
            raise ChannelUnreachableError(f"nobody answers at the rendezvous of weight-channel epoch {place.epoch}")

        outside.engine.join = join  # type: ignore[method-assign]
        rig.actor.step = 1
        await rig.publisher.publish(1)
        assert serving(rig) == ["rollout-0", "rollout-1", "rollout-2"]


async def test_one_whose_commits_hang_in_the_store_costs_the_others_one_attempt(
    store: StoreUnderTest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.rollout.gate.SHUT_TIMEOUT_S", 1.0)
    async with publishing_run(store, PATIENT | {"weights": {"bucket_timeout_s": 30.0}}, tmp_path) as rig:
        await three(rig)
        rig.actor.step = 1
        async with rig.twins[1].replica.gate.leaving():
            await rig.publisher.publish(1)
        assert serving(rig) == ["rollout-0", "rollout-2"]
        assert rig.publisher.policy_version == 2


@pytest.mark.parametrize("fault", [Fault("probe", Kind.HANG), Fault("receive", Kind.HANG)], ids=["late", "stuck"])
async def test_a_receiver_that_fails_costs_the_others_nothing_of_what_they_keep(
    store: StoreUnderTest, tmp_path: Path, fault: Fault
) -> None:
    async with publishing_run(store, PATIENT | {"weights": {"bucket_timeout_s": 3.0}}, tmp_path) as rig:
        rig.keep_timeout_s = keep_timeout_s(rig.settings.weights)
        await three(rig)
        for twin in rig.twins:
            twin.engine.hold = True
        await rig.admit(6)
        await until(lambda: all(twin.engine.num_running == 4 for twin in rig.twins))
        rig.twins[2].engine.fault = fault
        rig.actor.step = 1
        await rig.publisher.publish(1)
        assert "rollout-2" not in serving(rig)
        assert all(PauseMode.ABORT not in twin.engine.pauses for twin in rig.twins)


async def test_a_fleet_that_is_slow_to_go_on_is_waited_for(store: StoreUnderTest, tmp_path: Path) -> None:
    async with publishing_run(store, PATIENT | {"weights": {"bucket_timeout_s": 30.0}}, tmp_path) as rig:
        for i in range(2):
            twin = await rig.rollout(f"rollout-{i}")
            twin.engine.fault, twin.engine.late_s = Fault("resume", Kind.LATE), ANSWER_S + 1.0
        await rig.publisher.publish(0)
        assert serving(rig) == ["rollout-0", "rollout-1"]
        assert rig.publisher.policy_version == 0


async def test_nobody_serves_weights_that_the_store_did_not_attest(store: StoreUnderTest, tmp_path: Path) -> None:
    async with publishing_run(store, PATIENT | {"weights": {"bucket_timeout_s": 30.0}}, tmp_path) as rig:
        await three(rig)
        late = rig.twins[0].engine
        late.fault = Fault("probe", Kind.HANG)
        publishing = asyncio.create_task(rig.publisher.publish(0))
        await until(lambda: late.frozen)
        await asyncio.to_thread(store.ledger.begin_publish, 9, 0)  # so that the store refuses to attest this version
        late.frozen = False
        with pytest.raises(StaleVersionError, match="begun"):
            await publishing
        assert serving(rig) == []
        assert [twin.replica.held.state for twin in rig.twins] == [State.LOADED] * 3


async def test_a_rollout_that_hangs_is_given_up_and_its_process_told_to_end(rig: Publishing) -> None:
    await three(rig)
    hung = rig.twins[2]
    hung.engine.fault = Fault("bucket", Kind.HANG)
    await rig.publisher.publish(0)
    await until(lambda: not hung.is_alive)
    assert rig.fleet.is_lost("rollout-2").startswith("hung: no progress for")
    await rig.rollout("rollout-2")
    assert rig.fleet.is_lost("rollout-2") == ""
    await rig.publisher.publish(0)
    assert serving(rig) == ["rollout-0", "rollout-1", "rollout-2"]


async def test_a_stopped_rollout_that_wakes_up_joins_again_and_claims_nothing_before_its_next_weights(
    rig: Publishing,
) -> None:
    await three(rig)
    stopped = rig.twins[0]
    stopped.engine.is_stopped = True
    await until(lambda: rig.fleet.is_lost("rollout-0"))
    stopped.wake()
    await until(lambda: not rig.fleet.is_lost("rollout-0"))
    assert not rig.publisher.holds(0)
    with pytest.raises(NotAttestedError):
        await asyncio.to_thread(rig.store.worker(stopped.consumer).claim, 1)
    await rig.publisher.publish(0)
    assert rig.publisher.holds(0)


async def test_a_publish_waits_for_a_rollout_when_all_have_died(rig: Publishing) -> None:
    await three(rig)
    for twin in rig.twins:
        twin.engine.fault = Fault("bucket", Kind.DIE)
    publishing = asyncio.create_task(rig.publisher.publish(0))
    await asyncio.sleep(2 * LEASE_S)
    assert not publishing.done()
    await rig.rollout("rollout-0")
    async with asyncio.timeout(SOON_S):
        await publishing
    assert serving(rig) == ["rollout-0"]


async def test_a_publish_that_is_cancelled_frees_everyone_and_the_next_succeeds(rig: Publishing) -> None:
    await three(rig)
    rig.twins[0].engine.fault = Fault("bucket", Kind.LATE)
    publishing = asyncio.create_task(rig.publisher.publish(0))
    await until(lambda: not rig.twins[0].engine.fault)
    publishing.cancel()
    async with asyncio.timeout(SOON_S):
        with pytest.raises(asyncio.CancelledError):
            await publishing
        await until(lambda: rig.actor.aborted)
    assert serving(rig) == []
    await rig.publisher.publish(0)
    assert set(serving(rig)) >= {"rollout-1", "rollout-2"}


@pytest.mark.parametrize("phase", ["open", "publish"])
async def test_the_actors_own_failure_is_raised_and_the_next_publish_succeeds(patient: Publishing, phase: str) -> None:
    await three(patient)
    await patient.rollout("rollout-3")
    patient.actor.failures[phase] = gone("the actor")
    with pytest.raises(UnavailableError, match="the actor cannot be reached"):
        await patient.publisher.publish(0)
    assert serving(patient) == []
    await patient.publisher.publish(0)
    assert len(serving(patient)) == 4


async def test_a_publish_that_nobody_ever_takes_ends_in_an_error_that_says_why(rig: Publishing) -> None:
    await rig.rollout("rollout-0")
    engine = rig.twins[0].engine

    async def always_false() -> None:
        while True:
            engine.fault = engine.fault or Fault("bucket", Kind.LIE)
            await asyncio.sleep(0.001)

    lying = asyncio.create_task(always_false())
    with pytest.raises(
        WorkerLostError, match=r"no rollout took the weights of step 0: rollout-0.0: .*the engine computes with others"
    ):
        await rig.publisher.publish(0)
    lying.cancel()


async def test_a_publish_waits_for_rollouts_until_the_run_is_to_end_and_reaches_those_that_live_then(
    patient: Publishing,
) -> None:
    is_ending = False
    publishing = asyncio.create_task(patient.publisher.publish(0, lambda: is_ending))
    assert not (await asyncio.wait([publishing], timeout=0.5))[0]
    is_ending = True
    async with asyncio.timeout(30.0):
        await publishing
    assert patient.publisher.published_step == -1
    await patient.rollout("rollout-0")
    await patient.publisher.publish(0, lambda: is_ending)
    assert serving(patient) == ["rollout-0"]


async def test_a_publish_without_rollouts_says_so_after_the_stall_timeout(
    store: StoreUnderTest, tmp_path: Path
) -> None:
    async with publishing_run(store, {"controller": {"lease_s": LEASE_S, "stall_timeout_s": 0.3}}, tmp_path) as rig:
        with pytest.raises(DeadlineError, match="0 of 1 rollouts joined"):
            await rig.publisher.publish(0)


@pytest.mark.parametrize(
    ("stall_s", "ended_by"), [(2.0, "controller.stall_timeout_s"), (60.0, "weights.publish_timeout_s")]
)
async def test_a_publish_that_takes_too_long_names_the_setting_that_ended_it(
    store: StoreUnderTest, tmp_path: Path, stall_s: float, ended_by: str
) -> None:
    tree = {
        "controller": PATIENT["controller"] | {"stall_timeout_s": stall_s},
        "rollout": PATIENT["rollout"],
        "weights": {"bucket_timeout_s": 30.0, "publish_timeout_s": 4.0},
    }
    async with publishing_run(store, tree, tmp_path) as rig:
        await rig.rollout("rollout-0")
        await rig.publisher.publish(0)
        async with rig.twins[0].replica.gate.leaving():
            with pytest.raises(DeadlineError, match=f"rollout-0.* took longer than {ended_by}"):
                await rig.publisher.publish(0)


async def test_a_trainer_that_dies_ends_the_publish(rig: Publishing) -> None:
    await three(rig)
    rig.twins[0].engine.fault = Fault("bucket", Kind.LATE)
    losing = asyncio.create_task(rig.fleet.trainer_lost())
    join_actor(rig, "1")
    publishing = asyncio.create_task(rig.publisher.publish(0))
    await asyncio.sleep(0.1)
    join_actor(rig, "2")
    with pytest.raises(WorkerLostError, match=r"actor.1 is lost: replaced by actor.2"):
        await publishing
    with pytest.raises(WorkerLostError, match=r"actor.1 is lost"):
        await losing


def join_actor(rig: Publishing, incarnation: str) -> None:
    """Another start of the actor."""
    join = rig.twins[0].join
    other = type(join)()
    other.CopyFrom(join)
    other.role, other.worker, other.incarnation, other.num_weight_ranks = (
        controller_pb2.ROLE_ACTOR,
        "actor",
        incarnation,
        0,
    )
    rig.fleet.join(other)


@pytest.mark.parametrize("replica", [Replica, RogueReplica])
async def test_the_checker_sees_an_engine_that_serves_torn_weights_by_itself(
    store: StoreUnderTest, tmp_path: Path, replica: type[Replica]
) -> None:
    async with publishing_run(store, {}, tmp_path) as rig:
        rig.replica = replica
        await three(rig)
        torn = rig.twins[0].engine
        for twin in rig.twins:
            twin.engine.hold = True
        await rig.admit(6)
        await until(lambda: all(twin.engine.num_running >= 4 for twin in rig.twins))
        rig.actor.step = 1
        torn.fault = Fault("bucket", Kind.FAIL)
        await rig.publisher.publish(1)
        assert torn.buckets != rig.twins[1].engine.buckets
        for twin in rig.twins:
            twin.engine.hold = False
        await rig.committed(6)
        found = rig.violations()
        assert bool(found) is (replica is RogueReplica)
        assert all("weights" in problem for problem in found)
