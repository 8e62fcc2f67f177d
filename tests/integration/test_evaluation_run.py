"""Held-out evaluation in whole light runs: what is reported of several responses to a prompt follows from their rewards
and answers.
"""

import asyncio
import json
from collections import defaultdict
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import pytest

from rolecall.algorithms.pass_and_majority import pass_at_k
from rolecall.errors import ScorerUnavailableError
from rolecall.scoring.scores import Item, Score, ScoreFunction
from rolecall.v1 import controller_pb2
from services.controller.fleet import members
from services.rollout.sampling import Sample, SampleRequest
from services.rollout.scripted import ScriptedEngine
from tests.conftest import MakeSettings
from tests.fixtures_store import StoreUnderTest
from tests.twins.run import TwinRun, parity, twin_run

RUN_S = 60.0


class SlowlyEvaluated(ScriptedEngine):
    """An engine that keeps what evaluations ask for until it may answer, but for the first `num_answered`."""

    def __init__(self, num_answered: int = 0) -> None:
        super().__init__(token_s=0.0, vocab_size=200)
        self.may_answer, self.is_waiting = asyncio.Event(), asyncio.Event()
        self._num_answered = num_answered

    async def sample(self, request: SampleRequest) -> Sample:
        """Implements SamplingEngine.sample."""
        if request.request_id.startswith("eval/"):
            self._num_answered -= 1
            if self._num_answered < 0:
                self.is_waiting.set()
                await self.may_answer.wait()  # bounded: by the run's end
        return await super().sample(request)


def answering(item: Item) -> Score:
    """The answer is one of four, or none; one of the four is right."""
    answer = None if item.num_response_tokens % 5 == 0 else str(item.num_response_tokens % 4)
    return Score(float(answer == "1"), answer=answer)


async def evaluated(
    store: StoreUnderTest, folder: Path, make_settings: MakeSettings, score: ScoreFunction, **sets: dict[str, Any]
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Metrics and samples of the evaluation at step 0; every response is kept as a sample."""
    (folder / "held.jsonl").write_text(
        "".join(
            json.dumps({"prompt": f"held {i}", "ground_truth": "1", "source": ("even", "odd")[i % 2]}) + "\n"
            for i in range(6)
        )
    )
    sections = {
        "sets": {name: {"path": str(folder / "held.jsonl"), **section} for name, section in sets.items()},
    }
    kept = {"tensorboard": False, "num_samples_kept": None}
    async with twin_run(
        store, folder, make_settings, score=score, run={"num_steps": 1}, evaluation=sections, trackers=kept
    ) as run:
        async with run.controller() as (_, running, _), run.rollout("rollout-0"):
            await asyncio.wait_for(running, RUN_S)
        lines = [json.loads(line) for line in (run.settings.run.dir / "metrics.jsonl").read_text().splitlines()]
        samples = [json.loads(line) for line in (run.settings.run.dir / "samples.jsonl").read_text().splitlines()]
    first = next(line for line in lines if any(name.startswith("eval/") for name in line))
    return first, [sample for sample in samples if sample["set"] != "train" and sample["step"] == 0]


async def test_pass_and_majority_of_a_set_follow_from_its_responses(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    many, one = {"num_responses": 6, "temperature": 1.0}, {"num_responses": 1}
    metrics, samples = await evaluated(store, tmp_path, make_settings, answering, many=many, greedy=one)
    names = {name.partition("/")[2] for name in metrics if name.startswith("eval/many/") and "@" in name}
    assert names == {"many/mean@6"} | {f"many/{kind}@{k}" for kind in ("pass", "maj") for k in (1, 2, 4, 6)}
    assert {name for name in metrics if name.startswith("eval/greedy/") and "@" in name} == {
        f"eval/greedy/{kind}@1" for kind in ("mean", "pass", "maj")
    }
    by_prompt: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        if sample["set"] == "many":
            by_prompt[sample["id"].rpartition("/")[0]].append(sample["reward"])
    assert [len(rewards) for rewards in by_prompt.values()] == [6] * 6
    kept = [sample for sample in samples if sample["set"] == "many"]
    assert [sample["id"].rpartition("/")[2] for sample in kept] == [str(i) for i in range(6) for _ in range(6)]
    assert metrics["eval/many/response_tokens"] == pytest.approx(fmean(sample["response_tokens"] for sample in kept))
    assert metrics["eval/many/truncated"] == pytest.approx(
        fmean(sample["finish_reason"] == "length" for sample in kept)
    )
    for k in (1, 2, 4, 6):
        expected = fmean(pass_at_k(6, int(sum(rewards)), k) for rewards in by_prompt.values())
        assert metrics[f"eval/many/pass@{k}"] == pytest.approx(expected)
    assert metrics["eval/many/mean@6"] == pytest.approx(metrics["eval/many/accuracy"])
    shares = [fmean(rewards) for rewards in by_prompt.values()]
    assert metrics["eval/many/standard_error"] == pytest.approx(stdev(shares) / len(shares) ** 0.5)
    for place, source in enumerate(("even", "odd")):
        rewards = [sample["reward"] for sample in kept if int(sample["id"].split("/")[-2]) % 2 == place]
        assert metrics[f"eval/many/source/{source}/reward"] == pytest.approx(fmean(rewards))
        assert metrics[f"eval/many/source/{source}/accuracy"] == pytest.approx(fmean(rewards))
        assert metrics[f"eval/many/source/{source}/prompts"] == 3
    # a vote of one is the response itself: only right ones have the answer 1
    assert metrics["eval/many/maj@1"] == pytest.approx(metrics["eval/many/pass@1"])
    assert 0 < metrics["eval/many/accuracy"] < 1


async def test_without_answers_there_is_no_vote_to_report(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    metrics, _ = await evaluated(store, tmp_path, make_settings, parity, many={"num_responses": 2, "temperature": 1.0})
    assert {name for name in metrics if "@" in name} == {"eval/many/mean@2", "eval/many/pass@1", "eval/many/pass@2"}


async def test_a_run_of_no_steps_evaluates_and_trains_nothing(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    (tmp_path / "held.jsonl").write_text('{"prompt": "held", "ground_truth": "1"}\n' * 3)
    sets = {"many": {"path": str(tmp_path / "held.jsonl"), "num_responses": 2, "temperature": 1.0}}
    sections: dict[str, Any] = {"run": {"num_steps": 0}, "evaluation": {"sets": sets}}
    async with twin_run(store, tmp_path, make_settings, score=answering, **sections) as run:
        await run.to_the_end("rollout-0")
        counts = run.ledger.counts()
        assert (counts.admitted, counts.trained, counts.live) == (0, 0, 0)
        assert run.actor.trainer.trained == []
        assert run.checkpoints.latest() is None
    (line,) = (json.loads(line) for line in (run.settings.run.dir / "metrics.jsonl").read_text().splitlines())
    assert line["eval/many/missing"] == 0
    assert {"eval/many/mean@2", "eval/many/pass@2", "eval/many/maj@2"} <= line.keys()


@pytest.mark.parametrize("every_steps", [0, 1])
async def test_the_evaluation_of_the_start_is_left_out_where_it_is_not_wanted(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings, every_steps: int
) -> None:
    section = {**beside(tmp_path), "every_steps": every_steps, "at_start": False}
    async with twin_run(store, tmp_path, make_settings, run={"num_steps": 2}, evaluation=section) as run:
        await run.to_the_end("rollout-0")
        assert evaluated_steps(run) == ({1: 0, 2: 0} if every_steps else {2: 0})


def beside(folder: Path, num_prompts: int = 3) -> dict[str, Any]:
    """The section of an evaluation after every step, beside the next."""
    (folder / "held.jsonl").write_text('{"prompt": "held", "ground_truth": "1"}\n' * num_prompts)
    return {"every_steps": 1, "beside": True, "sets": {"held": {"path": str(folder / "held.jsonl")}}}


def evaluations(run: TwinRun) -> list[tuple[int, float]]:
    """The step of each evaluation and the responses missing in it, as they were recorded."""
    lines = [json.loads(line) for line in (run.settings.run.dir / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["eval/held/missing"]) for line in lines if "eval/held/missing" in line]


def evaluated_steps(run: TwinRun) -> dict[int, float]:
    """Responses missing in each evaluation, by its step; none was made twice."""
    found = evaluations(run)
    assert len(dict(found)) == len(found)
    return dict(found)


async def test_beside_training_an_evaluation_is_waited_for_by_the_next_publish_alone(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    engine = SlowlyEvaluated()
    async with twin_run(store, tmp_path, make_settings, evaluation=beside(tmp_path)) as run:
        async with run.controller() as life, run.rollout("rollout-0", engine=engine):
            await life.shows(lambda status: status.waiting_for == "the evaluation of step 0")
            assert run.ledger.counts().trained == 4  # groups: one step was sampled, trained and counted meanwhile
            assert [step for step, _ in run.actor.trainer.publishes] == [0]
            engine.may_answer.set()
            await life.ends()
        assert evaluated_steps(run) == {0: 0, 1: 0, 2: 0, 3: 0}  # nobody was asked who held other weights
        assert [line["step"] for line in run.metrics()] == [1, 2, 3]
        assert run.metrics()[0]["time/evaluation_s"] > 0


async def test_a_rollout_that_is_given_up_in_an_evaluation_ends_nothing(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its connection is closed under the call that it still answers; the run goes on."""
    monkeypatch.setattr(members, "LINGER_S", 0.5)
    slow = SlowlyEvaluated()
    async with twin_run(store, tmp_path, make_settings, evaluation=beside(tmp_path)) as run:
        async with run.controller() as life, run.rollout("rollout-0", engine=slow):
            await life.shows(lambda status: status.waiting_for == "the evaluation of step 0")
            run.memberships["rollout-0"].stop()  # it lives, and is heard no more
            await life.shows(lambda status: any(worker.lost for worker in status.workers))
            async with run.rollout("rollout-1"):
                await life.ends()
        assert evaluated_steps(run) == {1: 0, 2: 0, 3: 0}  # nobody could bring the weights of step 0 any more
        assert run.ledger.counts().trained == 12


async def test_an_evaluation_whose_only_rollout_dies_goes_on_with_the_next_one(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    engine = SlowlyEvaluated(num_answered=2)
    section = {**beside(tmp_path, num_prompts=30), "beside": False}
    async with twin_run(store, tmp_path, make_settings, run={"num_steps": 1}, evaluation=section) as run:
        async with run.controller() as life:
            async with run.rollout("rollout-0", engine=engine):
                await asyncio.wait_for(engine.is_waiting.wait(), RUN_S)
            await life.shows(lambda status: any(worker.lost for worker in status.workers))
            async with run.rollout("rollout-1"):
                await life.ends()
        assert evaluated_steps(run) == {0: 0, 1: 0}
        assert [step for step, _ in run.actor.trainer.publishes] == [0, 0, 1]


async def test_an_evaluation_waits_for_its_scorer(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    num_refused = 0

    def restarting(item: Item) -> float:
        nonlocal num_refused
        if item.id.startswith("eval/0/") and num_refused < 10:  # three items, more often than one call asks
            num_refused += 1
            raise ScorerUnavailableError("it restarts")
        return parity(item)

    section = {**beside(tmp_path), "beside": False}
    async with twin_run(store, tmp_path, make_settings, score=restarting, evaluation=section) as run:
        await run.to_the_end("rollout-0")
        assert evaluated_steps(run) == {0: 0, 1: 0, 2: 0, 3: 0}


@pytest.mark.parametrize("is_beside", [False, True])
async def test_a_stop_leaves_an_evaluation_out_and_a_run_that_goes_on_from_its_step_makes_it(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings, is_beside: bool
) -> None:
    engine = SlowlyEvaluated()
    section = {**beside(tmp_path), "beside": is_beside}
    async with twin_run(store, tmp_path, make_settings, evaluation=section) as run:
        async with run.rollout("rollout-0", engine=engine):
            async with run.controller() as life:
                await life.shows(lambda status: status.waiting_for == "the evaluation of step 0")
                await life.stub.StopRun(controller_pb2.StopRunRequest(checkpoint=True))
                await life.ends()
                stopped_at = (await life.status()).step
                assert run.newest().step == stopped_at
            engine.may_answer.set()
            await run.to_the_end()
        assert stopped_at == int(is_beside)  # a step was trained beside it
        assert evaluated_steps(run) == dict.fromkeys(range(stopped_at, 4), 0)


async def test_a_controller_killed_beside_an_evaluation_goes_on_with_the_next(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    engine = SlowlyEvaluated()
    async with twin_run(store, tmp_path, make_settings, evaluation=beside(tmp_path)) as run:
        async with run.rollout("rollout-0", engine=engine):
            async with run.controller() as life:
                await life.shows(lambda status: status.waiting_for == "the evaluation of step 0")
            engine.may_answer.set()
            async with run.controller() as life:
                await life.ends()
        assert evaluated_steps(run) == {1: 0, 2: 0, 3: 0}  # the weights of step 0 were gone
        assert run.ledger.counts().trained == 12


@pytest.mark.parametrize("is_beside", [False, True])
async def test_a_controller_that_takes_the_run_repeats_no_evaluation_that_was_recorded(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings, is_beside: bool
) -> None:
    section = {**beside(tmp_path), "beside": is_beside}
    async with twin_run(store, tmp_path, make_settings, evaluation=section) as run:
        async with run.rollout("rollout-0"):
            async with run.controller() as life:
                await life.stub.PauseRun(controller_pb2.PauseRunRequest())
                await life.shows(lambda status: any(metric.name == "eval/held/missing" for metric in status.metrics))
            async with run.controller() as life:
                await life.stub.ResumeRun(controller_pb2.ResumeRunRequest())
                await life.ends()
            await run.to_the_end()
        assert evaluated_steps(run) == {0: 0, 1: 0, 2: 0, 3: 0}


async def test_weights_trained_anew_from_a_checkpoint_are_evaluated_again_and_those_of_the_checkpoint_are_not(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    section = {**beside(tmp_path), "beside": False}
    async with twin_run(store, tmp_path, make_settings, run={"num_steps": 3}, evaluation=section) as run:
        async with run.rollout("rollout-0", token_s=0.02):  # else the last checkpoint may be there, too
            async with run.controller() as life:
                await life.reaches(3)
                assert run.newest().step == 2
            run.lose_the_store()
            run.actor.restart()
            await run.to_the_end()
        steps = [step for step, _ in evaluations(run)]
        assert steps in ([0, 1, 2, 3], [0, 1, 2, 3, 3])  # the first life was ended before it, or after
        assert evaluations(run)[-1] == (3, 0)
