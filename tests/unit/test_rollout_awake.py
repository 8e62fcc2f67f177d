"""Deadlines that stand still while an engine sleeps."""

import asyncio

import pytest

from services.rollout.awake import AwakeDeadlines


async def ends(deadlines: AwakeDeadlines, seconds: float) -> float:
    """Seconds until it ran out of time."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    with pytest.raises(TimeoutError):
        async with deadlines.within(seconds):
            await asyncio.Event().wait()
    return loop.time() - began


async def test_time_asleep_does_not_count_also_for_who_begins_then() -> None:
    deadlines = AwakeDeadlines()
    before = asyncio.create_task(ends(deadlines, 0.3))
    await asyncio.sleep(0.1)
    for _ in range(2):
        deadlines.stop()
    asleep = asyncio.create_task(ends(deadlines, 0.3))
    await asyncio.sleep(0.5)
    assert not before.done()
    for _ in range(2):
        deadlines.go_on()
    assert await before >= 0.8
    assert await asleep >= 0.8


async def test_a_clock_stands_still_meanwhile() -> None:
    deadlines, loop = AwakeDeadlines(), asyncio.get_running_loop()
    slept, began, began_awake = 0.0, loop.time(), deadlines.time()
    for _ in range(2):
        fell_asleep = loop.time()
        deadlines.stop()
        asleep_at = deadlines.time()
        await asyncio.sleep(0.1)
        deadlines.stop()
        assert deadlines.time() == asleep_at
        deadlines.go_on()
        deadlines.go_on()
        slept += loop.time() - fell_asleep
        await asyncio.sleep(0.05)
    assert deadlines.time() - began_awake == pytest.approx(loop.time() - began - slept, abs=0.02)


async def test_what_ends_in_time_leaves_nothing_behind_and_what_is_late_stays_so() -> None:
    deadlines = AwakeDeadlines()
    async with deadlines.within(60.0):
        deadlines.stop()
    deadlines.go_on()
    async with asyncio.timeout(30.0):
        assert await ends(deadlines, 0.05) >= 0.05

    async def slow_to_end() -> None:
        async with deadlines.within(0.0):
            try:
                await asyncio.Event().wait()
            finally:  # it is ending: no sleep gives it more time
                deadlines.stop()
                deadlines.go_on()

    with pytest.raises(TimeoutError):
        await slow_to_end()
