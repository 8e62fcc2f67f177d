"""Whole runs with light roles whose groups are filtered, whose coefficients adapt and whose prompts are chosen by
success: counts, budgets, restarts.
"""

import asyncio
import json
from collections import Counter
from typing import Any

import pytest

from rolecall.errors import BudgetSpentError, ConfigError
from rolecall.scoring.scores import Item, Score
from rolecall.telemetry import Metrics
from rolecall.v1 import controller_pb2 as pb
from rolecall.v1.trajectory_pb2 import TrainBatch
from services.controller.step.adaptive import AdaptiveState
from tests.fixtures_store import StoreUnderTest
from tests.twins.run import RUN_S, LightRun, TwinRun, parity
from tests.twins.trainer import ActorTwin
from tests.waiting import until

ADAPTIVE: dict[str, Any] = {
    "groups_per_batch": 4,
    "entropy": {"entropy_coef": 0.001, "target": 0.5, "coef_step": 0.0005},
    "shaping": {"normalize": "running"},
}


def counts_of(run: TwinRun) -> dict[str, int]:
    """Groups dropped, by reason; the ledger balances, and every batch was full."""
    counts = run.ledger.counts()
    assert counts.admitted == counts.trained + sum(counts.dropped.values()) + counts.live
    assert counts.trained == 4 * len(run.actor.trainer.records)
    return dict(counts.dropped)


def by_number(item: Item) -> float:
    """With 0.5 for solved: of four prompts one has no signal, one is solved, one is hopeless and one depends on the
    response.
    """
    first = item.id.endswith("/0")
    return {0: 0.25, 1: 0.7 if first else 0.6, 2: 0.2 if first else 0.1}.get(int(item.ground_truth) % 4, parity(item))


async def test_batches_are_full_of_groups_that_passed_and_every_drop_has_its_reason(light_run: LightRun) -> None:
    filters = {"without_signal": True, "min_success_rate": 0.1, "max_success_rate": 0.9}
    algorithm = {"groups_per_batch": 4, "max_staleness": 1, "filters": filters}
    async with light_run(score=by_number, algorithm=algorithm, reward={"solved_at": 0.5}) as run:
        await run.to_the_end("rollout-0")
    dropped = counts_of(run)
    assert set(dropped) == {"without_signal", "too_hard", "too_easy"}
    assert len(run.actor.trainer.trained) == 3 * 4 * 2
    last = run.metrics()[-1]
    assert last["groups/without_signal"] == 0
    assert {name: last[f"groups/dropped_{name}"] for name in dropped} == dropped
    assert last["groups/dropped"] == sum(dropped.values())


def by_two_parts(item: Item) -> Score:
    """Every response earns another reward; of every other prompt all are right."""
    right = 1.0 if int(item.ground_truth) % 2 else parity(item)
    return Score((right + item.num_response_tokens / 100) / 2, {"right": right})


async def test_groups_that_differ_in_their_reward_alone_are_dropped_by_a_component(light_run: LightRun) -> None:
    filters = {"without_signal": True, "component": "right"}
    algorithm = {"groups_per_batch": 4, "filters": filters, "curriculum": {"max_success_rate": 0.9}}
    async with light_run(score=by_two_parts, components={"right": (0.0, 1.0)}, algorithm=algorithm) as run:
        await run.to_the_end("rollout-0")
        rates = {int(uid) - 1: rate.rate for uid, rate in run.ledger.rates().items()}
    assert {rate for number, rate in rates.items() if number % 2} == {1.0}, "no whole reward reaches solved_at"
    assert 0.5 in rates.values()
    assert set(counts_of(run)) == {"without_signal"}
    assert [line["reward/right"] for line in run.metrics()] == [0.5] * 3, "of two responses one is right"


async def test_a_component_that_the_scorer_does_not_have_ends_the_run_before_its_first_step(
    light_run: LightRun,
) -> None:
    filters = {"without_signal": True, "component": "wrong"}
    async with light_run(
        score=by_two_parts, components={"right": (0.0, 1.0)}, algorithm={"groups_per_batch": 4, "filters": filters}
    ) as run:
        with pytest.raises(ConfigError, match=r"component 'wrong': .* it has \['right'\]; name one of them"):
            await run.to_the_end("rollout-0")


async def test_a_run_whose_filters_drop_too_much_ends_and_says_how_much_of_what(light_run: LightRun) -> None:
    filters = {"without_signal": True, "max_dropped_per_step": 5}
    async with light_run(score=lambda item: 1.0, algorithm={"groups_per_batch": 4, "filters": filters}) as run:
        with pytest.raises(
            BudgetSpentError,
            match=r"dropped 6 groups within a step \(6 without_signal\), "
            r"more than algorithm\.filters\.max_dropped_per_step = 5: the responses to a prompt earn the same",
        ):
            await run.to_the_end("rollout-0")
    assert counts_of(run)["without_signal"] >= 6


async def test_what_is_filtered_is_forgotten_with_its_rows_and_not_at_the_next_checkpoint(
    light_run: LightRun, store: StoreUnderTest
) -> None:
    """Every group is filtered, so that no step and no checkpoint ever comes. Paused, nothing is under way."""
    algorithm = {"groups_per_batch": 4, "filters": {"without_signal": True, "max_dropped_per_step": 10**6}}
    async with light_run(score=lambda item: 1.0, algorithm=algorithm) as run:
        ledger = run.ledger
        async with run.controller() as life, run.rollout("rollout-0"):
            async with asyncio.timeout(RUN_S):
                while ledger.counts().dropped["without_signal"] < 6:
                    assert not life.running.done(), life.running.exception()
                    await asyncio.sleep(0.01)
                await life.stub.PauseRun(pb.PauseRunRequest())
                garbage = f"{{rl:{store.run}}}:garbage"
                await until(lambda: not ledger.counts().live and not store.connection.command("HLEN", garbage))
    assert not [key for key in store.connection.ledger.scan_iter(f"{{rl:{store.run}:*") if b":row:" in key]


class MeasuringActor(ActorTwin):
    """Says an entropy that depends on what it trained."""

    def metrics_of(self, batch: TrainBatch) -> Metrics:
        metrics = Metrics()
        metrics.mean("actor/entropy", (int(batch.digest[:4], 16) % 100) / 100)
        return metrics


async def states_by_step(run: TwinRun) -> list[bytes]:
    """What each step should leave, from what it was sealed with and what the actor recorded."""
    ledger, state = run.ledger, AdaptiveState.start(run.settings.algorithm)
    states = [b""]
    for step, record in enumerate(run.actor.trainer.records):
        batch = ledger.sealed(step)
        assert batch is not None
        coef = batch.coefficients.entropy_coef
        assert coef in (0.0, state.control.entropy_coef), "a batch is sealed with what the step before left"
        state = state.after(run.settings.algorithm, batch, [record])
        states.append(state.encode(run.settings.algorithm))
    return states


async def test_what_adapts_is_carried_from_step_to_step_by_however_many_controllers(
    light_run: LightRun, store: StoreUnderTest
) -> None:
    section = {"num_steps": 6, "checkpoint_every_steps": 1000}
    async with light_run(algorithm=ADAPTIVE, run=section) as run, run.rollout("rollout-0", token_s=0.002):
        run.actor.restart(MeasuringActor(store.rows))
        for stop_at in (1, 3, 4):
            async with run.controller() as life:
                await life.reaches(stop_at)
        position = run.ledger.position()
        assert position.algorithm_state == (await states_by_step(run))[position.step]
        await run.to_the_end()
    latest = run.newest()
    position = run.ledger.position()
    assert latest.algorithm_state.encode() == position.algorithm_state
    state = AdaptiveState.decode(run.settings.algorithm, position.algorithm_state)
    assert state.rewards.num == 6 * 8
    coefs = [line["algorithm/entropy_coef"] for line in run.metrics()]
    assert len(set(coefs)) > 1, "the coefficient never moved"


async def test_a_lineage_begins_with_the_state_of_its_checkpoint(light_run: LightRun) -> None:
    async with light_run(algorithm=ADAPTIVE, run={"num_steps": 4}) as run:
        async with run.rollout("rollout-0"), run.controller() as life:
            await life.reaches(3)
        run.lose_the_store()
        run.actor.restart()
        await run.to_the_end("rollout-0")
    state = AdaptiveState.decode(run.settings.algorithm, run.ledger.position().algorithm_state)
    assert state.rewards.num == 4 * 8, "each batch counts once, also those that were trained again"


def visits(run: TwinRun) -> Counter[str]:
    """How often each prompt was admitted."""
    lines = [json.loads(line) for line in (run.settings.run.dir / "history.jsonl").read_text().splitlines()]
    return Counter(line["prompt"] for line in lines if line["event"] == "admitted")


async def test_solved_prompts_are_visited_less_often_also_by_the_next_controller(light_run: LightRun) -> None:
    solved = {str(number) for number in range(20)}

    def score(item: Item) -> float:
        return 1.0 if item.ground_truth in solved else parity(item) / 2

    curriculum = {"max_success_rate": 0.9, "revisit_epochs": 5}
    algorithm = {"groups_per_batch": 4, "curriculum": curriculum}
    async with (
        light_run(
            score=score,
            algorithm=algorithm,
            run={"num_steps": 15, "checkpoint_every_steps": 100},
        ) as run,
        run.rollout("rollout-0"),
    ):
        async with run.controller() as life:
            await life.reaches(6)
        rates = run.ledger.rates()
        assert {rate.rate for uid, rate in rates.items() if str(int(uid) - 1) in solved} == {1.0}
        await run.to_the_end()
    counted = visits(run)
    assert counted.total() == 60
    outside = [counted[str(number + 1)] for number in range(20)]
    inside = [counted[str(number + 1)] for number in range(20, 30)]
    assert min(inside) >= max(outside), (inside, outside)
    assert min(outside) >= 1
    assert sum(outside) / 20 < 0.6 * sum(inside) / 10
