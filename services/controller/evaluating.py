"""The evaluations of one life of the loop: the steps at which they are due, and where the figures go."""

import asyncio
import logging

from rolecall.telemetry import export
from services.controller.parts import Parts

logger = logging.getLogger(__name__)


class Evaluations:
    """The evaluations of one life of the loop, one at a time, each over before other weights are published.

    With evaluation.beside one goes on while the next step is sampled and trained: all rollouts hold its weights until
    the next publish. Without, the steps wait for it.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts = parts
        self._under_way: asyncio.Task[None] | None = None

    async def after(self, step: int, policy_version: int) -> None:
        """Evaluates weights `policy_version` after `step` steps, if that is due and was not done: also when the loop
        that applied the last of them did not get to it.
        """
        section, num_steps = self._parts.settings.evaluation, self._parts.settings.run.num_steps
        due = step in (0, num_steps) or (section.every_steps and step % section.every_steps == 0)
        if not due or self._parts.board.evaluated_step == step:
            return
        self._under_way = asyncio.create_task(self._evaluate(step, policy_version), name=f"step {step}")
        if not section.beside:
            await self.over()

    async def over(self) -> None:
        """Returns when none is under way; raises what ended it."""
        if self._under_way is None:
            return
        board = self._parts.board
        board.wait_for(f"the evaluation of {self._under_way.get_name()}", "evaluating")
        try:
            await self._under_way  # bounded: Evaluation.run ends within its timeout_s
        finally:
            board.states.enter("working")
        self._under_way = None

    async def cancel(self) -> None:
        """Ends the one under way."""
        if self._under_way is not None:
            self._under_way.cancel()
            await asyncio.gather(self._under_way, return_exceptions=True)  # bounded: it was cancelled

    async def _evaluate(self, step: int, policy_version: int) -> None:
        parts = self._parts
        try:
            metrics, samples = await parts.evaluation.run(step, policy_version)
        except TimeoutError:
            logger.warning("the evaluation of step %d took longer than its deadline and is left out", step)
            return
        await parts.threads.call(parts.trackers.log, step, metrics.values())
        await parts.threads.call(parts.trackers.keep_samples, step, samples)
        export(metrics)
        parts.board.evaluated(step, metrics)
