"""Whole runs with light roles: nothing lost, nothing trained twice, staleness bounded, failures say what failed, people
steer.
"""

import asyncio
import json
import random
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rolecall.checkpoint.storage import open_storage
from rolecall.contract import contract_version
from rolecall.errors import (
    BudgetSpentError,
    GenerationError,
    InvalidInputError,
    RateLimitedError,
    RoleCallError,
    RunLockedError,
    ScorerUnavailableError,
    UnknownWorkerError,
    VersionMismatchError,
)
from rolecall.scoring.scores import Item
from rolecall.settings import RunSettings
from rolecall.store.ledger import Ledger
from rolecall.trajectory import seed_of
from rolecall.v1 import controller_pb2 as pb
from services.controller.durable.run_point import Checkpoints
from services.controller.run import ControllerRun
from services.rollout.sampling import Sample, SampleRequest
from services.rollout.scripted import ScriptedEngine
from tests.fixtures_store import StoreUnderTest
from tests.twins.run import TwinRun, balance, check_trained_once, parity, twin_run

MakeSettings = Callable[..., RunSettings]
RUN_S = 60.0
"""Deadline of one light run, which takes a second or two on a quiet machine."""


async def test_a_run_trains_every_group_once_and_ends_with_a_checkpoint(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with (
        twin_run(store, tmp_path, make_settings) as run,
        run.controller() as (stub, running),
        run.rollout("rollout-0"),
    ):
        states = [update.status async for update in stub.WatchRun(pb.WatchRunRequest(), timeout=RUN_S)]
        await asyncio.wait_for(running, RUN_S)
    assert (states[0].state, states[-1].state, states[-1].step) == (pb.RUN_STATE_STARTING, pb.RUN_STATE_DONE, 3)
    assert balance(run) == (12, 12, 0, 0)
    check_trained_once(run.actor.trainer, 24)
    assert run.actor.trainer.publishes == [(0, 0), (1, 1), (2, 2), (3, 3)]
    assert [line["staleness/max"] for line in run.metrics()] == [0, 0, 0]
    assert sorted(path.name for path in (run.settings.run.dir / "checkpoints").iterdir()) == [
        "step-00000002",
        "step-00000003",
    ]
    assert store.connection.command("HLEN", f"{{rl:{store.run}}}:garbage") == 0


async def test_ppo_asks_the_critic_for_values_and_trains_it_on_the_same_batches(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    gae = {"groups_per_batch": 4, "advantage": {"kind": "gae"}}
    async with (
        twin_run(store, tmp_path, make_settings, algorithm=gae) as run,
        run.controller() as (_, running),
        run.rollout("rollout-0"),
    ):
        await asyncio.wait_for(running, RUN_S)
    assert run.critic.trainer.trained == run.actor.trainer.trained
    assert [record.digest for record in run.critic.trainer.records] == [
        record.digest for record in run.actor.trainer.records
    ]


async def test_two_rollouts_one_late_keep_the_staleness_bound(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    algorithm = {"groups_per_batch": 4, "max_staleness": 1}
    async with twin_run(store, tmp_path, make_settings, algorithm=algorithm, run={"num_steps": 8}) as run:
        async with run.controller() as (stub, running), run.rollout("rollout-0", token_s=0.01):
            while (await stub.GetRun(pb.GetRunRequest())).status.step < 2:
                await asyncio.sleep(0.05)
            async with run.rollout("rollout-1", token_s=0.01) as late:
                await asyncio.wait_for(running, RUN_S)
    assert late.joined, "the late rollout was never taken into an epoch"
    assert balance(run)[1] == 32
    check_trained_once(run.actor.trainer, 64)
    assert max(line["staleness/max"] for line in run.metrics()) == 1


def committers(run: TwinRun) -> Counter[str]:
    """Groups committed by each rollout, as far as the history was moved to its file."""
    file = run.settings.run.dir / "history.jsonl"
    events = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return Counter(event["token"].partition(".")[0] for event in events if event["event"] == "committed")


async def test_a_fleet_of_one_grows_to_three_and_shrinks_to_one_inside_a_run(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    algorithm = {"groups_per_batch": 12, "max_staleness": 1}
    async with twin_run(
        store, tmp_path, make_settings, algorithm=algorithm, run={"num_steps": 200, "checkpoint_every_steps": 1000}
    ) as run:
        async with run.controller() as (stub, running), run.rollout("rollout-0", token_s=0.005):
            async with run.rollout("rollout-1", token_s=0.005), run.rollout("rollout-2", token_s=0.005):
                while set(committers(run)) != {"rollout-0", "rollout-1", "rollout-2"}:
                    assert not running.done()
                    await asyncio.sleep(0.05)
            while (
                len([worker for worker in (await stub.GetRun(pb.GetRunRequest())).status.workers if not worker.lost])
                > 1
            ):
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
    async with (
        twin_run(store, tmp_path, make_settings, run={"num_steps": 4}) as run,
        run.controller() as (stub, running),
    ):
        async with run.rollout("rollout-0", token_s=0.1):
            while (await stub.GetRun(pb.GetRunRequest())).status.ledger.generating == 0:
                await asyncio.sleep(0.02)
        async with run.rollout("rollout-1"):
            await asyncio.wait_for(running, RUN_S)
    assert balance(run) == (16, 16, 0, 0)
    check_trained_once(run.actor.trainer, 32)
    assert run.actor.trainer.publishes[:2] == [(0, 0), (0, 1)]


async def test_a_pause_that_outlasts_the_stall_timeout_is_no_stall_also_after_a_restart(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with twin_run(store, tmp_path, make_settings) as run, run.rollout("rollout-0"):
        patient = run.settings
        hasty = {"controller": {"stall_timeout_s": 0.1}, "reward": {"timeout_s": 0.1}}
        run.settings = patient.model_copy(
            update={name: dict(patient)[name].model_copy(update=changes) for name, changes in hasty.items()}
        )
        for start in range(2):
            async with run.controller() as (stub, running):
                if start == 0:
                    await stub.PauseRun(pb.PauseRunRequest())
                while (await stub.GetRun(pb.GetRunRequest())).status.state != pb.RUN_STATE_PAUSED:
                    assert not running.done(), running.exception()
                    await asyncio.sleep(0.02)
                assert not (await asyncio.wait([running], timeout=0.5))[0], running.exception()
        run.settings = patient
        async with run.controller() as (stub, running):
            await stub.ResumeRun(pb.ResumeRunRequest())
            await asyncio.wait_for(running, RUN_S)
    assert balance(run) == (12, 12, 0, 0)


async def test_a_run_that_stalls_ends_with_a_checkpoint_of_where_it_stands(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    sections: dict[str, Any] = {"run": {"num_steps": 1000, "checkpoint_every_steps": 1000}}
    sections |= {"controller": {"stall_timeout_s": 1.0}, "reward": {"timeout_s": 2.0}}
    async with (
        twin_run(store, tmp_path, make_settings, **sections) as run,
        run.controller() as (stub, running),
        run.rollout("rollout-0") as engine,
    ):
        while (await stub.GetRun(pb.GetRunRequest())).status.step < 1:
            await asyncio.sleep(0.02)
        engine.hold = True
        with pytest.raises(
            BudgetSpentError,
            match=r"no group was finished for controller.stall_timeout_s = 2 s; "
            r"4 are live, \d ready, rollouts: \['rollout-0",
        ):
            await asyncio.wait_for(running, RUN_S)
        step = (await stub.GetRun(pb.GetRunRequest())).status.step
    latest = Checkpoints(open_storage(run.settings.run.checkpoints), 2).latest()
    assert latest is not None
    assert latest[1].step == step >= 1


async def test_groups_that_cannot_be_scored_are_dropped_and_replaced(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    def picky(item: Item) -> float:
        if item.ground_truth in ("3", "7"):
            raise ValueError("cannot score this")
        return parity(item)

    async with twin_run(store, tmp_path, make_settings, score=picky, run={"num_steps": 7}) as run:
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
    async with twin_run(store, tmp_path, make_settings) as run:
        async with run.controller() as (_, running), run.rollout("rollout-0", engine=PoisonedEngine(vocab_size=200)):
            await asyncio.wait_for(running, RUN_S)
    assert dict(Ledger(store.connection, store.run).counts().dropped) == {"over_delivered": 1}
    assert balance(run) == (13, 12, 1, 0)
    check_trained_once(run.actor.trainer, 24)


async def test_a_spent_scoring_budget_fails_the_run_and_names_the_scorer(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    def broken(item: Item) -> float:
        raise ValueError("no score today")

    async with twin_run(store, tmp_path, make_settings, score=broken, reward={"max_failed_groups": 2}) as run:
        async with run.controller() as (stub, running), run.rollout("rollout-0"):
            with pytest.raises(BudgetSpentError, match="no score today"):
                await asyncio.wait_for(running, RUN_S)
            status = (await stub.GetRun(pb.GetRunRequest())).status
    assert status.state == pb.RUN_STATE_FAILED
    assert "reward.max_failed_groups" in status.error
    assert re.fullmatch(r"group \d+: scorer_error: .*no score today.*", status.last_drop)
    assert Checkpoints(open_storage(run.settings.run.checkpoints), 2).latest() is not None, (
        "a spent budget ends with a checkpoint"
    )


async def test_a_scorer_that_gives_no_scores_is_named_while_the_run_waits_and_when_it_ends(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    def away(item: Item) -> float:
        raise ScorerUnavailableError("its database is away")

    budget = {"stall_timeout_s": 3.0, "max_recoveries": 2}
    async with twin_run(store, tmp_path, make_settings, score=away, controller=budget) as run:
        named = (
            f"scorer 'reward' at {run.settings.reward.address} gives no scores: SCORER_UNAVAILABLE: its "
            "database is away"
        )
        async with run.controller() as (stub, running), run.rollout("rollout-0"):
            async with asyncio.timeout(RUN_S):
                while (status := (await stub.GetRun(pb.GetRunRequest())).status).trouble != named:
                    await asyncio.sleep(0.02)
            assert status.state in (pb.RUN_STATE_STARTING, pb.RUN_STATE_RUNNING)
            with pytest.raises(BudgetSpentError) as ended:
                await asyncio.wait_for(running, RUN_S)
    assert "scorer 'reward'" in ended.value.message
    assert "its database is away" in ended.value.message
    assert dict(Ledger(store.connection, store.run).counts().dropped) == {}


async def test_a_scorer_that_is_away_at_the_start_is_named_in_status_and_in_the_error(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    away = {"address": "127.0.0.1:9", "timeout_s": 0.5}
    async with twin_run(store, tmp_path, make_settings, reward=away, controller={"start_timeout_s": 4.0}) as run:
        async with run.controller() as (stub, running), run.rollout("rollout-0"):
            async with asyncio.timeout(RUN_S):
                while not (status := (await stub.GetRun(pb.GetRunRequest())).status).trouble:
                    await asyncio.sleep(0.02)
            assert status.trouble.startswith("scorer 'reward' at 127.0.0.1:9 gives no scores: ")
            with pytest.raises(BudgetSpentError, match=r"reward did not come up within .*; reward: 127\.0\.0\.1:9 "):
                await asyncio.wait_for(running, RUN_S)


async def test_a_limit_of_the_scorers_rate_drops_no_group(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    draw = random.Random(0)

    def limited(item: Item) -> float:
        if draw.random() < 0.2:
            raise RateLimitedError("quota exceeded")
        return parity(item)

    async with twin_run(
        store, tmp_path, make_settings, score=limited, reward={"max_failed_groups": 0, "max_attempts": 1}
    ) as run:
        async with run.controller() as (_, running), run.rollout("rollout-0"):
            await asyncio.wait_for(running, RUN_S)
    assert balance(run) == (12, 12, 0, 0)


async def test_failures_of_scoring_are_known_to_the_next_controller_and_a_resumed_run_begins_a_new_budget(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    def picky(item: Item) -> float:
        if int(item.id.partition("/")[0]) < num_bad:
            raise ValueError("no score today")
        return parity(item)

    num_bad = 2
    sections: dict[str, Any] = {"reward": {"max_failed_groups": 3}, "run": {"num_steps": 1}}
    async with twin_run(store, tmp_path, make_settings, score=picky, **sections) as run, run.rollout("rollout-0"):
        async with run.controller() as (_, running):
            await asyncio.wait_for(running, RUN_S)
        ledger = Ledger(store.connection, store.run)
        assert sorted(ledger.position().failed["scorer_error"]) == [0, 1]
        run.settings = run.settings.model_copy(update={"run": run.settings.run.model_copy(update={"num_steps": 2})})
        num_bad = 1_000_000
        async with run.controller() as (_, running):
            with pytest.raises(BudgetSpentError, match=r"more than reward.max_failed_groups = 3 of 1000 groups"):
                await asyncio.wait_for(running, RUN_S)
        num_failed = len(ledger.position().failed["scorer_error"])
        assert 4 <= num_failed <= 6, "and those that were being scored beside it"
        num_bad = max(ledger.position().failed["scorer_error"]) + 2
        async with run.controller() as (_, running):
            await asyncio.wait_for(running, RUN_S)
    assert balance(run)[1] == 8


async def test_too_many_dead_letters_end_the_run_and_the_last_is_named(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with twin_run(store, tmp_path, make_settings, controller={"max_dead_letters": 0, "max_deliveries": 2}) as run:
        async with run.controller() as (_, running), run.rollout("rollout-0", engine=PoisonedEngine(vocab_size=200)):
            with pytest.raises(BudgetSpentError, match=r"controller\.max_dead_letters"):
                await asyncio.wait_for(running, RUN_S)
    latest = Checkpoints(open_storage(run.settings.run.checkpoints), 2).latest()
    assert latest is not None


async def test_a_torn_receiver_gets_the_weights_again_under_a_new_version(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with (
        twin_run(store, tmp_path, make_settings) as run,
        run.controller() as (_, running),
        run.rollout("rollout-0") as engine,
    ):
        engine.failures.append(RoleCallError("the load broke"))
        await asyncio.wait_for(running, RUN_S)
    assert run.actor.trainer.publishes[:3] == [(0, 0), (0, 1), (1, 2)]
    assert balance(run) == (12, 12, 0, 0)


@pytest.mark.parametrize("mode", ["wait", "abort"])
async def test_requests_in_flight_at_a_publish_are_finished_or_sampled_again(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings, mode: str
) -> None:
    algorithm = {"groups_per_batch": 4, "max_staleness": 1}
    async with twin_run(
        store, tmp_path, make_settings, algorithm=algorithm, rollout={"pause_mode": mode}, run={"num_steps": 4}
    ) as run:
        async with run.controller() as (_, running), run.rollout("rollout-0", token_s=0.02):
            await asyncio.wait_for(running, RUN_S)
    assert balance(run)[1:3] == (16, 0)
    check_trained_once(run.actor.trainer, 32)


async def test_weights_that_differ_from_what_was_sent_are_never_attested(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with (
        twin_run(store, tmp_path, make_settings) as run,
        run.controller() as (_, running),
        run.rollout("rollout-0"),
    ):
        run.actor.trainer.lies = True
        with pytest.raises(BudgetSpentError, match="did not load what was sent"):
            await asyncio.wait_for(running, RUN_S)
    assert Ledger(store.connection, store.run).position().policy_version == -1
    assert balance(run)[1] == 0


async def test_people_pause_resume_checkpoint_and_stop_a_run(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with twin_run(store, tmp_path, make_settings, run={"num_steps": 1000, "checkpoint_every_steps": 1000}) as run:
        async with run.controller() as (stub, running), run.rollout("rollout-0"):
            saved = await stub.SaveCheckpoint(pb.SaveCheckpointRequest(), timeout=RUN_S)
            assert (Path(saved.path) / "COMMITTED").exists()
            assert saved.path.endswith(f"step-{saved.step:08d}")
            await stub.PauseRun(pb.PauseRunRequest())
            while True:  # what was in flight is trained, until less than a batch is left
                paused = (await stub.GetRun(pb.GetRunRequest())).status
                if paused.ledger.live < 4 and paused.ledger.trained == 4 * paused.step:
                    break
                await asyncio.sleep(0.02)
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


async def test_a_paused_run_stays_paused_when_its_controller_starts_again(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with (
        twin_run(store, tmp_path, make_settings, run={"num_steps": 50}) as run,
        run.rollout("rollout-0", token_s=0.002),
    ):
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


async def test_strangers_are_refused_and_a_silent_worker_must_join_again(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with twin_run(store, tmp_path, make_settings) as run, run.controller() as (stub, _):
        join = pb.JoinRequest(
            run=run.settings.run.name,
            role=pb.ROLE_REFERENCE,
            worker="r",
            incarnation="1",
            address="127.0.0.1:1",
            version=contract_version(),
        )
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


async def test_a_second_controller_on_a_run_is_refused_and_the_first_goes_on(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with (
        twin_run(store, tmp_path, make_settings, run={"num_steps": 8}) as run,
        run.rollout("rollout-0", token_s=0.02),
    ):
        async with run.controller() as (stub, running):
            while (await stub.GetRun(pb.GetRunRequest())).status.step < 1:
                await asyncio.sleep(0.02)
            second = ControllerRun(run.settings)
            try:
                with pytest.raises(
                    RunLockedError,
                    match=rf"run {store.run}: another controller holds it and is alive; stop that one first",
                ):
                    await asyncio.wait_for(second.run(), 10)
                status = await second.status()
            finally:
                await second.close()
            assert (status.state, status.error) == (
                pb.RUN_STATE_FAILED,
                f"run {store.run}: another controller holds it and is alive; stop that one first",
            )
            assert not running.done()
            await asyncio.wait_for(running, RUN_S)
    assert balance(run) == (32, 32, 0, 0)
    check_trained_once(run.actor.trainer, 64)
