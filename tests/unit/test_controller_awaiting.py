"""A batch that is awaited when people ask the run to stop."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from rolecall.settings import RunSettings
from services.controller.awaiting import NextBatches
from services.controller.board import RunBoard
from services.controller.groups.failures import RunEnd
from services.controller.groups.prompts import Cursor


@pytest.mark.parametrize("is_ready", [True, False])
async def test_a_stop_while_the_scorer_is_away_leaves_no_batch_that_is_ready(
    make_settings: Callable[..., RunSettings], is_ready: bool
) -> None:
    async def next_batch(*args: Any, **kwargs: Any) -> list[Any]:
        if not is_ready:
            await asyncio.Event().wait()
        return ["a group"]

    async def look() -> None:
        """Does nothing."""

    rollout = SimpleNamespace(consumer="r.0", progress=0, phase="sampling")
    board, parts = RunBoard(), SimpleNamespace
    board.stop(checkpoint=False, failure="")
    batches = NextBatches(
        make_settings(),
        recovered=parts(position=parts(step=0)),  # type: ignore[arg-type]
        assembly=parts(next_batch=next_batch, num_live=10**6, num_changes=0),  # type: ignore[arg-type]
        fleet=parts(rollouts=lambda: [rollout], is_lost=lambda name: False),  # type: ignore[arg-type]
        board=board,
        reward=parts(trouble="it is away"),  # type: ignore[arg-type]
        end=RunEnd(),
        look=look,
        waits_for_room=lambda: False,
        cursor=lambda: Cursor(0, 0, 0),
        trouble=lambda: "",
    )
    async with asyncio.timeout(60):
        batch = await batches.next(3)
    assert (batch is not None) == is_ready
