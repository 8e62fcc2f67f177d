"""Whole light runs with ReMax: every group brings its greedy response, through restarts, filters and checkpoints, and
leaves nothing behind.
"""

import asyncio
from collections import Counter

import numpy as np

from rolecall.scoring.scores import Item
from rolecall.store.audit import Report, audit
from tests.conftest import MakeSettings
from tests.fixtures_store import StoreUnderTest
from tests.twins.run import LightRun, TwinRun, parity

REMAX = {"groups_per_batch": 4, "advantage": {"kind": "remax"}}


def audited(run: TwinRun) -> Report:
    return audit(run.store.connection, run.store.run, run.settings.run.dir)


async def test_a_run_trains_on_sampled_responses_only_and_deletes_greedy_rows_with_them(light_run: LightRun) -> None:
    seen: Counter[str] = Counter()

    def counting(item: Item) -> float:
        seen[item.id] += 1
        return parity(item)

    async with light_run(score=counting, algorithm=REMAX) as run:
        await run.to_the_end("rollout-0")
    assert sorted(run.actor.trainer.trained) == sorted(f"{gid}/{i}" for gid in range(12) for i in range(2))
    assert seen == {f"{gid}/{i}": 1 for gid in range(12) for i in range(3)}
    assert all(line["batch/trajectories"] == 8 and 0 <= line["reward/greedy"] <= 1 for line in run.metrics())
    report = audited(run)
    assert (report.problems, report.position.trained, report.num_live) == ((), 12, 0)
    assert (report.rows.needed, report.rows.garbage, report.rows.staged) == (0, 0, 0)


async def test_advantages_are_what_was_earned_above_the_greedy_response(
    light_run: LightRun, store: StoreUnderTest
) -> None:
    rewards: dict[str, float] = {}

    def noted(item: Item) -> float:
        return rewards.setdefault(item.id, parity(item))

    # The checkpoint that would free the rows is held up until they were read.
    async with light_run(score=noted, algorithm=REMAX, run={"num_steps": 1}) as run:
        run.actor.trainer.may_write.clear()
        async with run.controller() as life, run.rollout("rollout-0"):
            while not run.actor.trainer.trained:
                assert not life.running.done(), life.running.exception()
                await asyncio.sleep(0.01)
            batch = run.ledger.sealed(0)
            assert batch is not None
            rows = store.rows.read(list(batch.rows), ["advantages", "loss_mask"])
            for ref, row in zip(batch.rows, rows, strict=True):
                expected = rewards[ref.id] - rewards[f"{ref.id.partition('/')[0]}/2"]
                np.testing.assert_array_equal(
                    row["advantages"], np.where(row["loss_mask"] != 0, np.float32(expected), 0)
                )
            assert [ref.id for ref in batch.greedy_rows] == [f"{gid}/2" for gid in batch.gids]
            run.actor.trainer.may_write.set()
            await life.ends()


async def test_restarts_of_the_controller_keep_greedy_scores_and_rows(
    light_run: LightRun, store: StoreUnderTest
) -> None:
    seen: Counter[str] = Counter()

    def counting(item: Item) -> float:
        seen[item.id] += 1
        return parity(item)

    algorithm = {**REMAX, "max_staleness": 1}
    run_section = {"num_steps": 6, "checkpoint_every_steps": 2}
    async with (
        light_run(score=counting, algorithm=algorithm, run=run_section) as run,
        run.rollout("rollout-0", token_s=0.005),
    ):
        for stop_at in (1, 2, 4):
            async with run.controller() as life:
                await life.reaches(stop_at)
            report = audited(run)
            assert report.problems == ()
        await run.to_the_end()
    assert sorted(run.actor.trainer.trained) == sorted(f"{gid}/{i}" for gid in range(24) for i in range(2))
    assert set(seen) == {f"{gid}/{i}" for gid in range(24) for i in range(3)}
    report = audited(run)
    assert (report.problems, report.position.trained, report.num_live, report.rows.needed) == ((), 24, 0, 0)
    assert not [key for key in store.connection.rows.scan_iter(match=f"{{rl:{store.run}:*") if b"}:row:" in key]


async def test_a_trainer_that_lost_its_steps_is_replayed_while_greedy_rows_are_still_there(light_run: LightRun) -> None:
    async with light_run(algorithm=REMAX, run={"num_steps": 4, "checkpoint_every_steps": 10}) as run:
        async with run.rollout("rollout-0"):
            async with run.controller() as life:
                await life.reaches(2)
            report = audited(run)
            assert report.problems == ()
            assert report.rows.needed >= 2 * 4 * 3  # two trained batches that no checkpoint covers, whole
            before = list(run.actor.trainer.trained)
            run.actor.restart()
            await run.to_the_end()
    assert run.actor.trainer.trained[: len(before)] == before
    assert audited(run).problems == ()


async def test_a_group_that_earns_what_its_greedy_response_earns_is_filtered_with_all_its_rows(
    light_run: LightRun,
) -> None:
    def score(item: Item) -> float:
        """Of every third group all responses earn the same, of the next only the greedy one earns less."""
        gid, index = map(int, item.id.split("/"))
        return 1.0 if gid % 3 < 2 and not (gid % 3 == 1 and index == 2) else float(index == 0)

    algorithm = {**REMAX, "filters": {"without_signal": True}}
    async with light_run(score=score, algorithm=algorithm) as run:
        await run.to_the_end("rollout-0")
    report = audited(run)
    trained = {int(id.partition("/")[0]) for id in run.actor.trainer.trained}
    assert (report.problems, report.rows.needed, report.rows.garbage, len(trained)) == ((), 0, 0, 12)
    assert {gid % 3 for gid in trained} == {1, 2}
    assert report.position.dropped["without_signal"] >= 4


async def test_groups_of_another_estimator_are_dropped_and_counted_after_a_change(
    light_run: LightRun, make_settings: MakeSettings
) -> None:
    async with light_run(algorithm={"groups_per_batch": 4}) as run, run.rollout("rollout-0", token_s=0.005):
        async with run.controller() as life:
            await life.reaches(1)
        run.settings = run.settings.model_copy(
            update={
                "algorithm": make_settings(
                    **{**run.settings.model_dump(exclude_defaults=True), "algorithm": REMAX}
                ).algorithm
            }
        )
        await run.to_the_end()
    report = audited(run)
    assert report.problems == ()
    assert set(report.position.dropped) <= {"no_greedy_response"}
    assert report.position.trained == 12
