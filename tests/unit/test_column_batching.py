"""What ColumnBatcher promises: company is waited for, budgets hold, nobody pays for another's missing row."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from rolecall.errors import RowMissingError, WorkerLostError
from rolecall.rpc.fence import Fence
from rolecall.training.serving.calls import ColumnCalls
from rolecall.training.serving.column_batcher import ColumnBatcher, row_key
from rolecall.training.serving.device_thread import DeviceThread
from rolecall.v1.training_pb2 import ComputeColumnRequest, StatePart
from rolecall.v1.trajectory_pb2 import RowRef
from tests.waiting import until


class Device:
    """Remembers what it computed; rows with "gone" in their id are missing; `busy` holds it up."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.written: set[str] = set()
        self.free = asyncio.Event()
        self.free.set()

    async def compute(self, rows: Sequence[RowRef]) -> frozenset[str]:
        self.calls.append([row.id for row in rows])
        await self.free.wait()
        if any("gone" in row.id for row in rows):
            raise RowMissingError("a row is gone")
        already = frozenset(row_key(row) for row in rows if row.id in self.written)
        self.written |= {row.id for row in rows}
        return already


class Ranks:
    """A ColumnComputer in one process that stands for several, and remembers how many rows it was given at a time."""

    num_parameters = world_size = 1
    prefixes = ("",)

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.computed: list[int] = []
        self.told: list[bool] = []
        """What the other ranks would be told at the end: whether the run is over."""

    def compute(self, rows: Sequence[RowRef], prefix: str) -> frozenset[str]:
        self.computed.append(len(rows))
        return frozenset()

    def move(self, parts: Sequence[StatePart.ValueType], *, to_host: bool) -> None:
        """Has no device to leave."""

    def keep_alive(self) -> None:
        """Has no other rank."""

    def stop(self, over: bool) -> None:
        self.told.append(over)


@asynccontextmanager
async def batching(device: Device, token_budget: int) -> AsyncIterator[ColumnBatcher]:
    batcher = ColumnBatcher(device.compute, token_budget)
    batcher.start()
    try:
        yield batcher
    finally:
        await batcher.close()


def row(id: str, num_tokens: int = 10) -> RowRef:
    return RowRef(id=id, token="w-1", num_tokens=num_tokens)


async def test_calls_that_come_together_are_computed_together() -> None:
    device = Device()
    async with batching(device, 1000) as batcher:
        answers = await asyncio.gather(*(batcher.compute([row(f"{i}/0")]) for i in range(5)))
    assert device.calls == [[f"{i}/0" for i in range(5)]]
    assert [answer.num_tokens for answer in answers] == [10] * 5


async def test_a_batch_stays_within_the_budget_and_a_larger_call_goes_alone() -> None:
    device = Device()
    async with batching(device, 25) as batcher:
        await asyncio.gather(
            *(batcher.compute([row(f"{i}/0", tokens)]) for i, tokens in enumerate([10, 10, 10, 90, 10]))
        )
    assert device.calls == [["0/0", "1/0"], ["2/0"], ["3/0"], ["4/0"]]


@pytest.mark.parametrize(("num_slots", "computed"), [(1, [1, 1, 1, 1]), (2, [2, 2]), (4, [4])])
async def test_each_slot_of_ranks_gets_a_budget_of_its_own(num_slots: int, computed: list[int]) -> None:
    role, device_thread, fence = Ranks(num_slots), DeviceThread(), Fence(lambda: 1)
    await fence.check(1)  # no call waits for a thread, so all come at once
    calls = ColumnCalls(role, device_thread, fence, token_budget=10)
    calls.start()
    requests = (ComputeColumnRequest(ctl=1, rows=[row(f"{i}/0")]) for i in range(4))
    await asyncio.gather(*(calls.compute(request) for request in requests))
    await calls.close()
    assert role.computed == computed


@pytest.mark.parametrize(("over", "told"), [(True, [True]), (False, [False]), (None, [])])
async def test_the_other_ranks_hear_of_an_end_or_a_stop_and_see_a_failure(over: bool | None, told: list[bool]) -> None:
    """Told that they may go, they could end before rank 0 does, and their code would hide the failure's own."""
    role = Ranks(1)
    calls = ColumnCalls(role, DeviceThread(), Fence(lambda: 1), token_budget=10)
    calls.start()
    await calls.close(over)
    assert role.told == told


async def test_calls_gather_while_the_device_is_busy() -> None:
    device = Device()
    device.free.clear()
    async with batching(device, 1000) as batcher:
        first = asyncio.create_task(batcher.compute([row("0/0")]))
        await until(lambda: device.calls)
        rest = [asyncio.create_task(batcher.compute([row(f"{i}/0")])) for i in range(1, 9)]
        await asyncio.sleep(0.01)
        device.free.set()
        await asyncio.gather(first, *rest)
    assert device.calls[1:] == [[f"{i}/0" for i in range(1, 9)]]


async def test_a_row_of_two_calls_is_computed_once_and_a_repeated_one_is_counted() -> None:
    device = Device()
    async with batching(device, 1000) as batcher:
        await asyncio.gather(batcher.compute([row("0/0"), row("0/1")]), batcher.compute([row("0/1")]))
        again = await batcher.compute([row("0/0"), row("0/2")])
    assert device.calls[0] == ["0/0", "0/1"]
    assert again.num_already_written == 1


async def test_each_call_is_told_how_many_of_its_own_rows_were_written_before() -> None:
    device = Device()
    async with batching(device, 1000) as batcher:
        await batcher.compute([row("0/0"), row("0/1")])
        old, new = await asyncio.gather(batcher.compute([row("0/0"), row("0/1")]), batcher.compute([row("1/0")]))
    assert len(device.calls) == 2
    assert (old.num_already_written, new.num_already_written) == (2, 0)


async def test_a_missing_row_fails_only_the_call_that_named_it() -> None:
    device = Device()
    async with batching(device, 1000) as batcher:
        good, bad, other = await asyncio.gather(
            *(batcher.compute([row(id)]) for id in ("0/0", "gone/0", "1/0")), return_exceptions=True
        )
        assert (await batcher.compute([row("2/0")])).num_tokens == 10
    assert isinstance(bad, RowMissingError)
    assert not isinstance(good, BaseException)
    assert not isinstance(other, BaseException)


async def test_a_caller_who_leaves_holds_nobody_up() -> None:
    device = Device()
    async with batching(device, 1000) as batcher:
        leaving = asyncio.create_task(batcher.compute([row("0/0")]))
        await asyncio.sleep(0)
        leaving.cancel()
        assert (await batcher.compute([row("1/0")])).num_tokens == 10


async def test_calls_under_way_are_told_when_the_role_stops() -> None:
    device = Device()
    device.free.clear()
    async with batching(device, 1000) as batcher:
        waiting = asyncio.create_task(batcher.compute([row("0/0")]))
        await until(lambda: device.calls)
        await batcher.close()
        with pytest.raises(WorkerLostError):
            await waiting


async def test_no_rows_are_no_work() -> None:
    device = Device()
    async with batching(device, 1000) as batcher:
        assert (await batcher.compute([])).num_tokens == 0
    assert not device.calls
