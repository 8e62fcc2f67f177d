"""The evaluations of one life of the loop: the steps at which they are due, and where the figures go."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from rolecall.telemetry import Metrics, export
from services.controller.groups.failures import RunEnd
from services.controller.parts import Parts

logger = logging.getLogger(__name__)

LOOK_S = 0.25
"""Time between two looks at what ends an evaluation that is waited for."""


class Evaluations:
    """The evaluations of one life of the loop, one at a time, each over before other weights are published.

    With evaluation.beside one goes on while the next step is sampled and trained: all rollouts hold its weights until
    the next publish. Without, the steps wait for it. One that is left out is made by the next life of the loop, if that
    begins at its step; one that was recorded is not, in whatever process.
    """

    def __init__(self, parts: Parts, end: RunEnd, evaluated_step: int, version: Callable[[], int]) -> None:
        """`evaluated_step`: steps applied at the last that was recorded. `version` gives the one that the weights of
        the newest step stand under.
        """
        self._parts = parts
        self._end = end
        self._evaluated_step = evaluated_step
        self._version = version
        self._under_way: asyncio.Task[None] | None = None

    async def after(self, step: int, bring: Callable[[], Awaitable[None]]) -> None:
        """Evaluates the weights after `step` steps, if that is due and was not done: also when the loop that applied
        the last of them did not get to it. `bring` as in `over`.
        """
        section, num_steps = self._parts.settings.evaluation, self._parts.settings.run.total_steps
        at_interval = section.every_steps > 0 and step % section.every_steps == 0
        due = section.at_start if step == 0 else at_interval or step == num_steps
        if not section.sets or not due or self._evaluated_step == step or self._is_ending:
            return
        self._under_way = asyncio.create_task(self._evaluate(step), name=f"step {step}")
        if not section.beside:
            await self.over(bring)

    async def over(self, bring: Callable[[], Awaitable[None]] | None = None) -> None:
        """Returns when none is under way; raises what ended it. `bring`, awaited at every look, gives its weights to
        rollouts where nobody has them any more. None: nobody can, and without rollouts that have them it is left out,
        as it is once the run is to end.
        """
        if self._under_way is None:
            return
        board, task = self._parts.board, self._under_way
        try:
            while not task.done():
                if self._parts.evaluation.lacks_rollouts:
                    board.wait_for(f"rollouts, for the evaluation of {task.get_name()}", "waiting_rollouts")
                else:
                    board.wait_for(f"the evaluation of {task.get_name()}", "evaluating")
                if self._is_ending or (bring is None and self._parts.evaluation.lacks_rollouts):
                    why = "the run is to end" if self._is_ending else "no rollout is left that holds its weights"
                    logger.warning("the evaluation of %s is left out: %s", task.get_name(), why)
                    await self.cancel()
                    break
                if bring is not None:
                    await bring()  # bounded: a publish has its own deadlines
                await asyncio.wait([task], timeout=LOOK_S)
        finally:
            board.states.enter("working")
        self._under_way = None
        if not task.cancelled():
            task.result()

    async def cancel(self) -> None:
        """Ends the one under way."""
        if self._under_way is not None:
            self._under_way.cancel()
            await asyncio.gather(self._under_way, return_exceptions=True)  # bounded: it was cancelled

    @property
    def _is_ending(self) -> bool:
        return self._parts.board.stop_requested or self._end.error is not None

    async def _evaluate(self, step: int) -> None:
        parts = self._parts
        try:
            metrics, samples = await parts.evaluation.run(step, self._version)
        except TimeoutError as error:
            why = str(error) or "it took longer than its deadline"
            logger.warning("the evaluation of step %d is left out: %s", step, why)
            return
        await parts.threads.call(self._record, step, metrics, samples)  # all of it, also where this is cancelled
        self._evaluated_step = step
        export(metrics)
        parts.board.evaluated(metrics)

    def _record(self, step: int, metrics: Metrics, samples: Sequence[Mapping[str, Any]]) -> None:
        self._parts.trackers.log(step, metrics.values())
        self._parts.trackers.keep_samples(step, samples)
        self._parts.ledger.evaluated(step)
