"""What the device thread, the chain of steps and its account promise, with an engine that only counts."""

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from rolecall.checkpoint.storage import open_storage
from rolecall.errors import (
    BatchMismatchError,
    CheckpointMismatchError,
    CheckpointMissingError,
    ExhaustedError,
    FencedError,
    OutOfOrderError,
    RowMissingError,
    StoreRolledBackError,
    WorkerLostError,
)
from rolecall.rpc.fence import Fence
from rolecall.training.serving.applied import FILE, KEPT, Applied
from rolecall.training.serving.device_thread import MAX_WAITING, DeviceThread
from rolecall.training.serving.train_chain import TrainChain
from rolecall.training.serving.trainer import Progress
from rolecall.v1.training_pb2 import TrainRequest, TrainResult
from rolecall.v1.trajectory_pb2 import REDUCTION_MAX, Metric, TrainBatch
from tests.waiting import until


class CountingTrainer:
    """Applies a step whenever `may_finish` is set; `fails` is raised instead, once."""

    def __init__(self) -> None:
        self.applied = Applied()
        self.may_finish = threading.Event()
        self.may_finish.set()
        self.fails: Exception | None = None
        self.num_trained = 0

    def train(self, batch: TrainBatch, progress: Progress) -> TrainResult:
        progress.report(1, 2)
        assert self.may_finish.wait(10)
        if self.fails is not None:
            error, self.fails = self.fails, None
            raise error
        self.num_trained += 1
        result = TrainResult(step=batch.step, digest=batch.digest)
        self.applied = self.applied.after_step(result, 0)
        return result


def read_sealed(step: int) -> TrainBatch:
    return TrainBatch(step=step, digest=f"b{step}")


@asynccontextmanager
async def chained(trainer: CountingTrainer) -> AsyncIterator[tuple[TrainChain, DeviceThread]]:
    device_thread = DeviceThread()
    try:
        yield TrainChain(trainer, read_sealed, device_thread, Fence(lambda: 0)), device_thread
    finally:
        trainer.may_finish.set()
        await device_thread.close()


async def trained(chain: TrainChain, step: int, digest: str | None = None) -> TrainResult:
    *_, last = [
        response
        async for response in chain.train(TrainRequest(step=step, digest=f"b{step}" if digest is None else digest))
    ]
    return last.result


async def test_steps_apply_in_order_and_a_repeated_one_answers_with_its_record() -> None:
    trainer = CountingTrainer()
    async with chained(trainer) as (chain, _):
        first = await trained(chain, 0)
        await trained(chain, 1)
        assert await trained(chain, 0) == first
        with pytest.raises(OutOfOrderError):
            await trained(chain, 3)
        with pytest.raises(BatchMismatchError):
            await trained(chain, 0, "other")
        with pytest.raises(BatchMismatchError):
            await trained(chain, 2, "other")
    assert trainer.num_trained == 2


async def test_callers_of_a_step_under_way_attach_to_it_and_may_leave() -> None:
    trainer = CountingTrainer()
    trainer.may_finish.clear()
    async with chained(trainer) as (chain, _):
        leaving = aiter(chain.train(TrainRequest(step=0, digest="b0")))
        assert (await anext(leaving)).progress.num_total == 2
        await leaving.aclose()  # type: ignore[attr-defined]
        waiting = [asyncio.create_task(trained(chain, 0)) for _ in range(3)]
        await asyncio.sleep(0.01)
        with pytest.raises(BatchMismatchError):
            await trained(chain, 0, "other")
        assert not await chain.finish(0.01)
        trainer.may_finish.set()
        await asyncio.gather(*waiting)
        assert await chain.finish(1.0)
    assert trainer.num_trained == 1


async def test_a_step_that_could_not_be_read_is_tried_again_by_the_next_call() -> None:
    trainer = CountingTrainer()
    trainer.fails = RowMissingError("a row is gone")
    async with chained(trainer) as (chain, device_thread):
        with pytest.raises(RowMissingError):
            await trained(chain, 0)
        assert (await trained(chain, 0)).step == 0
        assert not device_thread.failed.done()


async def test_a_trainer_that_went_back_takes_another_batch_of_the_step_it_waited_for() -> None:
    trainer = CountingTrainer()
    async with chained(trainer) as (chain, _):
        leaving = aiter(chain.train(TrainRequest(step=0, digest="lost")))  # the store that had sealed it was replaced
        await anext(leaving)
        chain.set_back()
        assert (await trained(chain, 0)).digest == "b0"
        with pytest.raises(BatchMismatchError):
            async for _ in leaving:
                pass
    assert trainer.num_trained == 1


async def test_a_step_that_waited_for_the_device_while_the_trainer_went_back_is_not_applied() -> None:
    trainer = CountingTrainer()
    async with chained(trainer) as (chain, device_thread):
        trainer.may_finish.clear()
        occupied = asyncio.create_task(device_thread.run(lambda: trainer.may_finish.wait(10), "computing"))
        before = asyncio.create_task(trained(chain, 0))
        await until(lambda: device_thread.num_waiting >= 2)
        chain.set_back()
        trainer.may_finish.set()
        await occupied
        with pytest.raises(OutOfOrderError, match="went back to a checkpoint"):
            await before
        await trained(chain, 0)
    assert trainer.num_trained == 1


async def test_an_unexpected_failure_of_the_device_ends_the_role() -> None:
    trainer = CountingTrainer()
    trainer.fails = RuntimeError("CUDA error")
    async with chained(trainer) as (chain, device_thread):
        with pytest.raises(WorkerLostError, match="CUDA error") as caught:
            await trained(chain, 0)
        assert isinstance(device_thread.failed.exception(), RuntimeError)
        assert caught.value.retryable
        with pytest.raises(WorkerLostError, match="failed before"):
            await trained(chain, 0)


async def test_the_lane_refuses_more_than_its_bound() -> None:
    device_thread, gate = DeviceThread(), threading.Event()
    waiting = [asyncio.create_task(device_thread.run(lambda: gate.wait(10), "waiting")) for _ in range(MAX_WAITING)]
    await asyncio.sleep(0)
    with pytest.raises(ExhaustedError):
        await device_thread.run(gate.is_set, "waiting")
    gate.set()
    assert all(await asyncio.gather(*waiting))
    await device_thread.close()


async def test_the_lane_shows_phases_and_progress() -> None:
    class Shown:
        phase = "starting"
        busy = False
        count = 0

        def progress(self) -> None:
            self.count += 1

    device_thread, shown = DeviceThread(), Shown()
    device_thread.show_to(shown)
    # it moved when it began
    assert await device_thread.run(lambda: (shown.phase, shown.busy, shown.count), "training") == ("training", True, 1)
    assert (shown.phase, shown.busy, shown.count) == ("idle", False, 2)
    await device_thread.close()


async def test_a_fence_lets_only_the_controller_through_that_the_store_knows_as_the_newest() -> None:
    reads: list[int] = []
    known = 3

    def read_ctl() -> int:
        reads.append(known)
        return known

    fence = Fence(read_ctl)
    for never_or_replaced in (-1, 0, 2):
        with pytest.raises(FencedError):
            await fence.check(never_or_replaced)
    await fence.check(3)
    assert reads == [3], "it asks once, at the first call"
    with pytest.raises(StoreRolledBackError, match="made up, or the store was set back"):
        await fence.check(2**63)
    await fence.check(3)  # what nobody knows locks nobody out
    known = 5
    await fence.check(3)  # until a newer one calls, which it does first of all
    await fence.check(5)
    for replaced in (3, 4):
        with pytest.raises(FencedError):
            await fence.check(replaced)
    known = 4  # set back: what was seen is not forgotten
    await fence.check(5)
    assert reads == [3, 3, 5]


def test_the_account_survives_its_file(tmp_path: Path) -> None:
    account = Applied()
    for step in range(KEPT + 3):
        result = TrainResult(
            step=step,
            digest=f"b{step}",
            train_s=0.5,
            metrics=[Metric(name="actor/x", value=1e-9, reduction=REDUCTION_MAX, weight=1)],
        )
        account = account.after_publish(step + 10).after_step(result, step % 2)
    storage = open_storage(str(tmp_path))
    storage.write(FILE, lambda file: file.write(account.to_json()))
    read = Applied.read(storage)
    assert read == account
    assert (read.step, read.policy_version, len(read.records), min(read.records)) == (KEPT + 3, KEPT + 12, KEPT, 3)
    assert read.last_result() == account.records[KEPT + 2]


def test_a_missing_and_a_torn_account_are_told_apart(tmp_path: Path) -> None:
    storage = open_storage(str(tmp_path))
    with pytest.raises(CheckpointMissingError):
        Applied.read(storage)
    (tmp_path / FILE).write_text("{")
    with pytest.raises(CheckpointMismatchError):
        Applied.read(storage)
