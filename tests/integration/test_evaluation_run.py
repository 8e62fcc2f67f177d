"""Held-out evaluation in whole light runs: what is reported of several responses to a prompt follows from their rewards
and answers.
"""

import asyncio
import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from rolecall.algorithms.pass_and_majority import pass_at_k
from rolecall.scoring.scores import Item, Score, ScoreFunction
from rolecall.settings import RunSettings
from tests.fixtures_store import StoreUnderTest
from tests.twins.run import parity, twin_run

MakeSettings = Callable[..., RunSettings]
RUN_S = 60.0


def answering(item: Item) -> Score:
    """The answer is one of four, or none; one of the four is right."""
    answer = None if item.num_response_tokens % 5 == 0 else str(item.num_response_tokens % 4)
    return Score(float(answer == "1"), answer=answer)


async def evaluated(
    store: StoreUnderTest, folder: Path, make_settings: MakeSettings, score: ScoreFunction, **sets: dict[str, Any]
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Metrics and samples of the evaluation at step 0; every response is kept as a sample."""
    (folder / "held.jsonl").write_text(
        "".join(json.dumps({"prompt": f"held {i}", "ground_truth": "1"}) + "\n" for i in range(6))
    )
    sections = {
        "sets": {name: {"path": str(folder / "held.jsonl"), **section} for name, section in sets.items()},
    }
    kept = {"tensorboard": False, "num_samples_kept": 1000}
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
    for k in (1, 2, 4, 6):
        expected = fmean(pass_at_k(6, int(sum(rewards)), k) for rewards in by_prompt.values())
        assert metrics[f"eval/many/pass@{k}"] == pytest.approx(expected)
    assert metrics["eval/many/mean@6"] == pytest.approx(metrics["eval/many/accuracy"])
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
