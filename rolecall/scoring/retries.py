"""Attempting again to score items that have no score yet, the same for a client of one scorer and for many together.

Owns: which items are attempted again, the pauses between the attempts, and what is counted of them. Knows no
connection: what an attempt is, its caller says.
"""

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace

from rolecall.scoring.items import groups_of
from rolecall.scoring.scores import Failure, Outcome
from rolecall.telemetry.scorers import ScorerMeter
from rolecall.v1 import reward_pb2

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.2
LONGEST_PAUSE_S = 5.0
"""Pauses between attempts double from the first to the longest, each shortened at random by up to half."""


async def with_retries(
    attempt: Callable[[Sequence[reward_pb2.ScoreItem]], Awaitable[Sequence[Outcome]]],
    items: Sequence[reward_pb2.ScoreItem],
    max_attempts: int,
    meter: ScorerMeter,
    takes_whole_groups: Callable[[], bool],
) -> list[Outcome]:
    """Outcomes of `attempt`, in order; items whose failure is retryable are attempted again, `max_attempts` times in
    all, with the others of their groups where the scorer takes whole groups. `meter` counts them.

    A failure that is the item's by then (`is_blamed`) comes back as one that is not retryable.
    """
    with meter.call(len(items)):
        outcomes = await _attempted(attempt, items, max_attempts, meter, takes_whole_groups)
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    num_away = sum(failure.retryable for failure in failures)
    meter.count("scored", len(items) - len(failures))
    meter.count("failed", len(failures) - num_away)
    meter.count("away", num_away)
    return outcomes


async def _attempted(
    attempt: Callable[[Sequence[reward_pb2.ScoreItem]], Awaitable[Sequence[Outcome]]],
    items: Sequence[reward_pb2.ScoreItem],
    max_attempts: int,
    meter: ScorerMeter,
    takes_whole_groups: Callable[[], bool],
) -> list[Outcome]:
    outcomes = list(await attempt(items))
    for number in range(1, max_attempts):
        again = [index for index, outcome in enumerate(outcomes) if isinstance(outcome, Failure) and outcome.retryable]
        if not again:
            break
        # where none has a score, the scorer's own warning says so, once (peer.py), and many groups may be waiting
        level = logging.WARNING if len(again) < len(items) else logging.DEBUG
        if takes_whole_groups():
            again = [index for group in groups_of(items) if not set(group).isdisjoint(again) for index in group]
        logger.log(
            level,
            "%d of %d items have no score yet (attempt %d of %d): %s",
            len(again),
            len(items),
            number,
            max_attempts,
            outcomes[again[0]],
        )
        meter.retried(len(again))
        await asyncio.sleep(min(LONGEST_PAUSE_S, FIRST_PAUSE_S * 2 ** (number - 1)) * random.uniform(0.5, 1.0))
        for index, outcome in zip(again, await attempt([items[index] for index in again]), strict=True):
            outcomes[index] = outcome
    return [
        replace(outcome, retryable=False) if isinstance(outcome, Failure) and outcome.is_blamed else outcome
        for outcome in outcomes
    ]
