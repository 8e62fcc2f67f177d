"""The sealing of a batch: its rows are read, its columns computed, the batch fixed in the ledger, then the columns
written.

In this order, so that whoever crashes in between writes the same columns again. What is computed is preparation.py's.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rolecall.errors import BatchMismatchError, ConfigError
from rolecall.settings import RunSettings
from rolecall.store.ledger import Ledger
from rolecall.store.rows import Rows
from rolecall.v1 import trajectory_pb2
from rolecall.wire import Array
from services.controller.groups.assembly import ScoredGroup
from services.controller.step import preparation
from services.controller.step.adaptive import AdaptiveState
from services.controller.threads import StoreThreads


@dataclass(frozen=True)
class SealedStep:
    """A sealed batch whose columns are written, and its rows as they were read on the way."""

    batch: trajectory_pb2.TrainBatch
    contents: Sequence[Mapping[str, Array]]
    """The columns of every row, in order, that measures are taken of."""


@dataclass(frozen=True)
class Sealing:
    """Makes the sealed batch of a step out of its groups."""

    settings: RunSettings
    ledger: Ledger
    rows: Rows
    threads: StoreThreads
    at: Callable[[str], None]
    """Called at every named instant."""

    async def seal(self, step: int, groups: Sequence[ScoredGroup], state: AdaptiveState) -> SealedStep:
        """Fixes the batch of `step`, then writes its columns."""
        settings, refs = self.settings, _refs(groups)
        contents = await self.threads.call(
            self.rows.read, refs, preparation.columns_read(settings), preparation.OPTIONAL_COLUMNS
        )
        wants_greedy = settings.algorithm.wants_greedy_response
        greedy = [group.greedy.row for group in groups if group.greedy is not None] if wants_greedy else []
        greedy_contents = await self.threads.call(
            self.rows.read, greedy, preparation.GREEDY_COLUMNS, preparation.OPTIONAL_COLUMNS
        )
        batch, columns = await self.threads.call(
            preparation.prepare, settings, step, groups, contents, greedy_contents, state
        )
        self.at("batch is prepared")
        await self.threads.call(self.ledger.seal, batch)
        self.at("batch is sealed")
        await self.threads.call(self.rows.put, refs, columns)
        return SealedStep(batch, contents)

    async def take_up(
        self, batch: trajectory_pb2.TrainBatch, groups: Sequence[ScoredGroup], state: AdaptiveState
    ) -> SealedStep:
        """A batch that an earlier loop sealed stands as it is, whatever the settings are now; its columns are written
        where that loop did not get to it. ConfigError when they cannot be, for they were to be made by other settings.
        """
        contents = await self.threads.call(
            self.rows.read,
            _refs(groups),
            preparation.columns_reported(self.settings),
            ["advantages", "old_logprobs"],
        )
        if not all("advantages" in row for row in contents):
            try:
                return await self.seal(batch.step, groups, state)
            except BatchMismatchError as error:
                raise ConfigError(
                    f"the batch of step {batch.step} was sealed under other settings (algorithm, reward or critic) by "
                    "a run that was killed before it wrote the batch's columns; resume it once with the settings that "
                    "it had, and change them after that step (of a release before this one, also "
                    "algorithm.distillation.max_log_ratio: null)"
                ) from error
        return SealedStep(batch, contents)


def _refs(groups: Sequence[ScoredGroup]) -> list[trajectory_pb2.RowRef]:
    return [ref for group in groups for ref in group.rows]
