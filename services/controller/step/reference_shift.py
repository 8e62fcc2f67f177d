"""The columns of references that share devices with rollouts and trainers: asked for a batch at a time, in their shift,
and of references on the same GPUs one after another, so that one of them has their memory at a time.

Owns the wait for a reference that is away: it loads when its shift has come. What is asked of whom is said by each
group (groups/group_scorer.py). Frozen weights give the same columns whenever they are asked, so nothing is remembered:
whoever starts over asks again, and rows that hold a column are not computed twice.
"""

import asyncio
import contextlib
import logging
import math
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from rolecall.errors import BudgetSpentError, DeadlineError, UnavailableError
from rolecall.settings import RunSettings
from rolecall.v1 import training_pb2, trajectory_pb2
from rolecall.v1.reference_pb2_grpc import ReferenceServiceStub
from services.controller.board import RunBoard
from services.controller.groups.assembly import ScoredGroup
from services.controller.step.trainers import MOVE_TIMEOUT_S
from services.controller.tasks import at_once

logger = logging.getLogger(__name__)

RETRY_PAUSE_S = 0.5
"""Pause before a reference that was away is asked again."""
BUDGETS_A_CALL = 16
"""A call has so many times `token_budget` tokens a rank: what it computes lies on the device until its end, is computed
again when it fails, and is waited for when the loop starts over meanwhile.
"""


@dataclass(frozen=True)
class ReferenceShift:
    """The calls of one life of the loop to references in their shift."""

    settings: RunSettings
    references: Mapping[str, ReferenceServiceStub]
    ctl: int
    board: RunBoard
    """Whether the run is asked to stop, when no reference that is away is waited for, or paused, when it is without
    end: people may have taken it away.
    """

    async def score(self, groups: Sequence[ScoredGroup]) -> bool:
        """Whether the references' columns are in the rows of `groups`; else the run is to stop, and one is away.
        DeviceFullError; BudgetSpentError when one was away for controller.stall_timeout_s.
        """
        asked: dict[str, dict[str, list[trajectory_pb2.RowRef]]] = defaultdict(lambda: defaultdict(list))
        for group in groups:
            for name, prefix in group.references:
                asked[name][prefix].extend(group.rows)
        users = [device for name in asked for device in self.settings.references[name].devices]
        shared = {device: asyncio.Lock() for device in users if users.count(device) > 1}
        return all(await at_once([self._score(name, columns, shared) for name, columns in asked.items()]))

    async def _score(
        self, name: str, columns: Mapping[str, Sequence[trajectory_pb2.RowRef]], shared: Mapping[int, asyncio.Lock]
    ) -> bool:
        section = self.settings.references[name]
        gpus = sorted(shared.keys() & set(section.devices))
        async with contextlib.AsyncExitStack() as stack:
            for device in gpus:
                await stack.enter_async_context(shared[device])  # bounded: by the passes of the others
            for prefix, refs in columns.items():
                for part in _cut(refs, BUDGETS_A_CALL * section.token_budget * section.num_ranks):
                    if not await self._ask(name, prefix, part):
                        return False
            if gpus:
                with contextlib.suppress(UnavailableError, DeadlineError):  # one that is gone holds nothing
                    await self.references[name].Offload(
                        training_pb2.OffloadRequest(ctl=self.ctl), timeout=MOVE_TIMEOUT_S
                    )
        return True

    async def _ask(self, name: str, prefix: str, refs: Sequence[trajectory_pb2.RowRef]) -> bool:
        request = training_pb2.ComputeColumnRequest(ctl=self.ctl, rows=refs, prefix=prefix)
        timeout_s, patience_s = self.settings.actor.compute_timeout_s, self.settings.controller.stall_timeout_s
        give_up_at = math.inf
        while True:
            try:
                await self.references[name].ComputeLogprobs(request, timeout=timeout_s)
                return True
            except (UnavailableError, DeadlineError) as error:
                if self.board.stop_requested:
                    return False
                now = time.monotonic()
                if now >= give_up_at and not self.board.paused:
                    raise BudgetSpentError(
                        f"reference {name} was away for controller.stall_timeout_s = {patience_s:.0f} s, and the batch "
                        f"waits for its columns; see its log: {error.message}"
                    ) from error
                if math.isinf(give_up_at):
                    logger.warning("reference %s is away and asked again until it answers: %s", name, error.message)
                if math.isinf(give_up_at) or self.board.paused:
                    give_up_at = now + patience_s  # from now: it may have computed until now
                await asyncio.sleep(RETRY_PAUSE_S)


def _cut(refs: Sequence[trajectory_pb2.RowRef], max_tokens: int) -> Iterator[list[trajectory_pb2.RowRef]]:
    """The rows in calls of at most so many tokens, or of one row."""
    part: list[trajectory_pb2.RowRef] = []
    num_tokens = 0
    for ref in refs:
        if part and num_tokens + ref.num_tokens > max_tokens:
            yield part
            part, num_tokens = [], 0
        part.append(ref)
        num_tokens += ref.num_tokens
    if part:
        yield part
