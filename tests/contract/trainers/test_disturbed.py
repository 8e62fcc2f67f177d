"""What a trainer promises when calls cross each other, callers leave, controllers change and the disk is full. Over a
real connection, store and model.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from rolecall.checkpoint.storage import open_storage
from rolecall.errors import CheckpointMissingError, DeadlineError, DiskFullError, FencedError, OutOfOrderError
from rolecall.rpc.role_process import ServiceArgs
from rolecall.settings import RunSettings
from rolecall.training.serving.applied import Applied
from rolecall.training.serving.device_thread import DeviceThread
from rolecall.training.serving.serve import load
from rolecall.v1 import actor_pb2, weights_pb2
from rolecall.v1.actor_pb2_grpc import ActorServiceStub
from rolecall.v1.training_pb2 import (
    ComputeColumnRequest,
    GetTrainerInfoRequest,
    LoadTrainerCheckpointRequest,
    OffloadRequest,
    SaveTrainerCheckpointRequest,
    TrainRequest,
)
from tests.file_sizes import files_up_to
from tests.fixtures_store import StoreUnderTest
from tests.twins.served import Batches, Rig, saved, served_actor, settings_tree, train
from tests.waiting import until

TIMEOUT_S = 30.0


@pytest.fixture
async def actor(store: StoreUnderTest, model: Path, tmp_path: Path) -> AsyncIterator[tuple[Rig, ActorServiceStub]]:
    settings = RunSettings.model_validate(settings_tree(store, model, tmp_path))
    async with served_actor(settings, store) as served:
        yield served


class Caller:
    """A controller's calls."""

    def __init__(self, actor: ActorServiceStub, ctl: int, folder: Path) -> None:
        self.actor, self.ctl, self.path = actor, ctl, folder / "checkpoints" / "actor"

    async def save(self, step: int, name: str = "actor") -> Any:
        return await saved(
            self.actor, SaveTrainerCheckpointRequest(ctl=self.ctl, path=str(self.path.with_name(name)), step=step)
        )

    async def load(self) -> Any:
        return await self.actor.LoadCheckpoint(
            LoadTrainerCheckpointRequest(ctl=self.ctl, path=str(self.path)), timeout=TIMEOUT_S
        )

    async def train(self, step: int, digest: str) -> Any:
        return await train(self.actor, TrainRequest(ctl=self.ctl, step=step, digest=digest))

    async def publish(self, version: int) -> None:
        request = actor_pb2.PublishWeightsRequest(
            ctl=self.ctl, epoch=1, step=0, policy_version=version, bucket_timeout_s=10
        )
        await self.actor.PublishWeights(request, timeout=TIMEOUT_S)

    async def info(self) -> Any:
        return await self.actor.GetInfo(GetTrainerInfoRequest(), timeout=30)


@contextmanager
def held(rig: Rig) -> Iterator[None]:
    """Keeps the device at work, so that calls queue up behind it."""
    release = threading.Event()
    work = asyncio.ensure_future(rig.calls.device_thread.run(lambda: release.wait(60), "held"))
    try:
        yield
    finally:
        release.set()
        work.add_done_callback(lambda done: done.result())


async def test_a_fresh_trainer_stands_at_the_start_and_a_checkpoint_brings_it_forward(
    actor: tuple[Rig, ActorServiceStub], store: StoreUnderTest, batches: Batches, tmp_path: Path
) -> None:
    rig, stub = actor
    caller = Caller(stub, store.ledger.ctl, tmp_path)
    fresh = await caller.info()
    assert (fresh.step, fresh.policy_version, fresh.HasField("last_result")) == (0, -1, False)
    with pytest.raises(CheckpointMissingError):
        await caller.load()
    digests = [batches.sealed(0).digest]
    batches.commit(await caller.train(0, digests[0]))
    await caller.save(1)
    digests.append(batches.sealed(1).digest)
    trained = await caller.train(1, digests[1])
    loaded = await caller.load()  # set back, as a controller that recovers would
    assert loaded.step == 1
    assert (await caller.train(1, digests[1])).digest == trained.digest
    assert (await caller.info()).step == 2
    assert rig.engine.context.engine.num_updates == 2


async def test_calls_that_cross_are_done_one_after_the_other(
    actor: tuple[Rig, ActorServiceStub], store: StoreUnderTest, batches: Batches, tmp_path: Path
) -> None:
    rig, stub = actor
    caller = Caller(stub, store.ledger.ctl, tmp_path)
    batches.commit(await caller.train(0, batches.sealed(0).digest))
    digest = batches.sealed(1).digest
    await caller.save(1)
    device = rig.calls.device_thread
    with held(rig):
        calls = [asyncio.ensure_future(caller.save(1, "again")) for _ in range(2)]
        await until(lambda: device.num_waiting == 2)  # the second waits for the first
        calls.append(asyncio.ensure_future(caller.load()))
        await until(lambda: device.num_waiting == 3)
        calls.append(asyncio.ensure_future(caller.train(1, digest)))
        await until(lambda: device.num_waiting == 4)
        assert not any(call.done() for call in calls)
    first, second, loaded, trained = await asyncio.gather(*calls)
    assert first == second
    assert (loaded.step, trained.step, (await caller.info()).step) == (1, 1, 2)
    assert await caller.save(1, "again") == first
    with pytest.raises(OutOfOrderError):
        await caller.save(1, "another")


async def test_a_save_whose_caller_left_is_finished(
    actor: tuple[Rig, ActorServiceStub], store: StoreUnderTest, tmp_path: Path
) -> None:
    rig, stub = actor
    caller = Caller(stub, store.ledger.ctl, tmp_path)
    with held(rig):
        leaving = asyncio.ensure_future(caller.save(0))
        await until(lambda: rig.calls.device_thread.num_waiting == 2)
        leaving.cancel()
        await asyncio.wait({leaving})
    await until(lambda: (caller.path / "trainer.json").exists())
    assert Applied.read(open_storage(str(caller.path))).step == 0


async def test_what_a_replaced_controller_left_waiting_for_the_device_is_not_done(
    actor: tuple[Rig, ActorServiceStub], store: StoreUnderTest, batches: Batches, tmp_path: Path
) -> None:
    rig, stub = actor
    old = Caller(stub, store.ledger.ctl, tmp_path)
    await old.save(0)
    batches.commit(await old.train(0, batches.sealed(0).digest))
    with held(rig):
        waiting = [asyncio.ensure_future(call) for call in (old.load(), old.save(1, "late"))]
        await until(lambda: rig.calls.device_thread.num_waiting == 3)
        assert store.replaced() == old.ctl + 1
        offload = asyncio.ensure_future(stub.Offload(OffloadRequest(ctl=old.ctl + 1), timeout=TIMEOUT_S))
        await until(lambda: rig.calls.fence.ctl == old.ctl + 1)
    for outcome in await asyncio.gather(*waiting, return_exceptions=True):
        assert isinstance(outcome, FencedError)
    await offload
    assert (await old.info()).step == 1  # not set back to 0
    assert Applied.read(open_storage(str(old.path))).step == 0


async def test_a_step_that_waits_while_the_trainer_is_set_back_is_refused(
    actor: tuple[Rig, ActorServiceStub], store: StoreUnderTest, batches: Batches, tmp_path: Path
) -> None:
    rig, stub = actor
    caller = Caller(stub, store.ledger.ctl, tmp_path)
    await caller.save(0)
    batches.commit(await caller.train(0, batches.sealed(0).digest))
    digest = batches.sealed(1).digest
    with held(rig):
        loading = asyncio.ensure_future(caller.load())
        await until(lambda: rig.calls.device_thread.num_waiting == 2)
        training = asyncio.ensure_future(caller.train(1, digest))  # in order when it is asked for
        await until(lambda: rig.calls.device_thread.num_waiting == 3)
    assert (await loading).step == 0
    with pytest.raises(OutOfOrderError, match="step 1 cannot be applied at step 0"):
        await training
    assert (await caller.info()).step == 0
    assert rig.engine.context.engine.num_updates == 0


async def test_a_trainer_that_is_set_back_keeps_the_highest_version_it_published(
    actor: tuple[Rig, ActorServiceStub], store: StoreUnderTest, tmp_path: Path
) -> None:
    _, stub = actor
    caller = Caller(stub, store.ledger.ctl, tmp_path)
    await stub.OpenWeightChannel(
        weights_pb2.OpenWeightChannelRequest(ctl=caller.ctl, epoch=1, world_size=1, timeout_s=10), timeout=10
    )
    await caller.publish(version=3)
    await caller.save(0)
    await caller.publish(version=5)
    assert (await caller.load()).policy_version == 5
    assert (await caller.info()).policy_version == 5


async def test_a_full_disk_fails_the_save_and_nothing_else(
    actor: tuple[Rig, ActorServiceStub], store: StoreUnderTest, batches: Batches, tmp_path: Path
) -> None:
    _, stub = actor
    caller = Caller(stub, store.ledger.ctl, tmp_path)
    await caller.save(0)
    batches.commit(await caller.train(0, batches.sealed(0).digest))
    with files_up_to(100_000), pytest.raises(DiskFullError, match="no space"):
        await caller.save(1, "full")
    assert not any(caller.path.with_name("full").rglob("*.safetensors"))
    await caller.train(1, batches.sealed(1).digest)
    assert (await caller.load()).step == 0
    await caller.save(0)


async def test_columns_wait_behind_a_step_and_are_of_the_weights_that_are_named(
    actor: tuple[Rig, ActorServiceStub], store: StoreUnderTest, batches: Batches, tmp_path: Path
) -> None:
    _, stub = actor
    caller = Caller(stub, store.ledger.ctl, tmp_path)
    rows = [row for group in batches.sampled(2) for row in group.rows]
    with pytest.raises(OutOfOrderError):
        await stub.ComputeLogprobs(ComputeColumnRequest(ctl=caller.ctl, rows=rows, step=1), timeout=TIMEOUT_S)
    answer = await stub.ComputeLogprobs(ComputeColumnRequest(ctl=caller.ctl, rows=rows, step=0), timeout=TIMEOUT_S)
    assert answer.num_already_written == 0


class Moves:
    """Counts signs of progress, and whether there was work whenever one came."""

    def __init__(self) -> None:
        self.phase, self.busy, self.num = "idle", False, 0

    def progress(self) -> None:
        self.num += 1

    async def of(self, work: Any) -> int:
        """Signs of progress while `work` was done."""
        before = self.num
        await work
        assert not self.busy
        return self.num - before


async def test_every_kind_of_work_moves_in_small_parts(
    actor: tuple[Rig, ActorServiceStub], store: StoreUnderTest, batches: Batches, tmp_path: Path
) -> None:
    rig, stub = actor
    caller, moves = Caller(stub, store.ledger.ctl, tmp_path), Moves()
    rig.calls.device_thread.show_to(moves)
    num_tensors = sum(1 for _ in rig.engine.context.engine.named_weights())
    rows = [row for group in batches.sampled(8) for row in group.rows]
    num_microbatches = sum(row.num_tokens for row in rows) // 64
    assert (
        await moves.of(stub.ComputeLogprobs(ComputeColumnRequest(ctl=caller.ctl, rows=rows), timeout=TIMEOUT_S))
        > num_microbatches
    )
    assert await moves.of(caller.train(0, batches.sealed(0).digest)) > 4
    await moves.of(caller.save(1))  # its snapshot copies nothing yet, and files are written beside the device's work
    assert await moves.of(caller.load()) > 3 * num_tensors
    await stub.OpenWeightChannel(
        weights_pb2.OpenWeightChannelRequest(ctl=caller.ctl, epoch=1, world_size=1, timeout_s=10), timeout=10
    )
    publish = actor_pb2.PublishWeightsRequest(ctl=caller.ctl, epoch=1, step=1, policy_version=0, bucket_timeout_s=10)
    assert await moves.of(stub.PublishWeights(publish, timeout=TIMEOUT_S)) > num_tensors


async def test_a_model_that_is_not_loaded_in_time_is_an_error_that_says_so(
    store: StoreUnderTest, model: Path, tmp_path: Path
) -> None:
    settings = RunSettings.model_validate(settings_tree(store, model, tmp_path, controller={"start_timeout_s": 0.2}))
    device_thread, released = DeviceThread(), threading.Event()
    with pytest.raises(
        DeadlineError, match=r"actor was still loading the model after controller.start_timeout_s = 0.2 s"
    ):
        await load(ServiceArgs(settings, "actor", "1"), device_thread, lambda hooks: released.wait(60), None)
    released.set()
    await device_thread.close()
