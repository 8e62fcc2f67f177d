"""The gate of what is sampled: when shut() has returned nothing is on its way out, and nothing leaves until it
opens.
"""

import asyncio

import pytest

from rolecall.errors import UnavailableError
from services.rollout.gate import Gate

TURNS = 20
"""Turns of the event loop: more than anything here needs that does not wait for something else."""


async def turns() -> None:
    for _ in range(TURNS):
        await asyncio.sleep(0)


async def test_shutting_waits_for_whoever_is_on_the_way_out() -> None:
    gate, may_end = Gate(), asyncio.Event()
    await gate.open()
    inside = asyncio.Event()

    async def leave() -> None:
        async with gate.leaving():
            inside.set()
            await may_end.wait()

    leaving = [asyncio.create_task(leave()) for _ in range(2)]
    await inside.wait()
    await turns()
    shutting = asyncio.create_task(gate.shut())
    await turns()
    assert not gate.is_open
    assert not shutting.done()
    may_end.set()
    await asyncio.gather(*leaving, shutting)


async def test_nobody_leaves_once_it_shuts_not_even_while_it_waits_for_others() -> None:
    gate, may_end = Gate(), asyncio.Event()
    await gate.open()
    left: list[str] = []

    async def leave(name: str) -> None:
        async with gate.leaving():
            left.append(name)
            await may_end.wait()

    first = asyncio.create_task(leave("first"))
    await turns()
    shutting = asyncio.create_task(gate.shut())
    await turns()
    second = asyncio.create_task(leave("second"))
    await turns()
    assert left == ["first"]
    may_end.set()
    await asyncio.gather(first, shutting)
    await turns()
    assert left == ["first"]
    await gate.open()
    await second
    assert left == ["first", "second"]


async def test_a_leaver_that_fails_is_outside_again() -> None:
    gate = Gate()
    await gate.open()
    with pytest.raises(ValueError, match="commit"):
        async with gate.leaving():
            raise ValueError("commit")
    async with asyncio.timeout(30):
        await gate.shut()


async def test_what_is_given_up_is_turned_away_and_those_who_hold_nothing_go_on_waiting() -> None:
    gate = Gate()
    holding, idle = asyncio.create_task(gate.wait()), asyncio.create_task(gate.wait_open())
    await turns()
    await gate.give_up()
    with pytest.raises(UnavailableError):
        await holding
    with pytest.raises(UnavailableError):
        await gate.wait()
    assert not idle.done()
    await gate.open()
    await idle
    await gate.wait()
