"""Attempting again to score items that have no score yet, the same for a client of one scorer and for many together.

Owns: which items are attempted again, the pauses between the attempts, and what is counted and told of them. Knows no
connection: what an attempt is, its caller says.
"""

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TypeAlias

from rolecall.scoring.items import groups_of
from rolecall.scoring.scores import Failure, Outcome
from rolecall.telemetry.scorers import ScorerMeter
from rolecall.v1 import reward_pb2

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
"""Pauses between attempts double from the first to the longest, each shortened at random by up to half."""
TOLD_EVERY_S = 30.0
"""Least time between two lines about a scorer's attempts: all groups that wait for one that is away make some."""

Attempt: TypeAlias = Callable[[Sequence[reward_pb2.ScoreItem]], Awaitable[Sequence[Outcome]]]


class Retries:
    """Attempts to score items by one scorer, each made again where that may help."""

    def __init__(
        self,
        max_attempts: int,
        meter: ScorerMeter,
        takes_whole_groups: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`max_attempts` for each item; `meter` counts them. takes_whole_groups: whether items are attempted again with
        the others of their groups.
        """
        self._max_attempts = max_attempts
        self._meter = meter
        self._takes_whole_groups = takes_whole_groups
        self._clock = clock
        self._told_at = float("-inf")
        self._num_untold = 0

    async def outcomes(self, attempt: Attempt, items: Sequence[reward_pb2.ScoreItem]) -> list[Outcome]:
        """Outcomes of `attempt`, in order; items whose failure is retryable are attempted again. A failure that is the
        item's by then (`is_blamed`) comes back as one that is not retryable.
        """
        with self._meter.call(len(items)):
            outcomes = await self._attempted(attempt, items)
        failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
        num_away = sum(failure.retryable for failure in failures)
        self._meter.count("scored", len(items) - len(failures))
        self._meter.count("failed", len(failures) - num_away)
        self._meter.count("away", num_away)
        return outcomes

    async def _attempted(self, attempt: Attempt, items: Sequence[reward_pb2.ScoreItem]) -> list[Outcome]:
        outcomes = list(await attempt(items))
        for number in range(1, self._max_attempts):
            again = [
                index for index, outcome in enumerate(outcomes) if isinstance(outcome, Failure) and outcome.retryable
            ]
            if not again:
                break
            if self._takes_whole_groups():
                again = [index for group in groups_of(items) if not set(group).isdisjoint(again) for index in group]
            self._tell(f"{len(again)} of {len(items)} items have no score yet", number, outcomes[again[0]])
            self._meter.retried(len(again))
            await asyncio.sleep(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (number - 1)) * random.uniform(0.5, 1.0))
            for index, outcome in zip(again, await attempt([items[index] for index in again]), strict=True):
                outcomes[index] = outcome
        return [
            replace(outcome, retryable=False) if isinstance(outcome, Failure) and outcome.is_blamed else outcome
            for outcome in outcomes
        ]

    def _tell(self, what: str, number: int, outcome: Outcome) -> None:
        now = self._clock()
        if now - self._told_at < TOLD_EVERY_S:
            self._num_untold += 1
            return
        untold = f", after {self._num_untold} that were not told" if self._num_untold else ""
        logger.warning("%s (attempt %d of %d%s): %s", what, number, self._max_attempts, untold, outcome)
        self._told_at, self._num_untold = now, 0
