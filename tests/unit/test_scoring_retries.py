"""Attempts to score items again: what is told of them, by a clock that tests move."""

import logging
from collections.abc import Sequence

import pytest

from rolecall.scoring import retries
from rolecall.scoring.retries import TOLD_EVERY_S, Retries
from rolecall.scoring.scores import Failure, Outcome
from rolecall.telemetry.scorers import ScorerMeter
from rolecall.v1 import reward_pb2


async def test_attempts_at_a_scorer_that_is_away_are_told_now_and_then_with_their_number(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "FIRST_PAUSE_S", 0.0)
    caplog.set_level(logging.INFO)
    times, away = [0.0, 1.0, TOLD_EVERY_S - 1, TOLD_EVERY_S, 3 * TOLD_EVERY_S], Failure("GONE", "away", retryable=True)

    async def attempt(items: Sequence[reward_pb2.ScoreItem]) -> list[Outcome]:
        return [away] * len(items)

    asked = Retries(3, ScorerMeter("it"), lambda: False, lambda: times[0])
    while times:
        assert await asked.outcomes(attempt, [reward_pb2.ScoreItem(id="1")]) == [away]
        times.pop(0)
    assert [message.partition(": ")[0] for message in caplog.messages] == [
        "1 of 1 items have no score yet (attempt 1 of 3)",
        "1 of 1 items have no score yet (attempt 1 of 3, after 5 that were not told)",
        "1 of 1 items have no score yet (attempt 1 of 3, after 1 that were not told)",
    ]
