"""Whom a service obeys while controllers replace each other."""

import asyncio
import threading

import pytest

from rolecall.errors import FencedError
from rolecall.rpc.fence import Fence


async def test_an_old_answer_of_the_store_that_comes_late_takes_nothing_back() -> None:
    asked, released = threading.Event(), threading.Event()

    def read() -> int:
        if asked.is_set():
            return 6
        asked.set()
        assert released.wait(60)
        return 5

    fence = Fence(read)
    old = asyncio.ensure_future(fence.check(5))
    await asyncio.to_thread(asked.wait, 60)
    await fence.check(6)
    released.set()
    with pytest.raises(FencedError):
        await old
    assert fence.ctl == 6
