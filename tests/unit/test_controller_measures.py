"""How a step's wall time is split."""

import time
from dataclasses import replace

import numpy as np
import pytest

from services.controller.assembly import ScoredGroup
from services.controller.measures import Stopwatch

GROUP = ScoredGroup(0, (), 0, np.ones(2, np.float32), {}, np.full(2, 2, np.int32), np.zeros(2, bool), 0.1, 0.0, 0.0)


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
