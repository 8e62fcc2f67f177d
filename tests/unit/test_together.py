"""Calls that go together: each is answered, whoever else asks, and fails for what is its own."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence

import pytest_asyncio

from rolecall.errors import RowMissingError, StoreUnavailableError
from services.controller.threads import StoreThreads
from services.controller.together import MOST_TOGETHER, Together

WAIT_S = 10.0


class Doubled:
    """Doubles numbers; the first call waits until it is let go."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.may_go = threading.Event()

    def __call__(self, numbers: Sequence[int]) -> list[int]:
        self.calls.append(list(numbers))
        assert self.may_go.wait(WAIT_S)
        if 13 in numbers:
            raise RowMissingError("row 13 is gone")
        if 500 in numbers:
            raise StoreUnavailableError("the store did not answer")
        return [2 * number for number in numbers]


@pytest_asyncio.fixture
async def threads() -> AsyncIterator[StoreThreads]:
    threads = StoreThreads()
    yield threads
    threads.close()


async def begun(doubled: Doubled, together: Together[int, int], first: int) -> "asyncio.Task[int]":
    """A call that is under way until it is let go."""
    task = asyncio.create_task(together.call(first))
    async with asyncio.timeout(WAIT_S):
        while not doubled.calls:
            await asyncio.sleep(0.001)
    return task


async def test_what_is_asked_for_during_a_call_goes_together_in_the_next(threads: StoreThreads) -> None:
    doubled = Doubled()
    together = Together(threads, doubled)
    first = await begun(doubled, together, 1)
    others = [asyncio.create_task(together.call(number)) for number in range(20, 68)]
    await asyncio.sleep(0.01)
    doubled.may_go.set()

    assert await asyncio.wait_for(first, WAIT_S) == 2, "it waited for nobody"
    assert await asyncio.wait_for(asyncio.gather(*others), WAIT_S) == [2 * number for number in range(20, 68)]
    assert [len(call) for call in doubled.calls] == [1, MOST_TOGETHER, 48 - MOST_TOGETHER]
    assert await asyncio.wait_for(together.call(60), WAIT_S) == 120, "and later ones as at first"


async def test_rows_that_are_missing_fail_only_the_item_that_they_belong_to(threads: StoreThreads) -> None:
    doubled = Doubled()
    together = Together(threads, doubled)
    doubled.may_go.set()

    answers = await asyncio.wait_for(
        asyncio.gather(*(together.call(number) for number in (12, 13, 14)), return_exceptions=True), WAIT_S
    )

    assert (answers[0], answers[2]) == (24, 28)
    assert isinstance(answers[1], RowMissingError)


async def test_a_store_that_is_away_fails_all_who_asked_at_once(threads: StoreThreads) -> None:
    doubled = Doubled()
    together = Together(threads, doubled)
    doubled.may_go.set()

    answers = await asyncio.wait_for(
        asyncio.gather(*(together.call(number) for number in (499, 500, 501)), return_exceptions=True), WAIT_S
    )

    assert all(isinstance(answer, StoreUnavailableError) for answer in answers)
    assert len(doubled.calls) == 1, "each alone would wait for the store's retry_s again"


async def test_nothing_is_called_for_those_who_left(threads: StoreThreads) -> None:
    doubled = Doubled()
    together = Together(threads, doubled)
    first = await begun(doubled, together, 1)
    left = [asyncio.create_task(together.call(number)) for number in (2, 3)]
    stays = asyncio.create_task(together.call(4))
    await asyncio.sleep(0.01)
    for task in (first, *left):
        task.cancel()
    doubled.may_go.set()

    assert await asyncio.wait_for(stays, WAIT_S) == 8
    assert doubled.calls == [[1], [4]]
