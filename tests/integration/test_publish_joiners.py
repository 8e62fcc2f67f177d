"""Rollouts that join between two publishes get the weights that the others serve, who notice nothing of it."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from rolecall.errors import NotAttestedError, RoleCallError, WeightsMismatchError
from rolecall.store.position import RunPosition
from services.controller.publish.joiners import Joiners
from services.controller.publish.receivers import AttemptFailed
from services.rollout.scripted import ScriptedEngine
from tests.fixtures_store import StoreUnderTest
from tests.twins.collective import PHASES, Fault, Kind
from tests.twins.publishing import HEARTBEAT_S, Publishing, RolloutProcess, at_the_start, gone, publishing_run
from tests.twins.run import LightRun, balance, check_trained_once
from tests.waiting import until

SOON_S = 14.0
"""Less than weights.publish_timeout_s."""


@pytest.fixture
async def rig(store: StoreUnderTest, tmp_path: Path) -> AsyncIterator[Publishing]:
    weights = {"bucket_timeout_s": 30.0, "publish_timeout_s": 60.0}
    async with publishing_run(store, {"weights": weights}, tmp_path) as running:
        yield running


@pytest.fixture
async def brief_rig(store: StoreUnderTest, tmp_path: Path) -> AsyncIterator[Publishing]:
    """One in which who is late is not waited for."""
    async with publishing_run(store, {}, tmp_path) as running:
        yield running


async def two_and_a_joiner(rig: Publishing) -> RolloutProcess:
    """Two rollouts that serve version 0, with requests that do not end, and the third, which came after it."""
    for i in range(2):
        twin = await rig.rollout(f"rollout-{i}")
        twin.engine.hold = True
    await rig.publisher.publish(0)
    await rig.admit(4)
    await until(lambda: all(twin.engine.num_running == 4 for twin in rig.twins))
    return await rig.rollout("rollout-2")


def others_go_on(rig: Publishing) -> bool:
    """Whether the first two serve version 0 and still have all that they had begun."""
    return all(
        twin.replica.gate.is_open and twin.replica.held.policy_version == 0 and twin.engine.num_running == 4
        for twin in rig.twins[:2]
    )


async def test_a_joiner_serves_the_version_that_stands_and_the_next_publish_takes_everyone_in(rig: Publishing) -> None:
    joiner = await two_and_a_joiner(rig)
    assert [rollout.consumer for rollout in rig.publisher.joiners()] == [joiner.consumer]
    with pytest.raises(NotAttestedError):
        await asyncio.to_thread(rig.store.worker(joiner.consumer).claim, 1)
    metrics = (await rig.publisher.catch_up(rig.publisher.joiners())).values()
    assert metrics["publish/caught_up"] == 1
    assert (rig.publisher.policy_version, rig.publisher.joiners()) == (0, [])
    assert joiner.replica.gate.is_open
    assert others_go_on(rig)
    await rig.admit(2)
    await rig.committed(2)  # by the joiner: the others' requests do not end
    for twin in rig.twins:
        twin.engine.hold = False
    rig.actor.step = 1
    await rig.publisher.publish(1)
    assert rig.publisher.holds(1)
    await rig.publisher.publish(1)
    assert len(rig.collective.meetings) == 3  # the first, the joiner's, and one of all three for both publishes
    await rig.committed(6)
    assert rig.violations() == []


@pytest.mark.parametrize("kind", [Kind.DIE, Kind.HANG, Kind.FAIL, Kind.BREAK, Kind.LIE], ids=lambda kind: kind.value)
@pytest.mark.parametrize("phase", PHASES)
async def test_a_joiner_that_fails_in_any_phase_disturbs_nobody_and_is_asked_again_by_the_next_publish(
    brief_rig: Publishing, phase: str, kind: Kind
) -> None:
    joiner = await two_and_a_joiner(brief_rig)
    joiner.engine.fault = Fault(phase, kind)
    async with asyncio.timeout(SOON_S):
        try:
            await brief_rig.publisher.catch_up(brief_rig.publisher.joiners())
        except (AttemptFailed, RoleCallError):
            assert not joiner.replica.gate.is_open
        else:
            # weights that it receives afterwards are right, and after the probe nobody looks
            assert kind is Kind.LIE
            assert phase in ("join", "receive", "resume")
            assert phase != "resume" or joiner.replica.gate.is_open
    assert others_go_on(brief_rig)
    for twin in brief_rig.twins:
        twin.engine.hold = False
    await brief_rig.committed(4)
    await until(lambda: not joiner.is_alive or not joiner.engine.frozen)
    brief_rig.actor.step = 1
    await brief_rig.publisher.publish(1)
    assert joiner.replica.gate.is_open or not joiner.is_alive or kind is Kind.LIE


async def test_a_joiner_that_is_gone_again_costs_the_next_publish_no_attempt(rig: Publishing) -> None:
    joiner = await two_and_a_joiner(rig)
    await rig.publisher.catch_up(rig.publisher.joiners())
    await joiner.kill()
    await until(lambda: bool(rig.fleet.is_lost("rollout-2")))
    await rig.publisher.publish(0)
    assert rig.publisher.policy_version == 1


async def test_a_joiner_that_cannot_meet_costs_the_others_an_attempt_and_not_the_version(rig: Publishing) -> None:
    joiner = await two_and_a_joiner(rig)
    doomed = await rig.rollout("rollout-3")
    doomed.engine.fault = Fault("join", Kind.FAIL)
    with pytest.raises(AttemptFailed):
        await rig.publisher.catch_up(rig.publisher.joiners())
    assert [rollout.consumer for rollout in rig.publisher.joiners()] == [joiner.consumer]
    await rig.publisher.catch_up(rig.publisher.joiners())
    assert joiner.replica.gate.is_open


async def test_a_joiner_that_has_begun_nothing_is_asked_again_whatever_ended_the_attempt(
    store: StoreUnderTest, tmp_path: Path
) -> None:
    patient = {"controller": {"lease_s": 30.0, "stall_timeout_s": 60.0}, "rollout": {"hang_s": 60.0}}
    async with publishing_run(store, patient | {"weights": {"bucket_timeout_s": 10.0}}, tmp_path) as rig:
        joiner = await two_and_a_joiner(rig)
        joiner.engine.fault = Fault("join", Kind.HANG)
        rig.actor.failures["open"] = gone("the actor")
        joiners = Joiners(rig.publisher, HEARTBEAT_S)
        joiners.serve()
        await until(lambda: joiner.engine.frozen)  # by the attempt after the actor's failure
        await joiners.stop()  # a checkpoint is due
        joiner.wake()
        joiners.serve()
        await until(lambda: joiner.replica.gate.is_open)
        await joiners.stop()
        assert others_go_on(rig)


async def test_two_joiners_of_which_one_fails(rig: Publishing) -> None:
    first = await two_and_a_joiner(rig)
    second = await rig.rollout("rollout-3")
    second.engine.fault = Fault("bucket", Kind.LIE)
    metrics = (await rig.publisher.catch_up(rig.publisher.joiners())).values()
    assert metrics["publish/caught_up"] == 1
    assert (first.replica.gate.is_open, second.replica.gate.is_open) == (True, False)
    assert others_go_on(rig)


async def test_weights_that_are_no_longer_those_of_the_version_are_not_attested(rig: Publishing) -> None:
    joiner = await two_and_a_joiner(rig)
    rig.actor.false_buckets = ["other", "weights", "than", "those"]
    with pytest.raises(WeightsMismatchError, match="was attested as"):
        await rig.publisher.catch_up(rig.publisher.joiners())
    assert not joiner.replica.gate.is_open
    with pytest.raises(NotAttestedError):
        await asyncio.to_thread(rig.store.worker(joiner.consumer).claim, 1)
    assert others_go_on(rig)


async def test_nobody_is_caught_up_with_where_nobody_serves(rig: Publishing) -> None:
    await rig.rollout("rollout-0")
    await rig.publisher.publish(0)
    await rig.twins[0].kill()
    await until(lambda: rig.fleet.is_lost("rollout-0"))
    await rig.rollout("rollout-1")
    assert rig.publisher.joiners() == []


async def test_whoever_serves_is_no_joiner_to_the_next_life_of_the_loop(rig: Publishing) -> None:
    joiner = await two_and_a_joiner(rig)
    recovered = replace(at_the_start(rig.store.ledger.ctl), policy_version=0, position=RunPosition(published_step=0))
    next_life = rig.publisher_from(recovered)
    assert [rollout.consumer for rollout in next_life.joiners()] == [joiner.consumer]


async def test_joiners_are_served_until_the_next_step_which_waits_for_none_of_them(rig: Publishing) -> None:
    joiner = await two_and_a_joiner(rig)
    joiners = Joiners(rig.publisher, HEARTBEAT_S)
    joiners.serve()
    await until(lambda: joiner.replica.gate.is_open)
    late = await rig.rollout("rollout-3")
    late.engine.fault = Fault("bucket", Kind.HANG)
    await until(lambda: late.engine.frozen)
    async with asyncio.timeout(SOON_S):
        await joiners.stop()
    await until(lambda: bool(rig.actor.aborted))
    assert joiners.take_metrics().values()["publish/caught_up"] == 1
    assert joiners.take_metrics().values() == {}
    another = await rig.rollout("rollout-4")
    await asyncio.sleep(2 * HEARTBEAT_S)
    assert not another.replica.gate.is_open
    assert others_go_on(rig)


async def test_a_joiner_that_failed_is_not_asked_again_before_the_next_publish(rig: Publishing) -> None:
    joiner = await two_and_a_joiner(rig)
    rig.actor.failures["publish"] = gone("the actor")
    joiners = Joiners(rig.publisher, HEARTBEAT_S)
    joiners.serve()
    await until(lambda: not rig.actor.failures)
    meetings = len(rig.collective.meetings)
    await asyncio.sleep(3 * HEARTBEAT_S)
    assert len(rig.collective.meetings) == meetings
    assert not joiner.replica.gate.is_open
    await joiners.stop()


async def test_a_rollout_that_joins_while_a_batch_is_sampled_samples_for_that_batch(
    light_run: LightRun,
) -> None:
    algorithm = {"groups_per_batch": 12, "max_staleness": 0}
    async with light_run(algorithm=algorithm, run={"num_steps": 2}) as run, run.controller() as life:
        async with run.rollout("rollout-0", token_s=0.05):
            await life.shows(lambda status: status.ledger.generating)
            async with run.rollout("rollout-1"):
                await life.ends()
    assert balance(run) == (24, 24, 0, 0)
    check_trained_once(run.actor.trainer, 48)
    # version 0 went out once more, for the joiner alone, and no further version was made for it
    assert run.actor.trainer.publishes == [(0, 0), (1, 1), (2, 2)]
    assert run.metrics()[0]["publish/caught_up"] == 1


async def test_a_rollout_that_joins_after_a_checkpoint_found_no_room_is_served(light_run: LightRun) -> None:
    running, engine, tried = asyncio.get_running_loop(), ScriptedEngine(vocab_size=200), asyncio.Event()

    def note(phase: str) -> None:
        engine.hold = True  # the batch after the first does not end
        if phase == "save:start":
            running.call_soon_threadsafe(tried.set)

    sections = {
        "run": {"num_steps": 3, "checkpoint_every_steps": 1},
        "algorithm": {"groups_per_batch": 4, "max_staleness": 0},
        "controller": {"lease_s": 30.0, "stall_timeout_s": 60.0},
    }
    async with light_run(**sections) as run, run.controller() as life:
        run.actor.trainer.at, run.actor.trainer.disk_is_full = note, True
        async with run.rollout("rollout-0", engine=engine):
            await tried.wait()
            await life.shows(lambda status: status.waiting_for.startswith("groups"))
            async with run.rollout("rollout-1"):
                served = await life.shows(
                    lambda status: (
                        [worker.policy_version for worker in status.workers if "rollout" in worker.worker]
                        == [status.policy_version] * 2
                    )
                )
    assert served.step == 1


async def test_nothing_is_sent_to_joiners_while_a_step_trains(light_run: LightRun) -> None:
    running, served = asyncio.get_running_loop(), dict[str, bool]()
    async with light_run(run={"num_steps": 2}) as run:

        def note(phase: str) -> None:
            served[phase] = any(task.get_name() == "joiners" for task in asyncio.all_tasks(running))

        run.actor.trainer.at = note
        await run.to_the_end("rollout-0")
    assert served["train:start"] is served["train:applied"] is False
    assert served["save:start"] is False
