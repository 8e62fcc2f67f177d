"""How a step's wall time is split."""

import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rolecall.wire import Array
from services.controller.groups.assembly import EpisodeEnd, ScoredGroup
from services.controller.step.measures import Stopwatch, of_batch
from services.controller.step.preparation import columns_reported
from tests.unit.test_controller_batches import group, row, run_settings

ONES = np.ones(2, np.float32)
GROUP = ScoredGroup(0, (), 0, ONES, ONES, {}, np.full(2, 2, np.int32), np.zeros(2, bool), 0.1, 0.0, 0.0)


def landed(at_s: float, scored_at_s: float) -> ScoredGroup:
    return replace(GROUP, landed_at_s=at_s, scored_at_s=scored_at_s)


def test_generation_lasts_until_the_last_group_lands_and_scoring_is_only_what_it_did_not_hide() -> None:
    clock = Stopwatch()
    now = time.monotonic()
    values = clock.waited([landed(now + 10, now + 12), landed(now + 20, now + 20.5)]).values()
    assert values["time/generation_s"] >= 20
    assert values["time/scoring_s"] == pytest.approx(0.5)


def test_a_group_that_landed_before_the_step_costs_it_nothing() -> None:
    now = time.monotonic()
    values = Stopwatch().waited([landed(now - 5, now - 4)]).values()
    assert values == {"time/generation_s": 0.0, "time/scoring_s": 0.0}


def test_what_is_left_out_is_in_no_lap_and_not_in_the_step() -> None:
    clock = Stopwatch()
    time.sleep(0.01)
    before = time.monotonic()
    clock.leave_out()
    clock.lap("wait")
    values = clock.metrics([GROUP]).values()
    assert values["time/wait_s"] == pytest.approx(values["time/step_s"])
    assert values["time/step_s"] <= time.monotonic() - before


def test_episodes_are_told_by_their_turns_and_by_what_ended_them() -> None:
    settings = run_settings(algorithm={"groups_per_batch": 1})
    played = replace(
        group(1, 1.0, 0.0), episodes=(EpisodeEnd(3, 2, 0, 7, 2, "terminated"), EpisodeEnd(5, 4, 1, 0, 1, "turns"))
    )
    played.rows[0].segment_starts.extend([5, 9])
    values = of_batch(settings, 0, [played], [row(1), row(1)], {}).values()
    told = {name: value for name, value in values.items() if name.startswith("episode/")}
    assert told == {
        "episode/segments": 2.0,
        "episode/turns": 4.0,
        "episode/turns_max": 5.0,
        "episode/tool_calls": 3.0,
        "episode/malformed": 0.5,
        "episode/cut_observation_tokens": 3.5,
        "episode/images": 1.5,
        "episode/terminated": 0.5,
        "episode/truncated": 0.0,
        "episode/out_of_turns": 0.5,
        "episode/out_of_tokens": 0.0,
        "episode/out_of_time": 0.0,
        "episode/out_of_images": 0.0,
        "episode/out_of_calls": 0.0,
    }


def test_the_reverse_kl_is_the_old_policys_and_the_samplers_where_a_sealed_batch_has_no_other() -> None:
    """A batch that was sealed under other settings is taken up as it is: nobody computes old_logprobs for it any
    more.
    """
    settings = run_settings(
        algorithm={"groups_per_batch": 1, "distillation": {"teacher": "wise"}}, references={"wise": {}}
    )
    assert "old_logprobs" not in columns_reported(settings)
    sampled: dict[str, Array] = {**row(1), "teacher/logprobs": np.array([0, 0, -0.75, -0.75], np.float32)}
    computed = {**sampled, "old_logprobs": np.array([0, 0, -0.25, -0.25], np.float32)}
    for contents, expected in ((sampled, 0.375), (computed, 0.5)):
        values = of_batch(settings, 0, [group(1, 1.0)], [contents], {}).values()
        assert values["distillation/reverse_kl"] == pytest.approx(expected)
        assert values["distillation/held_tokens"] == 0.0


@pytest.mark.parametrize(
    ("distillation", "held"),
    [
        ({"max_log_ratio": 0.5}, 0.5),
        ({"max_log_ratio": None}, None),
        ({"placement": "loss", "max_log_ratio": 0.2}, 1.0),
        ({"placement": "loss", "top_k": 4}, None),
    ],
)
def test_the_share_of_tokens_that_the_bound_of_distillation_holds_is_told(
    distillation: dict[str, Any], held: float | None
) -> None:
    settings = run_settings(
        algorithm={"groups_per_batch": 1, "distillation": {"teacher": "wise", **distillation}}, references={"wise": {}}
    )
    contents: dict[str, Array] = {**row(1), "teacher/logprobs": np.array([0, 0, -1.25, -0.75], np.float32)}
    values = of_batch(settings, 0, [group(1, 1.0)], [contents], {}).values()
    assert values.get("distillation/held_tokens") == held
