"""Groups of tasks: which error comes out, and whose cancel wins."""

import asyncio

import pytest

from services.controller.tasks import FirstErrorGroup, at_once

DEADLINE_S = 30.0


async def failing(gate: asyncio.Event, error: Exception) -> None:
    await gate.wait()
    raise error


async def test_the_first_error_ends_the_others_and_comes_out_alone() -> None:
    gate, others = asyncio.Event(), asyncio.Event()
    gate.set()
    with pytest.raises(OSError, match="first"):
        await at_once([failing(others, ValueError("second")), failing(gate, OSError("first"))])


@pytest.mark.parametrize("turns", range(5))
@pytest.mark.parametrize("in_body", [False, True], ids=["at its end", "in its body"])
async def test_an_owner_that_tries_again_ends_when_it_is_cancelled_as_its_task_fails(
    turns: int, *, in_body: bool
) -> None:
    """`turns` of the loop lie between the failure and the cancel."""
    gate, tries = asyncio.Event(), 0

    async def owner() -> None:
        nonlocal tries
        while True:
            tries += 1
            try:
                async with FirstErrorGroup() as tasks:
                    tasks.create_task(failing(gate, OSError("away")))
                    if in_body:
                        await asyncio.Event().wait()
            except OSError:
                await asyncio.sleep(0)
                gate.clear()

    trying = asyncio.create_task(owner())
    await asyncio.sleep(0.01)
    gate.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    trying.cancel()
    done, _ = await asyncio.wait({trying}, timeout=DEADLINE_S)
    assert done, f"it went on after {tries} tries"
    assert trying.cancelled()


@pytest.mark.parametrize("in_body", [False, True], ids=["at its end", "in its body"])
async def test_an_owner_whose_task_failed_is_not_as_if_cancelled(*, in_body: bool) -> None:
    gate, owner = asyncio.Event(), asyncio.current_task()

    async def group() -> None:
        async with FirstErrorGroup() as tasks:
            tasks.create_task(failing(gate, OSError("away")))
            if in_body:
                await asyncio.Event().wait()

    asyncio.get_running_loop().call_soon(gate.set)
    with pytest.raises(OSError, match="away"):
        await group()
    assert owner is not None
    assert owner.cancelling() == 0


async def test_a_group_within_another_ends_by_the_error_of_the_outer() -> None:
    gate = asyncio.Event()

    async def groups() -> None:
        async with FirstErrorGroup() as outer:
            outer.create_task(failing(gate, OSError("outer")))
            async with FirstErrorGroup() as inner:
                inner.create_task(failing(gate, ValueError("inner")))
                await asyncio.Event().wait()

    asyncio.get_running_loop().call_soon(gate.set)
    with pytest.raises(OSError, match="outer"):
        await groups()
