"""Checkpoints of whole runs: beside the steps, where there is no room, behind a URL, and of the right run."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from rolecall.checkpoint.storage import open_storage
from rolecall.errors import CheckpointMismatchError
from rolecall.settings import RunSettings
from rolecall.store.ledger import Ledger
from rolecall.v1 import controller_pb2 as pb
from rolecall.v1.controller_pb2_grpc import ControllerServiceStub
from services.controller.durable.run_point import Checkpoints, RunPoint
from tests.fixtures_store import StoreUnderTest
from tests.twins.run import balance, check_trained_once, saved, twin_run

MakeSettings = Callable[..., RunSettings]
RUN_S = 60.0
"""Deadline of one light run, which takes a second or two on a quiet machine."""


async def test_a_full_disk_costs_a_checkpoint_and_not_the_run(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with twin_run(store, tmp_path, make_settings, run={"num_steps": 6, "checkpoint_every_steps": 2}) as run:
        async with run.controller() as (stub, running), run.rollout("rollout-0", token_s=0.002):
            run.actor.trainer.disk_is_full = True
            await reaches(stub, running, 4)
            run.actor.trainer.disk_is_full = False
            await asyncio.wait_for(running, RUN_S)
    assert balance(run) == (24, 24, 0, 0)
    assert Checkpoints(open_storage(run.settings.run.checkpoints), 2).latest() is not None


async def reaches(stub: ControllerServiceStub, running: "asyncio.Task[None]", step: int) -> None:
    """Returns when the run has applied `step` steps."""
    while (await stub.GetRun(pb.GetRunRequest())).status.step < step:
        assert not running.done(), running.exception()
        await asyncio.sleep(0.01)


async def test_steps_go_on_while_a_checkpoint_is_written_and_its_rows_stay_until_it_is_committed(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with twin_run(store, tmp_path, make_settings, run={"num_steps": 11, "checkpoint_every_steps": 5}) as run:
        checkpoints = Checkpoints(open_storage(run.settings.run.checkpoints), 2)
        run.actor.trainer.may_write.clear()
        async with run.controller() as (stub, running), run.rollout("rollout-0"):
            await reaches(stub, running, 9)
            asked = asyncio.create_task(saved(stub))
            await asyncio.sleep(0.2)
            assert checkpoints.latest() is None
            assert Ledger(store.connection, store.run).position().freed_step == 0
            assert not asked.done()
            run.actor.trainer.may_write.set()
            await asyncio.wait_for(running, RUN_S)
            await asyncio.wait_for(asked, 5)
    assert balance(run) == (44, 44, 0, 0)
    check_trained_once(run.actor.trainer, 88)
    latest = checkpoints.latest()
    assert latest is not None
    assert latest[1].step == 11


async def test_who_asks_for_a_checkpoint_while_another_fails_gets_the_next_one(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with twin_run(store, tmp_path, make_settings, run={"num_steps": 300, "checkpoint_every_steps": 200}) as run:
        async with run.controller() as (stub, running), run.rollout("rollout-0"):
            await reaches(stub, running, 1)
            run.actor.trainer.may_write.clear()
            run.actor.trainer.cannot_write = True
            asked = [asyncio.create_task(saved(stub))]
            step = (await stub.GetRun(pb.GetRunRequest())).status.step
            await reaches(stub, running, step + 3)
            asked.append(asyncio.create_task(saved(stub)))
            while "the checkpoint of step" not in (await stub.GetRun(pb.GetRunRequest())).status.waiting_for:
                assert not running.done(), running.exception()
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.2)
            run.actor.trainer.may_write.set()
            await asyncio.sleep(0.2)
            run.actor.trainer.cannot_write = False
            await asyncio.wait_for(asyncio.gather(*asked), 10)
            await stub.StopRun(pb.StopRunRequest())


async def test_a_run_whose_checkpoint_is_never_written_goes_on_in_another_controller(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with (
        twin_run(store, tmp_path, make_settings, run={"num_steps": 8, "checkpoint_every_steps": 3}) as run,
        run.rollout("rollout-0"),
    ):
        run.actor.trainer.may_write.clear()
        async with run.controller() as (stub, running):
            await reaches(stub, running, 5)
        assert Checkpoints(open_storage(run.settings.run.checkpoints), 2).latest() is None
        run.actor.trainer.may_write.set()
        async with run.controller() as (_, running):
            await asyncio.wait_for(running, RUN_S)
    assert balance(run) == (32, 32, 0, 0)
    check_trained_once(run.actor.trainer, 64)


async def test_checkpoints_may_live_behind_a_url(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    url = f"memory://{tmp_path.name}/checkpoints"
    section = {"num_steps": 5, "checkpoint_every_steps": 1, "checkpoint_url": url}
    async with twin_run(store, tmp_path, make_settings, run=section) as run, run.rollout("rollout-0", token_s=0.002):
        async with run.controller() as (stub, running):
            await reaches(stub, running, 3)
        run.actor.restart()
        async with run.controller() as (_, running):
            await asyncio.wait_for(running, RUN_S)
    check_trained_once(run.actor.trainer, 40)
    latest = Checkpoints(open_storage(url), 2).latest()
    assert latest is not None
    assert latest[1].step == 5
    assert not (run.settings.run.dir / "checkpoints").exists()


async def test_a_checkpoint_of_another_run_is_refused(
    store: StoreUnderTest, tmp_path: Path, make_settings: MakeSettings
) -> None:
    async with twin_run(store, tmp_path, make_settings) as run:
        checkpoints = Checkpoints(open_storage(run.settings.run.checkpoints), 2)
        checkpoints.commit(checkpoints.begin(1), [], RunPoint("another", 0, 1, 1, 1, 4, 4, {}, "", []))
        async with run.controller() as (_, running), run.rollout("rollout-0"):
            with pytest.raises(CheckpointMismatchError, match="'another'"):
                await asyncio.wait_for(running, RUN_S)
