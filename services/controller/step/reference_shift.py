"""The columns of references that share devices with rollouts and trainers: asked for a batch at a time, in their shift.

Owns the wait for a reference that is away: it loads when its shift has come. What is asked of whom is said by each
group (groups/group_scorer.py). Frozen weights give the same columns whenever they are asked, so nothing is remembered:
whoever starts over asks again, and rows that hold a column are not computed twice.
"""

import asyncio
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from rolecall.errors import BudgetSpentError, DeadlineError, UnavailableError
from rolecall.settings import RunSettings
from rolecall.v1 import training_pb2, trajectory_pb2
from rolecall.v1.reference_pb2_grpc import ReferenceServiceStub
from services.controller.groups.assembly import ScoredGroup
from services.controller.tasks import at_once

logger = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.5
"""Pause before a reference that was away is asked again."""


@dataclass(frozen=True)
class ReferenceShift:
    """The calls of one life of the loop to references in their shift."""

    settings: RunSettings
    references: Mapping[str, ReferenceServiceStub]
    ctl: int

    async def score(self, groups: Sequence[ScoredGroup]) -> None:
        """The references' columns are in the rows of `groups` when this returns. DeviceFullError; BudgetSpentError when
        one was away for controller.stall_timeout_s.
        """
        rows: dict[tuple[str, str], list[trajectory_pb2.RowRef]] = {}
        for group in groups:
            for asked in group.references:
                rows.setdefault(asked, []).extend(group.rows)
        await at_once([self._ask(name, prefix, refs) for (name, prefix), refs in rows.items()])

    async def _ask(self, name: str, prefix: str, refs: Sequence[trajectory_pb2.RowRef]) -> None:
        request = training_pb2.ComputeColumnRequest(ctl=self.ctl, rows=refs, prefix=prefix)
        timeout_s, patience_s = self.settings.actor.compute_timeout_s, self.settings.controller.stall_timeout_s
        give_up_at = time.monotonic() + patience_s
        while True:
            try:
                await self.references[name].ComputeLogprobs(request, timeout=timeout_s)
                return
            except (UnavailableError, DeadlineError) as error:
                if time.monotonic() > give_up_at:
                    raise BudgetSpentError(
                        f"reference {name} did not score the batch within controller.stall_timeout_s = "
                        f"{patience_s:.0f} s; see its log: {error.message}"
                    ) from error
                logger.warning("reference %s is away, asking again: %s", name, error.message)
                await asyncio.sleep(RETRY_PAUSE_S)
