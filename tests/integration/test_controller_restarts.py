"""Controllers, trainers and stores that start over in the middle of a run: it goes on where it stood, and nothing is
trained or scored twice.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rolecall.checkpoint.storage import open_storage
from rolecall.errors import BudgetSpentError, InvalidInputError, StoreRolledBackError, WorkerLostError
from rolecall.scoring.scores import Item
from rolecall.settings import RunSettings
from rolecall.store.ledger import Ledger
from rolecall.store.position import GroupState, RunPosition
from rolecall.v1 import controller_pb2 as pb
from rolecall.v1.controller_pb2_grpc import ControllerServiceStub
from services.controller.durable.run_point import Checkpoints
from tests.fixtures_store import StoreUnderTest
from tests.twins.run import TwinRun, balance, check_trained_once, parity, saved, twin_run

MakeSettings = Callable[..., RunSettings]
RUN_S = 60.0
"""Deadline of one light run, which takes a second or two on a quiet machine."""


async def test_a_controller_that_starts_again_goes_on_where_the_last_one_stopped(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with (
        twin_run(store, tmp_path, make_settings, run={"num_steps": 6}) as run,
        run.rollout("rollout-0", token_s=0.005),
    ):
        for stop_at in (1, 2, 4):
            async with run.controller() as (stub, running):
                while (await stub.GetRun(pb.GetRunRequest())).status.step < stop_at:
                    assert not running.done(), running.exception()
                    await asyncio.sleep(0.01)
        async with run.controller() as (_, running):
            await asyncio.wait_for(running, RUN_S)
    assert balance(run) == (24, 24, 0, 0)
    check_trained_once(run.actor.trainer, 48)
    versions = [version for _, version in run.actor.trainer.publishes]
    assert versions == sorted(set(versions))


@pytest.mark.parametrize(
    "changed",
    [
        {"advantage": {"kind": "rloo"}, "entropy": {"entropy_coef": 0.1}},
        {"advantage": {"kind": "remax"}},
        {"advantage": {"kind": "optimal_token_baseline"}},
        {"filters": {"without_signal": True}},
    ],
    ids=["another estimator", "greedy responses", "the actor's columns", "a filter"],
)
async def test_a_batch_that_was_sealed_is_trained_as_it_is_also_under_other_settings(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings, changed: dict[str, Any]
) -> None:
    async with twin_run(store, tmp_path, make_settings) as run, run.rollout("rollout-0"):
        run.actor.trainer.failures.append(InvalidInputError("the run ends with its first batch sealed"))
        async with run.controller() as (_, running):
            with pytest.raises(InvalidInputError):
                await asyncio.wait_for(running, RUN_S)
        sealed = Ledger(store.connection, store.run).sealed(0)
        tree = run.settings.model_dump(exclude_defaults=True)
        run.settings = run.settings.model_copy(
            update={"algorithm": make_settings(**{**tree, "algorithm": {"groups_per_batch": 4, **changed}}).algorithm}
        )
        async with run.controller() as (_, running):
            await asyncio.wait_for(running, RUN_S)
    assert sealed is not None
    assert run.actor.trainer.records[0].digest == sealed.digest
    assert run.actor.trainer.trained[:8] == [ref.id for ref in sealed.rows]
    assert len(run.actor.trainer.records) == 3


@pytest.mark.parametrize(("old", "new"), [(2, 0), (2, 1)])
async def test_a_run_goes_on_with_a_lower_max_staleness(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings, old: int, new: int
) -> None:
    algorithm = {"groups_per_batch": 4, "max_staleness": old}
    async with (
        twin_run(store, tmp_path, make_settings, algorithm=algorithm, run={"num_steps": 6}) as run,
        run.rollout("rollout-0"),
    ):
        run.actor.trainer.failures.append(InvalidInputError("the run ends with its first batch sealed"))
        async with run.controller() as (_, running):
            with pytest.raises(InvalidInputError):
                await asyncio.wait_for(running, RUN_S)
        assert balance(run)[3] == 4 * (old + 1)
        run.settings = run.settings.model_copy(
            update={"algorithm": run.settings.algorithm.model_copy(update={"max_staleness": new})}
        )
        async with run.controller() as (_, running):
            await asyncio.wait_for(running, RUN_S)
    assert balance(run) == (24, 24, 0, 0)
    staleness = [line["staleness/max"] for line in run.metrics()]
    assert max(staleness) <= old
    assert max(staleness[old + 1 :]) <= new


async def test_groups_that_the_actor_was_asked_about_are_in_the_batch_also_when_older_ones_have_come_since(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    algorithm = {"groups_per_batch": 4, "max_staleness": 1, "advantage": {"kind": "optimal_token_baseline"}}
    async with twin_run(store, tmp_path, make_settings, algorithm=algorithm) as run, run.rollout("rollout-0"):
        run.actor.trainer.column_failures.append(InvalidInputError("the run ends when the actor's columns are written"))
        async with run.controller() as (_, running):
            with pytest.raises(InvalidInputError):
                await asyncio.wait_for(running, RUN_S)
        ledger = Ledger(store.connection, store.run)
        asked = ledger.begun(0)
        assert (len(asked), ledger.sealed(0)) == (4, None)
        async with asyncio.timeout(RUN_S):
            while list(ledger.live().values()).count(GroupState.COMMITTED) < 8:
                await asyncio.sleep(0.02)
        others = sorted(set(range(8)) - set(asked))
        # as when these had landed first
        store.connection.command("HSET", f"{{rl:{store.run}}}:batch:0", "begun", " ".join(map(str, others)))
        async with run.controller() as (_, running):
            await asyncio.wait_for(running, RUN_S)
    trained = [int(id.partition("/")[0]) for id in run.actor.trainer.trained[:16:2]]
    assert (trained[:4], sorted(trained[4:])) == (others, sorted(asked))
    assert [step for step, _ in run.actor.trainer.columns_asked] == [0, 0, 1, 2]


async def test_a_trainer_that_lost_its_steps_loads_the_checkpoint_and_applies_the_same_batches_again(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with twin_run(store, tmp_path, make_settings, run={"num_steps": 5}) as run, run.rollout("rollout-0"):
        async with run.controller() as (stub, _):
            while (await stub.GetRun(pb.GetRunRequest())).status.step < 3:
                await asyncio.sleep(0.01)
        before = list(run.actor.trainer.trained)
        run.actor.restart()
        async with run.controller() as (_, running):
            await asyncio.wait_for(running, RUN_S)
    assert run.actor.trainer.trained[: len(before)] == before
    check_trained_once(run.actor.trainer, 40)
    assert balance(run) == (20, 20, 0, 0)


async def test_trainers_that_restart_under_a_living_controller_are_brought_back_and_nothing_is_sampled_again(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    gae = {"groups_per_batch": 4, "advantage": {"kind": "gae"}}
    async with twin_run(
        store, tmp_path, make_settings, algorithm=gae, run={"num_steps": 6, "checkpoint_every_steps": 3}
    ) as run:
        async with run.controller() as (stub, running), run.rollout("rollout-0", token_s=0.002):
            for step, role in ((2, run.actor), (4, run.critic)):
                while (await stub.GetRun(pb.GetRunRequest())).status.step < step:
                    assert not running.done(), running.exception()
                    await asyncio.sleep(0.01)
                role.restart()
            await asyncio.wait_for(running, RUN_S)
            status = (await stub.GetRun(pb.GetRunRequest())).status
    assert 1 <= status.num_recoveries <= 4
    assert status.last_failure
    assert balance(run) == (24, 24, 0, 0)
    check_trained_once(run.actor.trainer, 48)
    assert run.critic.trainer.trained == run.actor.trainer.trained


async def test_a_trainer_that_fails_again_and_again_ends_the_run_and_is_named(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with twin_run(store, tmp_path, make_settings, controller={"max_recoveries": 3}) as run:
        run.actor.trainer.failures.extend([WorkerLostError("rank 1 of the actor is gone")] * 10)
        async with run.controller() as (_, running), run.rollout("rollout-0"):
            with pytest.raises(
                BudgetSpentError, match=r"controller.max_recoveries; the last: .*rank 1 of the actor is gone"
            ):
                await asyncio.wait_for(running, RUN_S)
    assert len(run.actor.trainer.failures) == 6


async def at_rest(run: TwinRun, stub: ControllerServiceStub) -> bool:
    """Whether all that was admitted is sampled, scored and as far trained as whole batches allow."""
    ledger = (await stub.GetRun(pb.GetRunRequest())).status.ledger
    refs = [
        ref
        for _, group in Ledger(run.store.connection, run.store.run).read_committed("0", 256, 0.0)
        for ref in group.rows
    ]
    scored = all("reward" in row for row in run.store.rows.read(refs, [], ["reward"]))
    return (ledger.queued, ledger.generating) == (0, 0) and scored and ledger.live < 4


async def test_a_group_is_scored_once_however_often_the_controller_starts(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    asked: Counter[str] = Counter()

    def count(item: Item) -> float:
        asked[item.id] += 1
        return asked[item.id] * 0.25 + parity(item) / 2

    async with twin_run(
        store,
        tmp_path,
        make_settings,
        score=count,
        run={"num_steps": 4},
        algorithm={"groups_per_batch": 4, "max_staleness": 1},
    ) as run:
        async with run.rollout("rollout-0", token_s=0.02):
            for stop_at in (2, 5, 9):
                async with run.controller() as (stub, _):
                    await stub.ResumeRun(pb.ResumeRunRequest())
                    while sum(asked.values()) < 2 * stop_at:
                        await asyncio.sleep(0.01)
                    await stub.PauseRun(pb.PauseRunRequest())
                    while not await at_rest(run, stub):
                        await asyncio.sleep(0.05)
            async with run.controller() as (stub, running):
                await stub.ResumeRun(pb.ResumeRunRequest())
                await asyncio.wait_for(running, RUN_S)
    assert set(asked.values()) == {1}
    assert balance(run) == (16, 16, 0, 0)


async def test_a_stop_without_any_rollout_left_does_not_wait_for_the_batch(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with (
        twin_run(store, tmp_path, make_settings, run={"num_steps": 1000}) as run,
        run.controller() as (stub, running),
    ):
        async with run.rollout("rollout-0", token_s=0.02):
            while (await stub.GetRun(pb.GetRunRequest())).status.step < 1:
                await asyncio.sleep(0.01)
        while "none is alive" not in (await stub.GetRun(pb.GetRunRequest())).status.waiting_for:
            await asyncio.sleep(0.05)
        await stub.StopRun(pb.StopRunRequest(checkpoint=True))
        await asyncio.wait_for(running, RUN_S)
    latest = Checkpoints(open_storage(run.settings.run.checkpoints), 2).latest()
    assert latest is not None
    assert latest[1].step == Ledger(store.connection, store.run).position().step


async def test_a_lost_store_takes_the_run_back_to_its_checkpoint_in_a_new_lineage(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with twin_run(store, tmp_path, make_settings, run={"num_steps": 4}) as run:
        async with run.rollout("rollout-0"), run.controller() as (stub, _):
            while (await stub.GetRun(pb.GetRunRequest())).status.step < 3:
                await asyncio.sleep(0.01)
        for key in store.connection.ledger.scan_iter(f"{{rl:{store.run}*"):
            store.connection.ledger.delete(key)
        run.actor.restart()
        async with run.rollout("rollout-0"), run.controller() as (_, running):
            await asyncio.wait_for(running, RUN_S)
    assert Ledger(store.connection, store.run).position().lineage == 1
    assert balance(run) == (16, 16, 0, 0)
    assert len(run.actor.trainer.trained) == 32


async def test_a_store_that_is_emptied_under_the_run_ends_it_with_the_cause_and_the_remedy(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with (
        twin_run(store, tmp_path, make_settings, run={"num_steps": 100_000}) as run,
        run.rollout("rollout-0"),
        run.controller() as (stub, running),
    ):
        while (await stub.GetRun(pb.GetRunRequest())).status.step < 1:
            await asyncio.sleep(0.01)
        keys = list(store.connection.ledger.scan_iter(f"{{rl:{store.run}}}:*"))
        store.connection.command("DEL", *keys)
        with pytest.raises(
            StoreRolledBackError, match=r"the store was emptied: .*FLUSHALL.*--resume from the last checkpoint"
        ):
            await asyncio.wait_for(running, RUN_S)


async def test_roles_that_outlived_the_store_obey_the_controller_of_the_new_lineage(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with (
        twin_run(store, tmp_path, make_settings, run={"num_steps": 6}) as run,
        run.rollout("rollout-0", token_s=0.005),
    ):
        for stop_at in (1, 2, 4):
            async with run.controller() as (stub, running):
                while (await stub.GetRun(pb.GetRunRequest())).status.step < stop_at:
                    assert not running.done(), running.exception()
                    await asyncio.sleep(0.01)
        for key in store.connection.ledger.scan_iter(f"{{rl:{store.run}*"):
            store.connection.ledger.delete(key)
        run.actor.restart()
        async with run.controller() as (_, running):
            await asyncio.wait_for(running, RUN_S)
    position = Ledger(store.connection, store.run).position()
    assert position.lineage == 1
    assert position.ctl > 1_000_000
    assert balance(run) == (24, 24, 0, 0)


async def test_prompts_that_a_lineage_has_yet_to_admit_are_in_its_first_checkpoint(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with twin_run(
        store, tmp_path, make_settings, run={"num_steps": 4}, algorithm={"groups_per_batch": 4, "max_staleness": 1}
    ) as run:
        checkpoints = Checkpoints(open_storage(run.settings.run.checkpoints), 2)
        async with run.rollout("rollout-0", token_s=0.01), run.controller():
            while checkpoints.latest() is None:
                await asyncio.sleep(0.01)
        before = checkpoints.latest()
        assert before is not None
        assert before[1].untrained
        for key in store.connection.ledger.scan_iter(f"{{rl:{store.run}*"):
            store.connection.ledger.delete(key)
        async with run.controller() as (stub, running):
            request = asyncio.ensure_future(saved(stub))
            await asyncio.sleep(0.2)  # it is asked before anything can be admitted: there is no rollout yet
            async with run.rollout("rollout-0", token_s=0.01):
                await request
                after = checkpoints.latest()
                assert after is not None
                assert (after[1].lineage, after[1].step) == (1, before[1].step)
                assert (after[1].untrained, after[1].waiting) == ([], before[1].untrained)
                await asyncio.wait_for(running, RUN_S)
    assert balance(run)[1] == 16


async def test_a_lineage_that_was_begun_before_the_trainers_were_set_back_is_begun_once(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with twin_run(store, tmp_path, make_settings, run={"num_steps": 4}) as run:
        async with run.rollout("rollout-0"), run.controller() as (stub, _):
            while (await stub.GetRun(pb.GetRunRequest())).status.step < 3:
                await asyncio.sleep(0.01)
        latest = Checkpoints(open_storage(run.settings.run.checkpoints), 2).latest()
        assert latest is not None
        point = latest[1]
        for key in store.connection.ledger.scan_iter(f"{{rl:{store.run}*"):
            store.connection.ledger.delete(key)
        ledger = Ledger(store.connection, store.run)
        ledger.lock(0.1)
        ledger.start_lineage(
            RunPosition(
                lineage=1,
                step=point.step,
                next_gid=point.next_gid,
                policy_version=point.policy_version,
                epoch=point.epoch,
                trained=point.trained,
            )
        )
        ledger.unlock()
        assert run.actor.trainer.applied.step > point.step
        async with run.rollout("rollout-0"), run.controller() as (_, running):
            await asyncio.wait_for(running, RUN_S)
    assert Ledger(store.connection, store.run).position().lineage == 1
    assert len(run.actor.trainer.trained) == 32
