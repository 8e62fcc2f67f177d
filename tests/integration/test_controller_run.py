"""Whole runs with light roles: nothing lost, nothing trained twice, staleness bounded, restarts and resumes go on, failures say what failed."""

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rolecall.contract import contract_version
from rolecall.errors import (
    BudgetSpentError,
    CheckpointMismatchError,
    GenerationError,
    InvalidInputError,
    RoleCallError,
    RunLockedError,
    UnknownWorkerError,
    VersionMismatchError,
    WorkerLostError,
)
from rolecall.scores import Item
from rolecall.settings import RunSettings
from rolecall.storage import open_storage
from rolecall.store.ledger import Ledger
from rolecall.store.position import GroupState, RunPosition
from rolecall.trajectory import seed_of
from rolecall.v1 import controller_pb2 as pb
from rolecall.v1.controller_pb2_grpc import ControllerServiceStub
from services.controller.checkpoints import Checkpoints, RunPoint
from services.controller.engine import ControllerEngine
from services.rollout.sampling import Sample, SampleRequest
from services.rollout.scripted import ScriptedEngine
from tests.fixtures_store import StoreUnderTest
from tests.light_roles import LightRun, LightTrainer, light_run, parity

MakeSettings = Callable[..., RunSettings]
RUN_S = 60.0
"""Deadline of one light run, which takes a second or two on a quiet machine."""


def balance(run: LightRun) -> tuple[int, int, int, int]:
    """admitted, trained, dropped, live, read by nobody in particular; they balance."""
    counts = Ledger(run.store.connection, run.store.run).counts()
    dropped = sum(counts.dropped.values())
    assert counts.admitted == counts.trained + dropped + counts.live
    return counts.admitted, counts.trained, dropped, counts.live


def check_trained_once(trainer: LightTrainer, num_rows: int) -> None:
    assert max(Counter(trainer.trained).values()) == 1
    assert len(trainer.trained) == num_rows


async def test_a_run_trains_every_group_once_and_ends_with_a_checkpoint(store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings) -> None:
    async with light_run(store, tmp_path, make_settings) as run, run.controller() as (stub, running), run.rollout("rollout-0"):
        states = [update.status async for update in stub.WatchRun(pb.WatchRunRequest(), timeout=RUN_S)]
        await asyncio.wait_for(running, RUN_S)
    assert (states[0].state, states[-1].state, states[-1].step) == (pb.RUN_STATE_STARTING, pb.RUN_STATE_DONE, 3)
    assert balance(run) == (12, 12, 0, 0)
    check_trained_once(run.actor.trainer, 24)
    assert run.actor.publishes == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert [line["staleness/max"] for line in run.metrics()] == [0, 0, 0]
    assert sorted(path.name for path in (run.settings.run.dir / "checkpoints").iterdir()) == ["step-00000002", "step-00000003"]
    assert store.connection.command("HLEN", f"{{rl:{store.run}}}:garbage") == 0


async def test_ppo_asks_the_critic_for_values_and_trains_it_on_the_same_batches(store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings) -> None:
    gae = {"groups_per_batch": 4, "advantage": {"kind": "gae"}}
    async with light_run(store, tmp_path, make_settings, algorithm=gae) as run, run.controller() as (_, running), run.rollout("rollout-0"):
        await asyncio.wait_for(running, RUN_S)
    assert run.critic.trainer.trained == run.actor.trainer.trained
    assert [record.digest for record in run.critic.trainer.records] == [record.digest for record in run.actor.trainer.records]


async def test_two_rollouts_one_late_keep_the_staleness_bound(store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings) -> None:
    algorithm = {"groups_per_batch": 4, "max_staleness": 1}
    async with light_run(store, tmp_path, make_settings, algorithm=algorithm, run={"num_steps": 8}) as run:
        async with run.controller() as (stub, running), run.rollout("rollout-0", token_s=0.01):
            while (await stub.GetRun(pb.GetRunRequest())).status.step < 2:
                await asyncio.sleep(0.05)
            async with run.rollout("rollout-1", token_s=0.01) as late:
                await asyncio.wait_for(running, RUN_S)
    assert late.joined, "the late rollout was never taken into an epoch"
    assert balance(run)[1] == 32
    check_trained_once(run.actor.trainer, 64)
    assert max(line["staleness/max"] for line in run.metrics()) == 1


def committers(run: LightRun) -> Counter[str]:
    """Groups committed by each rollout, as far as the history was moved to its file."""
    file = run.settings.run.dir / "history.jsonl"
    events = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return Counter(event["token"].partition(".")[0] for event in events if event["event"] == "committed")


async def test_a_fleet_of_one_grows_to_three_and_shrinks_to_one_inside_a_run(store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings) -> None:
    algorithm = {"groups_per_batch": 12, "max_staleness": 1}
    async with light_run(store, tmp_path, make_settings, algorithm=algorithm, run={"num_steps": 200, "checkpoint_every_steps": 1000}) as run:
        async with run.controller() as (stub, running), run.rollout("rollout-0", token_s=0.005):
            async with run.rollout("rollout-1", token_s=0.005), run.rollout("rollout-2", token_s=0.005):
                while set(committers(run)) != {"rollout-0", "rollout-1", "rollout-2"}:
                    assert not running.done()
                    await asyncio.sleep(0.05)
            while len([worker for worker in (await stub.GetRun(pb.GetRunRequest())).status.workers if not worker.lost]) > 1:
                await asyncio.sleep(0.05)
            step = (await stub.GetRun(pb.GetRunRequest())).status.step
            while (await stub.GetRun(pb.GetRunRequest())).status.step < step + 3:
                await asyncio.sleep(0.02)
            await stub.StopRun(pb.StopRunRequest())
            await asyncio.wait_for(running, RUN_S)
    admitted, trained, dropped, live = balance(run)
    assert (admitted, dropped) == (trained + live, 0)
    check_trained_once(run.actor.trainer, 2 * trained)


async def test_a_rollout_that_replaces_the_only_one_inside_a_step_gets_the_weights_and_the_groups(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with light_run(store, tmp_path, make_settings, run={"num_steps": 4}) as run, run.controller() as (stub, running):
        async with run.rollout("rollout-0", token_s=0.1):
            while (await stub.GetRun(pb.GetRunRequest())).status.ledger.generating == 0:
                await asyncio.sleep(0.02)
        async with run.rollout("rollout-1"):
            await asyncio.wait_for(running, RUN_S)
    assert balance(run) == (16, 16, 0, 0)
    check_trained_once(run.actor.trainer, 32)
    assert run.actor.publishes[:2] == [(0, 0), (0, 1)]


async def test_a_controller_that_starts_again_goes_on_where_the_last_one_stopped(store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings) -> None:
    async with light_run(store, tmp_path, make_settings, run={"num_steps": 6}) as run, run.rollout("rollout-0", token_s=0.005):
        for stop_at in (1, 2, 4):
            async with run.controller() as (stub, running):
                while (await stub.GetRun(pb.GetRunRequest())).status.step < stop_at:
                    assert not running.done(), running.exception()
                    await asyncio.sleep(0.01)
        async with run.controller() as (_, running):
            await asyncio.wait_for(running, RUN_S)
    assert balance(run) == (24, 24, 0, 0)
    check_trained_once(run.actor.trainer, 48)
    versions = [version for _, version in run.actor.publishes]
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
    async with light_run(store, tmp_path, make_settings) as run, run.rollout("rollout-0"):
        run.actor.trainer.failures.append(InvalidInputError("the run ends with its first batch sealed"))
        async with run.controller() as (_, running):
            with pytest.raises(InvalidInputError):
                await asyncio.wait_for(running, RUN_S)
        sealed = Ledger(store.connection, store.run).sealed(0)
        tree = run.settings.model_dump(exclude_defaults=True)
        run.settings = run.settings.model_copy(update={"algorithm": make_settings(**{**tree, "algorithm": {"groups_per_batch": 4, **changed}}).algorithm})
        async with run.controller() as (_, running):
            await asyncio.wait_for(running, RUN_S)
    assert sealed is not None
    assert run.actor.trainer.records[0].digest == sealed.digest
    assert run.actor.trainer.trained[:8] == [ref.id for ref in sealed.rows]
    assert len(run.actor.trainer.records) == 3


async def test_groups_that_the_actor_was_asked_about_are_in_the_batch_also_when_older_ones_have_come_since(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    algorithm = {"groups_per_batch": 4, "max_staleness": 1, "advantage": {"kind": "optimal_token_baseline"}}
    async with light_run(store, tmp_path, make_settings, algorithm=algorithm) as run, run.rollout("rollout-0"):
        run.actor.failures.append(InvalidInputError("the run ends when the actor's columns are written"))
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
        store.connection.command("HSET", f"{{rl:{store.run}}}:batch:0", "begun", " ".join(map(str, others)))  # as when these had landed first
        async with run.controller() as (_, running):
            await asyncio.wait_for(running, RUN_S)
    trained = [int(id.partition("/")[0]) for id in run.actor.trainer.trained[:16:2]]
    assert (trained[:4], sorted(trained[4:])) == (others, sorted(asked))
    assert [step for step, _ in run.actor.columns_asked] == [0, 0, 1, 2]


async def test_a_trainer_that_lost_its_steps_loads_the_checkpoint_and_applies_the_same_batches_again(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with light_run(store, tmp_path, make_settings, run={"num_steps": 5}) as run, run.rollout("rollout-0"):
        async with run.controller() as (stub, _):
            while (await stub.GetRun(pb.GetRunRequest())).status.step < 3:
                await asyncio.sleep(0.01)
        before = list(run.actor.trainer.trained)
        run.actor.trainer = LightTrainer(store)
        async with run.controller() as (_, running):
            await asyncio.wait_for(running, RUN_S)
    assert run.actor.trainer.trained[: len(before)] == before
    check_trained_once(run.actor.trainer, 40)
    assert balance(run) == (20, 20, 0, 0)


async def test_trainers_that_restart_under_a_living_controller_are_brought_back_and_nothing_is_sampled_again(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    gae = {"groups_per_batch": 4, "advantage": {"kind": "gae"}}
    async with light_run(store, tmp_path, make_settings, algorithm=gae, run={"num_steps": 6, "checkpoint_every_steps": 3}) as run:
        async with run.controller() as (stub, running), run.rollout("rollout-0", token_s=0.002):
            for step, role in ((2, run.actor), (4, run.critic)):
                while (await stub.GetRun(pb.GetRunRequest())).status.step < step:
                    assert not running.done(), running.exception()
                    await asyncio.sleep(0.01)
                role.trainer = LightTrainer(store)
            await asyncio.wait_for(running, RUN_S)
            status = (await stub.GetRun(pb.GetRunRequest())).status
    assert 1 <= status.num_recoveries <= 4
    assert status.last_failure
    assert balance(run) == (24, 24, 0, 0)
    check_trained_once(run.actor.trainer, 48)
    assert run.critic.trainer.trained == run.actor.trainer.trained


async def test_a_trainer_that_fails_again_and_again_ends_the_run_and_is_named(store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings) -> None:
    async with light_run(store, tmp_path, make_settings, controller={"max_recoveries": 3}) as run:
        run.actor.trainer.failures.extend([WorkerLostError("rank 1 of the actor is gone")] * 10)
        async with run.controller() as (_, running), run.rollout("rollout-0"):
            with pytest.raises(BudgetSpentError, match=r"controller.max_recoveries; the last: .*rank 1 of the actor is gone"):
                await asyncio.wait_for(running, RUN_S)
    assert len(run.actor.trainer.failures) == 6


async def test_a_full_disk_costs_a_checkpoint_and_not_the_run(store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings) -> None:
    async with light_run(store, tmp_path, make_settings, run={"num_steps": 6, "checkpoint_every_steps": 2}) as run:
        async with run.controller() as (stub, running), run.rollout("rollout-0", token_s=0.002):
            run.actor.trainer.disk_is_full = True
            await reaches(stub, running, 4)
            run.actor.trainer.disk_is_full = False
            await asyncio.wait_for(running, RUN_S)
    assert balance(run) == (24, 24, 0, 0)
    assert Checkpoints(open_storage(run.settings.run.checkpoints), 2).latest() is not None


async def reaches(stub: ControllerServiceStub, running: "asyncio.Task[None]", step: int) -> None:
    """Returns when the run has applied `step` steps."""
    while (await stub.GetRun(pb.GetRunRequest())).status.step < step:
        assert not running.done(), running.exception()
        await asyncio.sleep(0.01)


async def test_steps_go_on_while_a_checkpoint_is_written_and_its_rows_stay_until_it_is_committed(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with light_run(store, tmp_path, make_settings, run={"num_steps": 11, "checkpoint_every_steps": 5}) as run:
        checkpoints = Checkpoints(open_storage(run.settings.run.checkpoints), 2)
        run.actor.trainer.may_write.clear()
        async with run.controller() as (stub, running), run.rollout("rollout-0"):
            await reaches(stub, running, 9)
            asked = asyncio.create_task(saved(stub))
            await asyncio.sleep(0.2)
            assert checkpoints.latest() is None
            assert Ledger(store.connection, store.run).position().freed_step == 0
            assert not asked.done()
            run.actor.trainer.may_write.set()
            await asyncio.wait_for(running, RUN_S)
            await asyncio.wait_for(asked, 5)
    assert balance(run) == (44, 44, 0, 0)
    check_trained_once(run.actor.trainer, 88)
    latest = checkpoints.latest()
    assert latest is not None
    assert latest[1].step == 11


async def test_a_run_whose_checkpoint_is_never_written_goes_on_in_another_controller(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with light_run(store, tmp_path, make_settings, run={"num_steps": 8, "checkpoint_every_steps": 3}) as run, run.rollout("rollout-0"):
        run.actor.trainer.may_write.clear()
        async with run.controller() as (stub, running):
            await reaches(stub, running, 5)
        assert Checkpoints(open_storage(run.settings.run.checkpoints), 2).latest() is None
        run.actor.trainer.may_write.set()
        async with run.controller() as (_, running):
            await asyncio.wait_for(running, RUN_S)
    assert balance(run) == (32, 32, 0, 0)
    check_trained_once(run.actor.trainer, 64)


async def test_checkpoints_may_live_behind_a_url(store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings) -> None:
    url = f"memory://{tmp_path.name}/checkpoints"
    section = {"num_steps": 5, "checkpoint_every_steps": 1, "checkpoint_url": url}
    async with light_run(store, tmp_path, make_settings, run=section) as run, run.rollout("rollout-0", token_s=0.002):
        async with run.controller() as (stub, running):
            await reaches(stub, running, 3)
        run.actor.trainer.step, run.actor.trainer.records, run.actor.trainer.trained = 0, [], []
        async with run.controller() as (_, running):
            await asyncio.wait_for(running, RUN_S)
    check_trained_once(run.actor.trainer, 40)
    latest = Checkpoints(open_storage(url), 2).latest()
    assert latest is not None
    assert latest[1].step == 5
    assert not (run.settings.run.dir / "checkpoints").exists()


async def at_rest(run: LightRun, stub: ControllerServiceStub) -> bool:
    """Whether all that was admitted is sampled, scored and as far trained as whole batches allow."""
    ledger = (await stub.GetRun(pb.GetRunRequest())).status.ledger
    refs = [ref for _, group in Ledger(run.store.connection, run.store.run).read_committed("0", 256, 0.0) for ref in group.rows]
    scored = all("reward" in row for row in run.store.rows.read(refs, [], ["reward"]))
    return (ledger.queued, ledger.generating) == (0, 0) and scored and ledger.live < 4


async def test_a_group_is_scored_once_however_often_the_controller_starts(store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings) -> None:
    asked: Counter[str] = Counter()

    def count(item: Item) -> float:
        asked[item.id] += 1
        return asked[item.id] * 0.25 + parity(item) / 2

    async with light_run(store, tmp_path, make_settings, score=count, run={"num_steps": 4}, algorithm={"groups_per_batch": 4, "max_staleness": 1}) as run:
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


async def test_a_stop_without_any_rollout_left_does_not_wait_for_the_batch(store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings) -> None:
    async with light_run(store, tmp_path, make_settings, run={"num_steps": 1000}) as run, run.controller() as (stub, running):
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


async def test_a_checkpoint_of_another_run_is_refused(store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings) -> None:
    async with light_run(store, tmp_path, make_settings) as run:
        checkpoints = Checkpoints(open_storage(run.settings.run.checkpoints), 2)
        checkpoints.commit(checkpoints.begin(1), [], RunPoint("another", 0, 1, 1, 1, 4, 4, {}, "", []))
        async with run.controller() as (_, running), run.rollout("rollout-0"):
            with pytest.raises(CheckpointMismatchError, match="'another'"):
                await asyncio.wait_for(running, RUN_S)


async def test_a_lost_store_takes_the_run_back_to_its_checkpoint_in_a_new_lineage(store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings) -> None:
    async with light_run(store, tmp_path, make_settings, run={"num_steps": 4}) as run:
        async with run.rollout("rollout-0"), run.controller() as (stub, _):
            while (await stub.GetRun(pb.GetRunRequest())).status.step < 3:
                await asyncio.sleep(0.01)
        for key in store.connection.ledger.scan_iter(f"{{rl:{store.run}*"):
            store.connection.ledger.delete(key)
        run.actor.trainer = LightTrainer(store)
        async with run.rollout("rollout-0"), run.controller() as (_, running):
            await asyncio.wait_for(running, RUN_S)
    assert Ledger(store.connection, store.run).position().lineage == 1
    assert balance(run) == (16, 16, 0, 0)
    assert len(run.actor.trainer.trained) == 32


async def test_prompts_that_a_lineage_has_yet_to_admit_are_in_its_first_checkpoint(store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings) -> None:
    async with light_run(store, tmp_path, make_settings, run={"num_steps": 4}, algorithm={"groups_per_batch": 4, "max_staleness": 1}) as run:
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


async def saved(stub: ControllerServiceStub) -> None:
    """Returns when a checkpoint was made."""
    await stub.SaveCheckpoint(pb.SaveCheckpointRequest(), timeout=RUN_S)


async def test_a_lineage_that_was_begun_before_the_trainers_were_set_back_is_begun_once(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with light_run(store, tmp_path, make_settings, run={"num_steps": 4}) as run:
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
            RunPosition(lineage=1, step=point.step, next_gid=point.next_gid, policy_version=point.policy_version, epoch=point.epoch, trained=point.trained)
        )
        ledger.unlock()
        assert run.actor.trainer.step > point.step
        async with run.rollout("rollout-0"), run.controller() as (_, running):
            await asyncio.wait_for(running, RUN_S)
    assert Ledger(store.connection, store.run).position().lineage == 1
    assert len(run.actor.trainer.trained) == 32


async def test_groups_that_cannot_be_scored_are_dropped_and_replaced(store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings) -> None:
    def picky(item: Item) -> float:
        if item.ground_truth in ("3", "7"):
            raise ValueError("cannot score this")
        return parity(item)

    async with light_run(store, tmp_path, make_settings, score=picky, run={"num_steps": 7}) as run:
        async with run.controller() as (_, running), run.rollout("rollout-0"):
            await asyncio.wait_for(running, RUN_S)
    counts = Ledger(store.connection, store.run).counts()
    assert dict(counts.dropped) == {"scorer_error": 2}
    assert balance(run) == (30, 28, 2, 0)


class PoisonedEngine(ScriptedEngine):
    """Fails on every response of group 5, whoever asks and however often."""

    async def sample(self, request: SampleRequest) -> Sample:
        if request.seed in (seed_of(0, 5, 0), seed_of(0, 5, 1)):
            raise GenerationError("this prompt is poison")
        return await super().sample(request)


async def test_a_group_that_fails_wherever_it_is_sampled_is_dropped_after_its_deliveries(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with light_run(store, tmp_path, make_settings) as run:
        async with run.controller() as (_, running), run.rollout("rollout-0", engine=PoisonedEngine(vocab_size=200)):
            await asyncio.wait_for(running, RUN_S)
    assert dict(Ledger(store.connection, store.run).counts().dropped) == {"over_delivered": 1}
    assert balance(run) == (13, 12, 1, 0)
    check_trained_once(run.actor.trainer, 24)


async def test_a_spent_scoring_budget_fails_the_run_and_names_the_scorer(store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings) -> None:
    def broken(item: Item) -> float:
        raise ValueError("no score today")

    async with light_run(store, tmp_path, make_settings, score=broken, reward={"max_failed_groups": 2}) as run:
        async with run.controller() as (stub, running), run.rollout("rollout-0"):
            with pytest.raises(BudgetSpentError, match="no score today"):
                await asyncio.wait_for(running, RUN_S)
            status = (await stub.GetRun(pb.GetRunRequest())).status
    assert status.state == pb.RUN_STATE_FAILED
    assert "reward.max_failed_groups" in status.error
    assert Checkpoints(open_storage(run.settings.run.checkpoints), 2).latest() is not None, "a spent budget ends with a checkpoint"


async def test_too_many_dead_letters_end_the_run_and_the_last_is_named(store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings) -> None:
    async with light_run(store, tmp_path, make_settings, controller={"max_dead_letters": 0, "max_deliveries": 2}) as run:
        async with run.controller() as (_, running), run.rollout("rollout-0", engine=PoisonedEngine(vocab_size=200)):
            with pytest.raises(BudgetSpentError, match=r"controller\.max_dead_letters"):
                await asyncio.wait_for(running, RUN_S)
    latest = Checkpoints(open_storage(run.settings.run.checkpoints), 2).latest()
    assert latest is not None


async def test_a_torn_receiver_gets_the_weights_again_under_a_new_version(store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings) -> None:
    async with light_run(store, tmp_path, make_settings) as run, run.controller() as (_, running), run.rollout("rollout-0") as engine:
        engine.failures.append(RoleCallError("the load broke"))
        await asyncio.wait_for(running, RUN_S)
    assert run.actor.publishes[:3] == [(0, 0), (0, 1), (1, 2)]
    assert balance(run) == (12, 12, 0, 0)


@pytest.mark.parametrize("mode", ["wait", "abort"])
async def test_requests_in_flight_at_a_publish_are_finished_or_sampled_again(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings, mode: str
) -> None:
    algorithm = {"groups_per_batch": 4, "max_staleness": 1}
    async with light_run(store, tmp_path, make_settings, algorithm=algorithm, rollout={"pause_mode": mode}, run={"num_steps": 4}) as run:
        async with run.controller() as (_, running), run.rollout("rollout-0", token_s=0.02):
            await asyncio.wait_for(running, RUN_S)
    assert balance(run)[1:3] == (16, 0)
    check_trained_once(run.actor.trainer, 32)


async def test_weights_that_differ_from_what_was_sent_are_never_attested(store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings) -> None:
    async with light_run(store, tmp_path, make_settings) as run, run.controller() as (_, running), run.rollout("rollout-0"):
        run.actor.lie = True
        with pytest.raises(BudgetSpentError, match="did not load what was sent"):
            await asyncio.wait_for(running, RUN_S)
    assert Ledger(store.connection, store.run).position().policy_version == -1
    assert balance(run)[1] == 0


async def test_people_pause_resume_checkpoint_and_stop_a_run(store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings) -> None:
    async with light_run(store, tmp_path, make_settings, run={"num_steps": 1000, "checkpoint_every_steps": 1000}) as run:
        async with run.controller() as (stub, running), run.rollout("rollout-0"):
            saved = await stub.SaveCheckpoint(pb.SaveCheckpointRequest(), timeout=RUN_S)
            assert (Path(saved.path) / "COMMITTED").exists()
            assert saved.path.endswith(f"step-{saved.step:08d}")
            await stub.PauseRun(pb.PauseRunRequest())
            await asyncio.sleep(1.0)
            paused = (await stub.GetRun(pb.GetRunRequest())).status
            await asyncio.sleep(0.5)
            assert paused.state == pb.RUN_STATE_PAUSED
            assert (await stub.GetRun(pb.GetRunRequest())).status.step == paused.step
            await stub.ResumeRun(pb.ResumeRunRequest())
            while (await stub.GetRun(pb.GetRunRequest())).status.step <= paused.step:
                await asyncio.sleep(0.02)
            await stub.StopRun(pb.StopRunRequest(checkpoint=True))
            await asyncio.wait_for(running, RUN_S)
            stopped = (await stub.GetRun(pb.GetRunRequest())).status
    assert stopped.state == pb.RUN_STATE_DONE
    assert (run.settings.run.dir / "checkpoints" / f"step-{stopped.step:08d}" / "COMMITTED").exists()
    assert balance(run)[1] == 4 * stopped.step


async def test_a_paused_run_stays_paused_when_its_controller_starts_again(store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings) -> None:
    async with light_run(store, tmp_path, make_settings, run={"num_steps": 50}) as run, run.rollout("rollout-0", token_s=0.002):
        async with run.controller() as (stub, _):
            while (await stub.GetRun(pb.GetRunRequest())).status.step < 1:
                await asyncio.sleep(0.01)
            await stub.PauseRun(pb.PauseRunRequest())
        async with run.controller() as (stub, _):
            while (await stub.GetRun(pb.GetRunRequest())).status.state != pb.RUN_STATE_PAUSED:
                await asyncio.sleep(0.01)
            step = (await stub.GetRun(pb.GetRunRequest())).status.step
            await stub.ResumeRun(pb.ResumeRunRequest())
            while (await stub.GetRun(pb.GetRunRequest())).status.step <= step:
                await asyncio.sleep(0.01)
    assert not Ledger(store.connection, store.run).position().paused


async def test_strangers_are_refused_and_a_silent_worker_must_join_again(store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings) -> None:
    async with light_run(store, tmp_path, make_settings) as run, run.controller() as (stub, _):
        join = pb.JoinRequest(run=run.settings.run.name, role=pb.ROLE_REFERENCE, worker="r", incarnation="1", address="127.0.0.1:1", version=contract_version())
        with pytest.raises(VersionMismatchError, match="install one release"):
            await stub.Join(pb.JoinRequest(run=join.run, worker="r", incarnation="1", version="9"))
        with pytest.raises(InvalidInputError, match=r"controller\.address"):
            await stub.Join(pb.JoinRequest(run="other", worker="r", incarnation="1", version=contract_version()))
        await stub.Join(join)
        beat = pb.HeartbeatRequest(worker="r", incarnation="1")
        await stub.Heartbeat(beat)
        await asyncio.sleep(run.settings.controller.lease_s + 0.5)
        with pytest.raises(UnknownWorkerError):
            await stub.Heartbeat(beat)


async def test_a_second_controller_on_a_run_is_refused_and_the_first_goes_on(store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings) -> None:
    async with light_run(store, tmp_path, make_settings, run={"num_steps": 8}) as run, run.rollout("rollout-0", token_s=0.02):
        async with run.controller() as (stub, running):
            while (await stub.GetRun(pb.GetRunRequest())).status.step < 1:
                await asyncio.sleep(0.02)
            second = ControllerEngine(run.settings)
            try:
                with pytest.raises(RunLockedError, match=rf"run {store.run}: another controller holds it and is alive; stop that one first"):
                    await asyncio.wait_for(second.run(), 10)
                status = await second.status()
            finally:
                await second.close()
            assert (status.state, status.error) == (pb.RUN_STATE_FAILED, f"run {store.run}: another controller holds it and is alive; stop that one first")
            assert not running.done()
            await asyncio.wait_for(running, RUN_S)
    assert balance(run) == (32, 32, 0, 0)
    check_trained_once(run.actor.trainer, 64)
