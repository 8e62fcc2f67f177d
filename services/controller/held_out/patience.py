"""The time that an evaluation has, and its pauses for whoever is away."""

import asyncio
from dataclasses import dataclass

from services.controller.board import RunBoard

PAUSE_S = 2.0
"""Pause before items are scored again whose scorer was away, and between two looks for a rollout with the weights."""


@dataclass(frozen=True)
class Patience:
    """The time that an evaluation has. While people pause the run it stands still: they may have taken roles away."""

    board: RunBoard
    timeout_s: float
    limit: asyncio.Timeout

    async def wait(self, seconds: float) -> None:
        """Waits before somebody who was away is asked again."""
        await asyncio.sleep(seconds)
        if self.board.paused:
            self.limit.reschedule(asyncio.get_running_loop().time() + self.timeout_s)
