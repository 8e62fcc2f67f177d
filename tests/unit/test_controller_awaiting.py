"""A batch that is awaited when people ask the run to stop."""

import asyncio
from collections.abc import Awaitable, Callable, Collection
from types import SimpleNamespace
from typing import Any

import pytest

from rolecall.settings import RunSettings
from services.controller import awaiting
from services.controller.awaiting import NextBatches
from services.controller.board import RunBoard
from services.controller.groups.failures import RunEnd
from services.controller.groups.prompts import Cursor


def stopped(
    settings: RunSettings,
    next_batch: Callable[..., Awaitable[list[Any]]],
    *,
    trouble: str = "",
    lost: Collection[str] = (),
    look: Callable[[], None] = lambda: None,
    busy: bool = True,
    is_scoring: bool = False,
) -> NextBatches:
    """The batches of a run that people asked to stop."""

    async def looks() -> None:
        look()

    rollout = SimpleNamespace(consumer="r.0", progress=0, phase="sampling", busy=busy)
    board, parts = RunBoard(), SimpleNamespace
    board.stop(checkpoint=False, failure="")
    return NextBatches(
        settings,
        recovered=parts(position=parts(step=0)),  # type: ignore[arg-type]
        assembly=parts(next_batch=next_batch, num_live=10**6, num_changes=0),  # type: ignore[arg-type]
        fleet=parts(rollouts=lambda: [rollout], is_lost=lambda name: name in lost),  # type: ignore[arg-type]
        board=board,
        reward=parts(trouble=trouble),  # type: ignore[arg-type]
        end=RunEnd(),
        look=looks,
        waits_for_room=lambda: False,
        cursor=lambda: Cursor(0, 0, 0),
        trouble=lambda: "",
        is_scoring=lambda: is_scoring,
    )


@pytest.mark.parametrize("is_ready", [True, False])
async def test_a_stop_while_the_scorer_is_away_leaves_no_batch_that_is_ready(
    make_settings: Callable[..., RunSettings], is_ready: bool
) -> None:
    async def next_batch(*args: Any, **kwargs: Any) -> list[Any]:
        if not is_ready:
            await asyncio.Event().wait()
        return ["a group"]

    async with asyncio.timeout(60):
        batch = await stopped(make_settings(), next_batch, trouble="it is away").next(3)
    assert (batch is not None) == is_ready


@pytest.mark.parametrize("offload", [True, False])
async def test_a_stop_waits_for_its_batch_without_a_reference_that_comes_back_in_its_shift(
    make_settings: Callable[..., RunSettings], offload: bool
) -> None:
    seen = asyncio.Event()

    async def next_batch(*args: Any, **kwargs: Any) -> list[Any]:
        await seen.wait()
        return ["a group"]

    settings = make_settings(
        rollout={"sleep_mode": True},
        references={"ref": {"offload": offload}},
        algorithm={"groups_per_batch": 2, "kl": {"reference": "ref", "kl_coef": 0.1}},
    )
    async with asyncio.timeout(60):
        batch = await stopped(settings, next_batch, lost={"ref"}, look=seen.set).next(3)
    assert (batch is not None) == offload


@pytest.mark.parametrize(("busy", "is_scoring"), [(False, False), (True, False), (False, True)])
async def test_a_stop_waits_for_no_batch_of_which_nothing_is_sampled_or_scored(
    make_settings: Callable[..., RunSettings], monkeypatch: pytest.MonkeyPatch, busy: bool, is_scoring: bool
) -> None:
    """As where the environment of a group is away, which would be waited for without end."""
    monkeypatch.setattr(awaiting, "REST_S", 0.05)
    num_looks = 0
    seen = asyncio.Event()

    def look() -> None:
        nonlocal num_looks
        num_looks += 1
        if num_looks == 20:
            seen.set()

    async def next_batch(*args: Any, **kwargs: Any) -> list[Any]:
        await seen.wait()
        return ["a group"]

    batches = stopped(make_settings(), next_batch, look=look, busy=busy, is_scoring=is_scoring)
    async with asyncio.timeout(60):
        batch = await batches.next(3)
    assert (batch is not None) == (busy or is_scoring)
