"""Room for the images of groups: bytes are counted, not groups, and what has more than there is room for goes alone."""

import asyncio
from collections.abc import Sequence

import pytest

from services.controller.groups.image_room import ImageRoom


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


class Groups:
    """Groups that read as many bytes as they are called, and hold them until they are let go."""

    def __init__(self, max_bytes: int) -> None:
        self._room = ImageRoom(max_bytes)
        self.read: list[int] = []
        self.held: list[int] = []
        self.may_end = {size: asyncio.Event() for size in range(200)}

    async def hold(self, size: int) -> None:
        async def read() -> tuple[int, int]:
            self.read.append(size)
            return size, size

        async with self._room.holding(read) as found:
            self.held.append(found)
            try:
                await self.may_end[size].wait()
            finally:
                self.held.remove(found)

    async def begin(self, sizes: Sequence[int]) -> list["asyncio.Task[None]"]:
        tasks = [asyncio.create_task(self.hold(size)) for size in sizes]
        await settle()
        return tasks

    async def end(self, size: int) -> None:
        self.may_end[size].set()
        await settle()


async def test_as_many_go_at_a_time_as_have_room_and_one_that_waits_has_been_read() -> None:
    groups = Groups(100)
    tasks = await groups.begin([40, 50, 20, 10])
    assert (groups.held, groups.read) == ([40, 50], [40, 50, 20]), "10 is behind the one that waits"
    await groups.end(40)
    assert groups.held == [50, 20, 10]
    for size in (50, 20, 10):
        await groups.end(size)
    await asyncio.gather(*tasks)


async def test_what_has_more_than_there_is_room_for_goes_alone() -> None:
    groups = Groups(100)
    tasks = await groups.begin([0, 60, 150, 1])
    assert groups.held == [0, 60]
    await groups.end(60)
    assert groups.held == [0, 150]
    await groups.end(150)
    assert groups.held == [0, 1]
    for size in (0, 1):
        await groups.end(size)
    await asyncio.gather(*tasks)


async def test_whoever_leaves_or_cannot_read_keeps_no_room() -> None:
    async def fails() -> tuple[int, int]:
        raise ValueError("no row")

    groups = Groups(100)
    holds, waits, behind = await groups.begin([90, 80, 70])
    waits.cancel()
    await settle()
    holds.cancel()
    await settle()
    assert groups.held == [70]
    behind.cancel()
    room = ImageRoom(1)
    with pytest.raises(ValueError, match="no row"):
        async with room.holding(fails):
            pass
    async with room.holding(lambda: asyncio.sleep(0, ("x", 2))) as found:
        assert found == "x"
