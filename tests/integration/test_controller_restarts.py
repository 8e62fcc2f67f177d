"""Controllers, trainers and stores that start over in the middle of a run: it goes on where it stood, and nothing is
trained or scored twice.
"""

import asyncio
import json
import threading
import time
from collections import Counter
from contextlib import AsyncExitStack
from typing import Any

import numpy as np
import pytest

from rolecall.data.model.mixture import Mixture
from rolecall.errors import (
    BudgetSpentError,
    ConfigError,
    InvalidInputError,
    StorageUnavailableError,
    StoreRolledBackError,
    WorkerLostError,
)
from rolecall.reward import SERVICE_NAME as REWARD_SERVICE
from rolecall.reward import Scorer, description, one_by_one
from rolecall.rpc.callers import Caller
from rolecall.scoring.scores import Item, Score
from rolecall.store.ledger import Ledger
from rolecall.store.position import GroupState, RunPosition
from rolecall.store.rows import Rows
from rolecall.v1 import controller_pb2 as pb
from rolecall.v1 import reward_pb2_grpc, training_pb2
from services.controller.durable.run_point import Checkpoints
from services.rollout.scripted import ScriptedEngine
from tests.conftest import MakeSettings
from tests.fixtures_store import StoreUnderTest
from tests.integration.test_distillation import LightTeacher, section_of
from tests.twins.callers import of_role, party
from tests.twins.run import RUN_S, Life, LightRun, TwinRun, balance, check_trained_once, parity, served
from tests.twins.trainer import ActorTwin
from tests.waiting import until


async def test_a_controller_that_starts_again_goes_on_where_the_last_one_stopped(light_run: LightRun) -> None:
    async with light_run(run={"num_steps": 6}) as run, run.rollout("rollout-0", token_s=0.005):
        for stop_at in (1, 2, 4):
            async with run.controller() as life:
                await life.reaches(stop_at)
        await run.to_the_end()
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
    light_run: LightRun, make_settings: MakeSettings, changed: dict[str, Any]
) -> None:
    async with light_run() as run, run.rollout("rollout-0"):
        run.actor.trainer.failures.append(InvalidInputError("the run ends with its first batch sealed"))
        with pytest.raises(InvalidInputError):
            await run.to_the_end()
        sealed = run.ledger.sealed(0)
        tree = run.settings.model_dump(exclude_defaults=True)
        run.settings = run.settings.model_copy(
            update={"algorithm": make_settings(**{**tree, "algorithm": {"groups_per_batch": 4, **changed}}).algorithm}
        )
        await run.to_the_end()
    assert sealed is not None
    assert run.actor.trainer.records[0].digest == sealed.digest
    assert run.actor.trainer.trained[:8] == [ref.id for ref in sealed.rows]
    assert len(run.actor.trainer.records) == 3


async def test_a_recovery_waits_for_checkpoints_that_are_away(
    light_run: LightRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each look that failed would spend one of `controller.max_recoveries`."""
    latest, num_looks = Checkpoints.latest, 0

    def away_for_a_while(checkpoints: Checkpoints) -> Any:
        nonlocal num_looks
        num_looks += 1
        if num_looks <= 2 * run.settings.controller.max_recoveries:
            raise StorageUnavailableError("the object store is away")
        return latest(checkpoints)

    monkeypatch.setattr("services.controller.roles.ROLE_POLL_S", 0.02)
    async with light_run() as run, run.rollout("rollout-0"), run.controller() as life:
        await life.reaches(1)
        monkeypatch.setattr(Checkpoints, "latest", away_for_a_while)
        run.actor.trainer.failures.append(WorkerLostError("the actor died"))
        await life.ends()
    assert num_looks > 2 * run.settings.controller.max_recoveries
    assert balance(run) == (12, 12, 0, 0)


@pytest.mark.parametrize("other", [{"shaping": {"clip_max": 0.5}}, {"advantage": {"kind": "remax"}}])
async def test_a_batch_whose_columns_are_of_other_settings_asks_for_them(
    light_run: LightRun, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, other: dict[str, Any]
) -> None:
    async with light_run() as run, run.rollout("rollout-0"):
        before = run.settings
        put = Rows.put

        def failing(rows: Rows, refs: Any, columns: Any) -> int:
            if "advantages" in columns[0]:
                raise InvalidInputError("the run ends before the columns are written")
            return put(rows, refs, columns)

        monkeypatch.setattr(Rows, "put", failing)
        with pytest.raises(InvalidInputError):
            await run.to_the_end()
        monkeypatch.setattr(Rows, "put", put)
        tree = before.model_dump(exclude_defaults=True)
        algorithm = {"groups_per_batch": 4, **other}
        changed = make_settings(**{**tree, "algorithm": algorithm}).algorithm
        run.settings = before.model_copy(update={"algorithm": changed})
        with pytest.raises(ConfigError, match="resume it once with the settings that it had"):
            await run.to_the_end()
        run.settings = before
        await run.to_the_end()
    assert balance(run) == (12, 12, 0, 0)


class RegularisedActor(ActorTwin):
    """An actor whose loss reads the logprobs of a reference."""

    trains_on = (*ActorTwin.trains_on, "ref/logprobs")


class FrozenTwin(LightTeacher):
    """A reference that is asked for the KL."""

    async def ComputeLogprobs(
        self, request: training_pb2.ComputeColumnRequest, context: Any
    ) -> training_pb2.ComputeColumnResponse:
        request.prefix = "ref"
        return await super().ComputeLogprobs(request, context)


async def test_a_loss_that_reads_what_batches_lack_is_refused_until_a_checkpoint_covers_them(
    light_run: LightRun, store: StoreUnderTest, make_settings: MakeSettings
) -> None:
    async with AsyncExitStack() as stack:
        run = await stack.enter_async_context(light_run(run={"num_steps": 6, "checkpoint_every_steps": 2}))
        await stack.enter_async_context(run.rollout("rollout-0", token_s=0.005))
        async with run.controller() as life:
            await life.reaches(3)
        before, tree = run.settings, run.settings.model_dump(exclude_defaults=True)
        tree["references"] = {"ref": await section_of(stack, FrozenTwin(store, "ref", -1.0))}
        tree["algorithm"] = {"groups_per_batch": 4, "kl": {"reference": "ref", "kl_coef": 0.1, "placement": "loss"}}
        regularised = make_settings(**tree)
        run.settings = regularised
        with pytest.raises(ConfigError, match=r"algorithm\.kl: it trains on the column ref/logprobs, which the batch"):
            await run.to_the_end()
        run.settings = before
        async with run.controller() as life:
            await life.shows(lambda status: status.state == pb.RUN_STATE_RUNNING)
            await life.stub.StopRun(pb.StopRunRequest(checkpoint=True))
            await life.ends()
        run.settings = regularised
        run.actor.restart(RegularisedActor(store.rows))
        await run.to_the_end()
    assert run.ledger.position().lineage == 0
    assert balance(run) == (24, 24, 0, 0)
    check_trained_once(run.actor.trainer, 48)


async def test_groups_that_were_sampled_before_their_routing_is_replayed_are_dropped(
    light_run: LightRun, store: StoreUnderTest
) -> None:
    class Replaying(ActorTwin):
        trains_on = (*ActorTwin.trains_on, "routed_experts")

    async with light_run(run={"num_steps": 5}, algorithm={"groups_per_batch": 4, "max_staleness": 2}) as run:
        experts = {"num_hidden_layers": 2, "num_experts": 4, "num_experts_per_tok": 2}
        (run.settings.model.path / "config.json").write_text(json.dumps(experts))
        async with run.rollout("rollout-0"), run.controller() as life:
            await life.reaches(1)
            await life.stub.StopRun(pb.StopRunRequest(checkpoint=True))
            await life.ends()
        actor = run.settings.actor.model_copy(update={"router_replay": "r3"})
        run.settings = run.settings.model_copy(update={"actor": actor})
        run.actor.restart(Replaying(store.rows))
        await run.to_the_end("rollout-1", engine=ScriptedEngine(vocab_size=200, mixture=Mixture(2, 4, 2)))
    position = run.ledger.position()
    assert (position.lineage, position.trained, set(position.dropped)) == (0, 20, {"no_routed_experts"})
    check_trained_once(run.actor.trainer, 40)


async def test_groups_that_were_scored_before_a_loss_reads_token_rewards_are_dropped_and_no_failures(
    light_run: LightRun, store: StoreUnderTest, make_settings: MakeSettings
) -> None:
    class Crediting(ActorTwin):
        trains_on = (*ActorTwin.trains_on, "token_rewards")

    async with light_run(
        run={"num_steps": 5}, algorithm={"groups_per_batch": 4, "max_staleness": 2}, reward={"max_failed_groups": 0}
    ) as run:
        async with run.rollout("rollout-0"), run.controller() as life:
            await life.reaches(1)
            await life.stub.StopRun(pb.StopRunRequest(checkpoint=True))
            await life.ends()
        spec = description("credit", (0, 1), ("response_text", "ground_truth"), {}, True, max_items=0)
        scorer = Scorer(spec, one_by_one(credited, spec), None)
        add = reward_pb2_grpc.add_RewardServiceServicer_to_server
        async with AsyncExitStack() as stack:
            rpc = of_role(party(), Caller.REWARD, store.run)
            tree = run.settings.model_dump(exclude_defaults=True)
            tree["reward"]["address"] = await served(stack, add, scorer, REWARD_SERVICE, rpc=rpc)
            tree["algorithm"]["policy_loss"] = {"kind": "custom", "function": "mine:loss", "columns": ["token_rewards"]}
            run.settings = make_settings(**tree)
            run.actor.restart(Crediting(store.rows))
            await run.to_the_end("rollout-1")
    position = run.ledger.position()
    assert (position.lineage, position.trained, set(position.dropped)) == (0, 20, {"no_token_rewards"})
    check_trained_once(run.actor.trainer, 40)


def credited(item: Item) -> Score:
    return Score(parity(item), {}, np.zeros(item.num_response_tokens, np.float32))


@pytest.mark.parametrize(("old", "new"), [(2, 0), (2, 1)])
async def test_a_run_goes_on_with_a_lower_max_staleness(light_run: LightRun, old: int, new: int) -> None:
    algorithm = {"groups_per_batch": 4, "max_staleness": old}
    async with light_run(algorithm=algorithm, run={"num_steps": 6}) as run, run.rollout("rollout-0"):
        run.actor.trainer.failures.append(InvalidInputError("the run ends with its first batch sealed"))
        with pytest.raises(InvalidInputError):
            await run.to_the_end()
        assert balance(run)[3] == 4 * (old + 1)
        run.settings = run.settings.model_copy(
            update={"algorithm": run.settings.algorithm.model_copy(update={"max_staleness": new})}
        )
        await run.to_the_end()
    assert balance(run) == (24, 24, 0, 0)
    staleness = [line["staleness/max"] for line in run.metrics()]
    assert max(staleness) <= old
    assert max(staleness[old + 1 :]) <= new


async def test_groups_that_the_actor_was_asked_about_are_in_the_batch_also_when_older_ones_have_come_since(
    light_run: LightRun, store: StoreUnderTest
) -> None:
    algorithm = {"groups_per_batch": 4, "max_staleness": 1, "advantage": {"kind": "optimal_token_baseline"}}
    async with light_run(algorithm=algorithm) as run, run.rollout("rollout-0"):
        run.actor.trainer.column_failures.append(InvalidInputError("the run ends when the actor's columns are written"))
        with pytest.raises(InvalidInputError):
            await run.to_the_end()
        ledger = run.ledger
        asked = ledger.begun(0)
        assert (len(asked), ledger.sealed(0)) == (4, None)
        await until(lambda: list(ledger.live().values()).count(GroupState.COMMITTED) >= 8, RUN_S)
        others = sorted(set(range(8)) - set(asked))
        # as when these had landed first
        store.connection.command("HSET", f"{{rl:{store.run}}}:batch:0", "begun", " ".join(map(str, others)))
        await run.to_the_end()
    trained = [int(id.partition("/")[0]) for id in run.actor.trainer.trained[:16:2]]
    assert (trained[:4], sorted(trained[4:])) == (others, sorted(asked))
    assert [step for step, _ in run.actor.trainer.columns_asked] == [0, 0, 1, 2]


async def test_a_trainer_that_lost_its_steps_loads_the_checkpoint_and_applies_the_same_batches_again(
    light_run: LightRun,
) -> None:
    async with light_run(run={"num_steps": 5}) as run, run.rollout("rollout-0"):
        async with run.controller() as life:
            await life.reaches(3)
        before = list(run.actor.trainer.trained)
        run.actor.restart()
        await run.to_the_end()
    assert run.actor.trainer.trained[: len(before)] == before
    check_trained_once(run.actor.trainer, 40)
    assert balance(run) == (20, 20, 0, 0)


async def test_trainers_that_restart_under_a_living_controller_are_brought_back_and_nothing_is_sampled_again(
    light_run: LightRun,
) -> None:
    gae = {"groups_per_batch": 4, "advantage": {"kind": "gae"}}
    async with light_run(algorithm=gae, run={"num_steps": 6, "checkpoint_every_steps": 3}) as run:
        async with run.controller() as life, run.rollout("rollout-0", token_s=0.002):
            for step, role in ((2, run.actor), (4, run.critic)):
                await life.reaches(step)
                role.restart()
            await life.ends()
            status = await life.status()
    assert 1 <= status.num_recoveries <= 4
    assert status.last_failure
    assert balance(run) == (24, 24, 0, 0)
    check_trained_once(run.actor.trainer, 48)
    assert run.critic.trainer.trained == run.actor.trainer.trained


async def test_trainers_load_and_apply_what_they_missed_side_by_side(light_run: LightRun) -> None:
    gae = {"groups_per_batch": 4, "advantage": {"kind": "gae"}}
    async with light_run(algorithm=gae, run={"num_steps": 5, "checkpoint_every_steps": 2}) as run:
        async with run.rollout("rollout-0"):
            async with run.controller() as life:
                await life.reaches(4)
            run.actor.restart()
            run.critic.restart()
            both, met = threading.Barrier(2, timeout=30.0), list[str]()
            for trainer in (run.actor.trainer, run.critic.trainer):

                def meet(phase: str) -> None:
                    if phase in ("load:start", "train:start"):
                        both.wait()  # bounded: by the barrier's timeout, which ends the trainer
                        met.append(phase)

                trainer.at = meet
            await run.to_the_end()
        assert len(run.actor.trainer.records) == len(run.critic.trainer.records) == 5
        assert {"load:start", "train:start"} <= set(met)


async def test_a_trainer_that_fails_again_and_again_ends_the_run_and_is_named(light_run: LightRun) -> None:
    async with light_run(controller={"max_recoveries": 3}) as run:
        run.actor.trainer.failures.extend([WorkerLostError("rank 1 of the actor is gone")] * 10)
        with pytest.raises(
            BudgetSpentError, match=r"controller.max_recoveries; the last: .*rank 1 of the actor is gone"
        ):
            await run.to_the_end("rollout-0")
    assert len(run.actor.trainer.failures) == 6


async def at_rest(run: TwinRun, life: Life) -> bool:
    """Whether all that was admitted is sampled, scored and as far trained as whole batches allow."""
    ledger = (await life.shows(lambda status: status.HasField("ledger"))).ledger
    refs = [ref for _, group in run.ledger.read_committed("0", 256, 0.0) for ref in group.rows]
    scored = all("reward" in row for row in run.store.rows.read(refs, [], ["reward"]))
    return (ledger.queued, ledger.generating) == (0, 0) and scored and ledger.live < 4


async def test_a_group_is_scored_once_however_often_the_controller_starts(light_run: LightRun) -> None:
    asked: Counter[str] = Counter()

    def count(item: Item) -> float:
        asked[item.id] += 1
        return asked[item.id] * 0.25 + parity(item) / 2

    async with light_run(
        score=count,
        run={"num_steps": 4},
        algorithm={"groups_per_batch": 4, "max_staleness": 1},
    ) as run:
        async with run.rollout("rollout-0", token_s=0.02):
            for stop_at in (2, 5, 9):
                async with run.controller() as life:
                    await life.stub.ResumeRun(pb.ResumeRunRequest())
                    while sum(asked.values()) < 2 * stop_at:
                        await asyncio.sleep(0.01)
                    await life.stub.PauseRun(pb.PauseRunRequest())
                    while not await at_rest(run, life):
                        await asyncio.sleep(0.05)
            async with run.controller() as life:
                await life.stub.ResumeRun(pb.ResumeRunRequest())
                await life.ends()
    assert set(asked.values()) == {1}
    assert balance(run) == (16, 16, 0, 0)


class LatePause(Ledger):
    """A ledger in whose store a pause is written late, and a resumption at once."""

    def __init__(self, ledger: Ledger) -> None:
        vars(self).update(vars(ledger))

    def pause(self, paused: bool) -> None:
        time.sleep(0.5 if paused else 0.0)
        super().pause(paused)


async def test_a_run_that_is_resumed_while_its_pause_is_written_is_not_paused_for_the_next_controller(
    light_run: LightRun,
) -> None:
    async with light_run() as run, run.controller() as life:
        controller = run.latest
        assert controller is not None
        await life.shows(lambda status: status.HasField("ledger"))
        controller._ledger = LatePause(controller._ledger)
        pausing = asyncio.ensure_future(life.stub.PauseRun(pb.PauseRunRequest()))
        await until(lambda: controller._board.paused)
        await life.stub.ResumeRun(pb.ResumeRunRequest())
        await pausing
        assert not run.ledger.position().paused


async def test_a_stop_without_any_rollout_left_does_not_wait_for_the_batch(light_run: LightRun) -> None:
    async with light_run(run={"num_steps": 1000}) as run, run.controller() as life:
        async with run.rollout("rollout-0", token_s=0.02):
            await life.reaches(1)
        await life.shows(lambda status: "none is alive" in status.waiting_for)
        await life.stub.StopRun(pb.StopRunRequest(checkpoint=True))
        await life.ends()
    assert run.newest().step == run.ledger.position().step


@pytest.mark.parametrize("is_paused", [False, True])
async def test_a_stop_does_not_wait_for_a_batch_that_nothing_more_is_admitted_for(
    light_run: LightRun, is_paused: bool
) -> None:
    filters = {"max_mean_tokens": 1, "max_dropped_per_step": 100_000}  # drops every group
    async with light_run(run={"num_steps": 1000}, algorithm={"groups_per_batch": 4, "filters": filters}) as run:
        async with run.rollout("rollout-0", token_s=0.005), run.controller() as life:
            await life.shows(lambda status: status.ledger.dropped["too_long"] > 4)
            if is_paused:
                await life.stub.PauseRun(pb.PauseRunRequest())
            await life.stub.StopRun(pb.StopRunRequest())
            await life.ends()
    assert run.ledger.position().step == 0


async def test_a_lost_store_takes_the_run_back_to_its_checkpoint_in_a_new_lineage(light_run: LightRun) -> None:
    async with light_run(run={"num_steps": 4}) as run:
        async with run.rollout("rollout-0"), run.controller() as life:
            await life.reaches(3)
        run.lose_the_store()
        run.actor.restart()
        await run.to_the_end("rollout-0")
    assert run.ledger.position().lineage == 1
    assert balance(run) == (16, 16, 0, 0)
    assert len(run.actor.trainer.trained) == 32


async def test_a_store_that_is_emptied_under_the_run_ends_it_with_the_cause_and_the_remedy(
    light_run: LightRun, store: StoreUnderTest
) -> None:
    async with light_run(run={"num_steps": 100_000}) as run, run.rollout("rollout-0"), run.controller() as life:
        await life.reaches(1)
        keys = list(store.connection.ledger.scan_iter(f"{{rl:{store.run}}}:*"))
        store.connection.command("DEL", *keys)
        with pytest.raises(
            StoreRolledBackError, match=r"the store was emptied: .*FLUSHALL.*--resume from the last checkpoint"
        ):
            await life.ends()


async def test_roles_that_outlived_the_store_obey_the_controller_of_the_new_lineage(light_run: LightRun) -> None:
    async with light_run(run={"num_steps": 6}) as run, run.rollout("rollout-0", token_s=0.005):
        for stop_at in (1, 2, 4):
            async with run.controller() as life:
                await life.reaches(stop_at)
        run.lose_the_store()
        run.actor.restart()
        await run.to_the_end()
    position = run.ledger.position()
    assert position.lineage == 1
    assert position.ctl > 1_000_000
    assert balance(run) == (24, 24, 0, 0)


async def test_prompts_that_a_lineage_has_yet_to_admit_are_in_its_first_checkpoint(light_run: LightRun) -> None:
    async with light_run(run={"num_steps": 4}, algorithm={"groups_per_batch": 4, "max_staleness": 1}) as run:
        checkpoints = run.checkpoints
        async with run.rollout("rollout-0", token_s=0.01), run.controller():
            await until(lambda: checkpoints.latest() is not None)
        before = checkpoints.latest()
        assert before is not None
        assert before[1].untrained
        run.lose_the_store()
        async with run.controller() as life:
            request = asyncio.ensure_future(life.saved())
            # it is asked before anything can be admitted: there is no rollout yet
            await until(lambda: run.latest and run.latest._board.checkpoint_requests)
            async with run.rollout("rollout-0", token_s=0.01):
                await request
                after = checkpoints.latest()
                assert after is not None
                assert (after[1].lineage, after[1].step) == (1, before[1].step)
                assert (after[1].untrained, after[1].waiting) == ([], before[1].untrained)
                await life.ends()
    assert balance(run)[1] == 16


async def test_a_lineage_that_was_begun_before_the_trainers_were_set_back_is_begun_once(light_run: LightRun) -> None:
    async with light_run(run={"num_steps": 4}) as run:
        async with run.rollout("rollout-0"), run.controller() as life:
            await life.reaches(3)
        latest = run.newest()
        point = latest
        run.lose_the_store()
        ledger = run.ledger
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
        await run.to_the_end("rollout-0")
    assert run.ledger.position().lineage == 1
    assert len(run.actor.trainer.trained) == 32
