"""Checkpoints of whole runs: beside the steps, where there is no room, behind a URL, and of the right run."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from rolecall.checkpoint.manifest import IDENTITY, RUN_ID, RunCheckpoints
from rolecall.checkpoint.storage import open_storage
from rolecall.data.dataset import load_prompts
from rolecall.errors import BudgetSpentError, CheckpointMismatchError
from rolecall.identity import kept, settle
from rolecall.settings.services import STORE_SHARE
from rolecall.store.budget import PromptBytes, StoreBudget
from rolecall.v1 import controller_pb2 as pb
from services.controller import loop, threads
from services.controller.durable.run_point import RunPoint
from tests.twins.run import LightRun, TwinRun, balance, check_trained_once
from tests.waiting import until


async def test_a_full_disk_costs_a_checkpoint_and_not_the_run(light_run: LightRun) -> None:
    async with light_run(run={"num_steps": 6, "checkpoint_every_steps": 2}) as run:
        async with run.controller() as life, run.rollout("rollout-0", token_s=0.002):
            run.actor.trainer.disk_is_full = True
            await life.reaches(4)
            run.actor.trainer.disk_is_full = False
            await life.ends()
    assert balance(run) == (24, 24, 0, 0)
    assert run.checkpoints.latest() is not None


def crowd(run: TwinRun) -> None:
    """Gives the run the least store that its settings allow."""
    settings = run.settings
    raw = load_prompts(settings.data.train, settings.data, settings.reward, settings.algorithm.distillation)
    budget = StoreBudget.of(settings, PromptBytes.largest(raw, settings.algorithm.groups_per_batch))
    least = int(budget.num_batches * budget.batch_bytes / STORE_SHARE) + 2
    run.settings = settings.model_copy(update={"store": settings.store.model_copy(update={"max_bytes": least})})


@pytest.mark.parametrize("trouble", ["no room for the state", "no room for the files"])
async def test_a_full_disk_of_a_crowded_store_is_tried_again_though_no_step_comes(
    light_run: LightRun, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    """Nothing is admitted before rows are freed, and no batch comes before something is admitted."""
    monkeypatch.setattr(loop, "ROOM_RETRY_S", 0.2)
    hasty: dict[str, dict[str, Any]] = {"controller": {"stall_timeout_s": 3.0}, "reward": {"timeout_s": 0.3}}
    async with light_run(run={"num_steps": 12, "checkpoint_every_steps": 1000}, **hasty) as run:
        crowd(run)
        trainer = run.actor.trainer
        trainer.disk_is_full = trouble == "no room for the state"
        trainer.cannot_write = trouble == "no room for the files"
        async with run.controller() as life, run.rollout("rollout-0"):
            await life.shows(lambda status: status.step == 2 and "a checkpoint: the rows" in status.waiting_for)
            await asyncio.sleep(6.0)  # longer than anything else is waited for
            assert not life.running.done()
            trainer.disk_is_full = trainer.cannot_write = False
            await life.ends()
    assert balance(run) == (48, 48, 0, 0)


async def test_a_checkpoint_that_takes_long_stalls_no_run_that_waits_for_it(light_run: LightRun) -> None:
    sections: dict[str, dict[str, Any]] = {"controller": {"stall_timeout_s": 3.0}, "reward": {"timeout_s": 0.5}}
    async with light_run(run={"num_steps": 6, "checkpoint_every_steps": 1000}, **sections) as run:
        crowd(run)
        run.actor.trainer.may_write.clear()
        async with run.controller() as life, run.rollout("rollout-0"):
            await life.reaches(2)
            await asyncio.sleep(6.0)
            assert not life.running.done()
            run.actor.trainer.may_write.set()
            await life.ends()
    assert balance(run) == (24, 24, 0, 0)


async def test_a_storage_that_hangs_costs_checkpoints_and_not_the_run(light_run: LightRun) -> None:
    async with light_run(run={"num_steps": 1000, "checkpoint_every_steps": 2}, actor={"train_timeout_s": 5.0}) as run:
        run.actor.trainer.may_write.clear()
        async with run.controller() as life, run.rollout("rollout-0", token_s=0.002):
            await life.reaches(8)  # the checkpoint of step 2 hangs, which those after it are refused for
            status = await life.status()
            assert (status.num_recoveries, status.last_failure) == (0, "")
            assert run.checkpoints.latest() is None
            run.actor.trainer.may_write.set()
            assert (await life.saved()).step >= 8
            run.actor.trainer.may_write.clear()
            await life.stub.StopRun(pb.StopRunRequest(checkpoint=True))
            with pytest.raises(
                BudgetSpentError, match=r"the run was stopped; no checkpoint of step \d+ could be saved"
            ):
                await life.ends()
    assert (await asyncio.to_thread(run.newest)).step >= 8


class Hanging(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Takes trainers' files at once, and the controller's when it may."""

    protocol = "hanging"
    may_commit = threading.Event()
    most_waiting = num_waiting = 0

    def _open(self, path: str, mode: str = "rb", **options: object) -> object:
        if mode == "wb" and path.endswith("/COMMITTED") and not self.may_commit.is_set():
            Hanging.num_waiting += 1
            Hanging.most_waiting = max(Hanging.most_waiting, Hanging.num_waiting)
            assert self.may_commit.wait(600)
            Hanging.num_waiting -= 1
        return super()._open(path, mode, **options)


async def test_a_manifest_whose_writing_hangs_costs_checkpoints_and_not_the_run(
    light_run: LightRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "SETTLE_S", 0.5)
    fsspec.register_implementation("hanging", Hanging, clobber=True)
    section = {"num_steps": 1000, "checkpoint_every_steps": 2, "checkpoint_url": f"hanging://{tmp_path.name}"}
    async with light_run(run=section, actor={"train_timeout_s": 3.0}) as run:
        run.stack.callback(Hanging.may_commit.set)
        async with run.controller() as life, run.rollout("rollout-0", token_s=0.002):
            await life.reaches(6)
            status = await life.status()
            assert (status.num_recoveries, status.last_failure) == (0, "")
            assert run.checkpoints.latest() is None
            run.actor.restart()  # another life of the loop knows of it, too
            await life.shows(lambda status: status.num_recoveries == 1)
            await life.reaches(status.step + 4)
            assert Hanging.most_waiting == 1
            Hanging.may_commit.set()
            assert (await life.saved()).step >= 6
            Hanging.may_commit.clear()
            await life.stub.StopRun(pb.StopRunRequest(checkpoint=True))
            with pytest.raises(
                BudgetSpentError, match=r"the run was stopped; no checkpoint of step \d+ could be saved: the manifest"
            ):
                await life.ends()


async def test_steps_go_on_while_a_checkpoint_is_written_and_its_rows_stay_until_it_is_committed(
    light_run: LightRun,
) -> None:
    async with light_run(run={"num_steps": 11, "checkpoint_every_steps": 5}) as run:
        checkpoints = run.checkpoints
        run.actor.trainer.may_write.clear()
        async with run.controller() as life, run.rollout("rollout-0"):
            await life.reaches(9)
            asked = asyncio.create_task(life.saved())
            await until(lambda: run.latest and run.latest._board.checkpoint_requests)
            assert checkpoints.latest() is None
            assert run.ledger.position().freed_step == 0
            assert not asked.done()
            run.actor.trainer.may_write.set()
            await life.ends()
            await asyncio.wait_for(asked, 30)
    assert balance(run) == (44, 44, 0, 0)
    check_trained_once(run.actor.trainer, 88)
    assert run.newest().step == 11


async def test_who_asks_for_a_checkpoint_while_another_fails_gets_the_next_one(light_run: LightRun) -> None:
    async with light_run(run={"num_steps": 300, "checkpoint_every_steps": 200}) as run:
        async with run.controller() as life, run.rollout("rollout-0"):
            await life.reaches(1)
            run.actor.trainer.may_write.clear()
            run.actor.trainer.cannot_write = True
            asked = [asyncio.create_task(life.saved())]
            step = (await life.status()).step
            await life.reaches(step + 3)
            asked.append(asyncio.create_task(life.saved()))
            await life.shows(lambda status: "the checkpoint of step" in status.waiting_for)
            await asyncio.sleep(0.2)
            run.actor.trainer.may_write.set()
            await asyncio.sleep(0.2)
            run.actor.trainer.cannot_write = False
            await asyncio.wait_for(asyncio.gather(*asked), 30)
            await life.stub.StopRun(pb.StopRunRequest())


async def test_a_run_whose_checkpoint_is_never_written_goes_on_in_another_controller(light_run: LightRun) -> None:
    async with light_run(run={"num_steps": 8, "checkpoint_every_steps": 3}) as run, run.rollout("rollout-0"):
        run.actor.trainer.may_write.clear()
        async with run.controller() as life:
            await life.reaches(5)
        assert run.checkpoints.latest() is None
        run.actor.trainer.may_write.set()
        await run.to_the_end()
    assert balance(run) == (32, 32, 0, 0)
    check_trained_once(run.actor.trainer, 64)


async def test_checkpoints_may_live_behind_a_url(light_run: LightRun, tmp_path: Path) -> None:
    url = f"memory://{tmp_path.name}/checkpoints"
    section = {"num_steps": 5, "checkpoint_every_steps": 1, "checkpoint_url": url}
    async with light_run(run=section) as run, run.rollout("rollout-0", token_s=0.002):
        settle(run.settings)
        async with run.controller() as life:
            await life.reaches(3)
        run.actor.restart()
        await run.to_the_end()
    check_trained_once(run.actor.trainer, 40)
    assert run.newest().step == 5
    assert run.newest().identity == kept(run.settings.run.dir) != {}
    assert not (run.settings.run.dir / "checkpoints").exists()


async def test_a_checkpoint_of_another_run_is_refused(light_run: LightRun) -> None:
    async with light_run() as run:
        checkpoints = run.checkpoints
        checkpoints.commit(checkpoints.begin(1), [], RunPoint("another", 0, 1, 1, 1, 4, 4, {}, "", []))
        with pytest.raises(CheckpointMismatchError, match="'another'"):
            await run.to_the_end("rollout-0")


async def test_a_run_whose_place_for_checkpoints_another_takes_too_ends_and_has_lost_nothing(
    light_run: LightRun, tmp_path: Path
) -> None:
    section = {"num_steps": 9, "checkpoint_every_steps": 4, "checkpoint_url": f"memory://{tmp_path.name}/shared"}
    async with light_run(run=section) as run, run.rollout("rollout-0", token_s=0.002):
        settle(run.settings)
        run.actor.trainer.may_write.clear()
        async with run.controller() as life:
            await life.reaches(5)
            others = RunCheckpoints(open_storage(run.settings.run.checkpoints), 1)
            others.commit(others.begin(4), [], {"run": run.settings.run.name, IDENTITY: {RUN_ID: "other"}})
            run.actor.trainer.may_write.set()
            with pytest.raises(CheckpointMismatchError, match=r"was made by another run.* another run\.checkpoint_url"):
                await life.ends()
        with pytest.raises(CheckpointMismatchError, match=r"was made by another run"):
            await run.to_the_end()
        newest = others.latest()
        assert newest is not None
        assert newest.run_id == "other"
        fsspec.filesystem("memory").rm(f"/{tmp_path.name}/shared", recursive=True)
        run.actor.restart()
        await run.to_the_end()
    assert balance(run) == (36, 36, 0, 0)
    check_trained_once(run.actor.trainer, 72)
