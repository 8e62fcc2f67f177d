"""Whole light runs whose rollouts and trainers share a device of the tests: what a healthy run does between its shifts,
and what becomes of one that finds the device full.
"""

import asyncio
import json
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolecall.columns import reference_column
from rolecall.data.dataset import load_prompts
from rolecall.errors import BudgetSpentError, DeadlineError, UnavailableError
from rolecall.rpc.fence import Fence
from rolecall.settings.services import STORE_SHARE
from rolecall.shifts import Post, ShiftLocks
from rolecall.store.budget import PromptBytes, StoreBudget
from rolecall.store.sealed import read_ctl
from rolecall.training.serving.calls import ColumnCalls
from rolecall.training.serving.device_thread import DeviceThread
from rolecall.training.serving.serve import on_shift
from rolecall.training.serving.trainer import Progress
from rolecall.v1 import controller_pb2, reference_pb2_grpc, training_pb2
from rolecall.v1.trajectory_pb2 import RowRef, TrainBatch, TrajectoryMeta
from rolecall.weights.transferred import Transferred
from services.reference.service import ReferenceServicer
from services.rollout.sampling import Probed, Sample, SampleRequest, VersionSpan
from services.rollout.scripted import POLL_S, Running, ScriptedEngine
from tests.ports import free_port
from tests.twins.device import (
    MIB,
    PARTS,
    REFERENCE,
    EngineMemory,
    ReferenceMemory,
    TrainerState,
    TwinDevice,
    device_of,
    held_by,
)
from tests.twins.run import RUN_S, LightRun, TwinRun, balance, check_trained_once, served
from tests.twins.trainer import ActorTwin, ColumnTwin, Row, TrainerTwin
from tests.waiting import until


class SharingEngine(ScriptedEngine):
    """A rollout engine on the run's device, which notes who else is there while it samples."""

    def __init__(self, run: TwinRun, name: str = "rollout-0") -> None:
        super().__init__(vocab_size=200, sleep_levels=(1, 2))
        self._memory = EngineMemory(device_of(run.settings, name))
        self._device = run.settings.run.dir.parent / "device"
        self.levels: list[int] = []
        """Of its sleeps."""
        self.beside: set[int] = set()
        """Bytes of the trainers while it sampled."""
        self.versions: list[int] = []
        """Versions that it loaded."""

    async def receive(self, epoch: int, policy_version: int, bucket_timeout_s: float) -> Transferred:
        self.versions.append(policy_version)
        return await super().receive(epoch, policy_version, bucket_timeout_s)

    async def sample(self, request: SampleRequest) -> Sample:
        self.beside.add(sum(number for who, number in held_by(self._device).items() if not who.startswith("rollout")))
        return await super().sample(request)

    async def probe(self, token_ids: Sequence[int], num_decoded: int) -> Probed:
        self._memory.take_cache()
        return await super().probe(token_ids, num_decoded)

    async def resume(self) -> None:
        self._memory.take_cache()
        await super().resume()

    async def sleep(self, level: int) -> None:
        self.levels.append(level)
        await super().sleep(level)
        self._memory.sleep()

    async def wake_up(self) -> None:
        self._memory.wake_up()


class SharingTrainer(TrainerTwin):
    """A trainer on the run's device, which notes what rollouts and a reference have there while it learns."""

    def share(self, run: TwinRun, who: str) -> None:
        """Takes its place."""
        self.state = TrainerState(device_of(run.settings, who))
        self.device = run.settings.run.dir.parent / "device"
        self.beside: set[int] = set()

    def learn(
        self, batch: TrainBatch, rows: Sequence[Row], metas: Sequence[TrajectoryMeta], progress: Progress
    ) -> None:
        held = held_by(self.device)
        self.beside.add(held.get("rollout-0", 0) + held.get("ref", 0))
        super().learn(batch, rows, metas, progress)


class SharingActor(SharingTrainer, ActorTwin):
    """An actor that does so."""


class SharingReference(ColumnTwin):
    """A reference on the run's device, which notes who else is there while it scores."""

    def __init__(self, run: TwinRun) -> None:
        super().__init__(run.store.rows)
        self._memory = ReferenceMemory(run.settings, "ref")
        self._device = run.settings.run.dir.parent / "device"
        self.beside: set[int] = set()

    def columns_of(self, row: Row) -> Row:
        return {reference_column("ref"): row["response_mask"].astype(np.float32) * np.float32(-1)}

    def compute(self, rows: Sequence[RowRef], prefix: str) -> frozenset[str]:
        self._memory.need()
        self.beside.add(sum(number for who, number in held_by(self._device).items() if who != "ref"))
        return super().compute(rows, prefix)

    def move(self, parts: Sequence[training_pb2.StatePart.ValueType], *, to_host: bool) -> None:
        self._memory.leave()


async def serve_reference(run: TwinRun) -> SharingReference:
    """Serves it where its section says, once its shift has come, as a process of its own does."""
    async with on_shift(run.settings, "references" if run.settings.references["ref"].offload else None):
        reference = SharingReference(run)
    calls = ColumnCalls(reference, DeviceThread(), Fence(lambda: read_ctl(run.store.connection, run.store.run)), 2**20)
    calls.start()
    run.stack.push_async_callback(calls.close)
    servicer = ReferenceServicer(reference, calls, "ref", "ref.1")
    add, bind = reference_pb2_grpc.add_ReferenceServiceServicer_to_server, str(run.settings.references["ref"].address)
    await served(run.stack, add, servicer, "rolecall.v1.ReferenceService", bind)
    return reference


def scored(offload: bool | None = True, **controller: float) -> dict[str, Any]:
    """Sections of a run whose loss reads what a reference says, which is on the device, too."""
    return {
        "rollout": SHARED,
        "algorithm": {"groups_per_batch": 4, "kl": {"reference": "ref", "kl_coef": 0.1, "placement": "loss"}},
        "references": {"ref": {"address": f"127.0.0.1:{free_port()}", "offload": offload}},
        "controller": controller,
    }


def share(run: TwinRun, trains_on: Sequence[str] = ActorTwin.trains_on) -> SharingActor:
    """Puts the actor of `run` on its device."""
    actor = SharingActor(run.store.rows)
    actor.trains_on = tuple(trains_on)
    actor.share(run, "actor")
    run.actor.restart(actor)
    return actor


SHARED: dict[str, Any] = {"sleep_mode": True, "max_groups": 4, "generation_timeout_s": 30.0}


@pytest.mark.parametrize("max_staleness", [0, 1])
async def test_a_side_is_alone_on_the_device_and_nothing_else_of_a_run_changes(
    light_run: LightRun, tmp_path: Path, max_staleness: int
) -> None:
    (tmp_path / "held.jsonl").write_text('{"prompt": "number 7", "ground_truth": "7"}\n')
    async with light_run(
        rollout=SHARED,
        run={"num_steps": 4, "checkpoint_every_steps": 2},
        algorithm={"groups_per_batch": 4, "max_staleness": max_staleness},
        evaluation={"every_steps": 1, "sets": {"held": {"path": str(tmp_path / "held.jsonl"), "max_tokens": 12}}},
    ) as run:
        actor = share(run)
        async with run.controller() as life:
            engine = SharingEngine(run)
            async with run.rollout("rollout-0", engine=engine):
                await life.ends()
        published = PARTS[
            training_pb2.STATE_PART_PARAMETERS
        ]  # beside which what was kept may go on, once it is attested
        assert engine.beside <= ({0, published} if max_staleness else {0})
        assert actor.beside == {0}
        assert engine.levels[0] == 2
        assert len(engine.levels) >= 4
        check_trained_once(actor, 4 * 4 * 2)
        assert balance(run)[1] == 16
        assert run.newest().step == 4
        steps = run.metrics()
        assert [step["step"] for step in steps] == [1, 2, 3, 4]
        for step in steps:
            assert {
                "shift/to_training_s",
                "shift/to_publishing_s",
                "shift/to_sampling_s",
                "time/shift_s",
            } <= step.keys()
            assert 0 < step["shift/to_training_s"] < step["time/step_s"]
        assert max(step["staleness/max"] for step in steps) <= max_staleness
        versions = [version for _, version in actor.publishes]
        assert [step for step, _ in actor.publishes] == [0, 1, 2, 3, 4]
        assert versions == sorted(versions)


class LongEngine(SharingEngine):
    """An engine one of whose first responses does not end under the weights that it began with."""

    LONG = "0/0:"
    """Beginning of its request's id, whatever the attempt."""

    def __init__(self, run: TwinRun) -> None:
        super().__init__(run)
        self._long: Running | None = None
        self.num_begun = 0
        self.spans: list[VersionSpan] = []

    async def _sample(self, request: SampleRequest, running: Running) -> Sample:
        if not request.request_id.startswith(self.LONG):
            return await super()._sample(request, running)
        self._long = running
        self.num_begun += 1
        sample = await super()._sample(request, running)
        self.spans += sample.spans
        return sample

    def _next(self, request: SampleRequest, position: int) -> tuple[int, float]:
        begins = request.request_id.startswith(self.LONG) and position < 2
        return (3, -1.0) if begins else super()._next(request, position)

    async def _turn(self, running: Running) -> None:
        while running is self._long and running.tokens and self._version == running.versions[0]:
            if running.aborted:
                return
            self._num_moves += 1
            await asyncio.sleep(POLL_S)
        await super()._turn(running)


async def test_a_step_does_not_wait_for_a_response_that_goes_on_after_it(light_run: LightRun) -> None:
    async with light_run(
        rollout=SHARED,
        run={"num_steps": 3},
        algorithm={"groups_per_batch": 4, "max_staleness": 1},
        controller={"stall_timeout_s": 60.0},
    ) as run:
        actor = share(run)
        async with run.controller() as life:
            engine = LongEngine(run)
            async with run.rollout("rollout-0", engine=engine):
                await life.ends()
        check_trained_once(actor, 3 * 4 * 2)
        assert engine.num_begun == 1, "it was aborted and begun again"
        assert (engine.spans[0].start, engine.spans[0].end) == (0, 1)
        assert len({span.policy_version for span in engine.spans}) == 2
        assert max(step["staleness/max"] for step in run.metrics()) == 1


class LateEngine(SharingEngine):
    """An engine that cannot be reached the first time it is to wake."""

    async def wake_up(self) -> None:
        if not self._is_late:
            self._is_late = True
            raise UnavailableError("the connection was lost")
        await super().wake_up()

    _is_late = False


async def test_a_rollout_that_did_not_answer_is_asked_again_to_wake_and_has_every_version(light_run: LightRun) -> None:
    async with light_run(rollout={**SHARED, "num_replicas": 2}, run={"num_steps": 2}) as run:
        share(run)
        async with run.controller() as life:
            engines = {"rollout-0": SharingEngine(run), "rollout-1": LateEngine(run, "rollout-1")}
            async with AsyncExitStack() as stack:
                for name, engine in engines.items():
                    await stack.enter_async_context(run.rollout(name, engine=engine))
                await life.ends()
        assert [engine.versions for engine in engines.values()] == [[0, 1, 2]] * 2


async def test_a_reference_is_on_the_device_while_it_scores_a_batch_and_alone_then(light_run: LightRun) -> None:
    async with light_run(**scored()) as run:
        actor = share(run, (*ActorTwin.trains_on, reference_column("ref")))
        async with run.controller() as life:
            reference, engine = await serve_reference(run), SharingEngine(run)
            async with run.rollout("rollout-0", engine=engine):
                await life.ends()
        check_trained_once(actor, 3 * 4 * 2)
        assert reference.columns_asked == [(0, 8)] * 3
        assert (engine.beside, reference.beside, actor.beside) == ({0}, {0}, {0})
        for step in run.metrics():
            assert 0 < step["shift/to_scoring_s"] + step["shift/to_training_s"] < step["time/shift_s"]
            assert 0 < step["time/references_s"] < step["time/step_s"]


async def test_a_controller_that_begins_says_that_it_waits_for_references_too(light_run: LightRun) -> None:
    async with light_run(**scored()) as run:
        before, loading = ShiftLocks(run.settings.run.dir), Post(run.settings.run.dir, "references")
        assert before.give_to("references")
        assert loading.take()
        before.close()
        async with run.controller() as life:
            await life.shows(lambda status: "rollouts and references to leave" in status.waiting_for)
            loading.close()
            await life.shows(lambda status: "to leave" not in status.waiting_for)


async def test_a_reference_that_is_to_stay_scores_groups_as_they_land(light_run: LightRun) -> None:
    async with light_run(**scored(offload=False)) as run:
        actor = share(run, (*ActorTwin.trains_on, reference_column("ref")))
        async with run.controller() as life:
            reference, engine = await serve_reference(run), SharingEngine(run)
            async with run.rollout("rollout-0", engine=engine):
                await life.ends()
        check_trained_once(actor, 3 * 4 * 2)
        assert sum(number for _, number in reference.columns_asked) == 24
        assert len(reference.columns_asked) > 3
        assert (engine.beside, actor.beside) == ({REFERENCE}, {REFERENCE})
        assert all("shift/to_scoring_s" not in step for step in run.metrics())


async def test_a_reference_that_is_away_is_asked_again_and_one_that_stays_away_ends_the_run(
    light_run: LightRun,
) -> None:
    async with light_run(**scored(stall_timeout_s=2.0)) as run:
        share(run)
        async with run.controller() as life:
            reference = await serve_reference(run)
            async with run.rollout("rollout-0", engine=SharingEngine(run)):
                reference.column_failures.extend([UnavailableError("it ends"), DeadlineError("it is late")])
                await life.reaches(1)
                assert len(reference.columns_asked) >= 3
                reference.column_failures.extend([UnavailableError("it is gone")] * 1000)
                with pytest.raises(
                    BudgetSpentError, match=r"reference ref was away for .*stall_timeout_s = 2 s.* gone"
                ):
                    await life.ends()


async def test_a_stop_waits_for_no_reference_that_is_away_and_saves_the_step_before(light_run: LightRun) -> None:
    async with light_run(**scored(stall_timeout_s=RUN_S)) as run:
        share(run)
        async with run.controller() as life:
            reference = await serve_reference(run)
            async with run.rollout("rollout-0", engine=SharingEngine(run)):
                await life.reaches(1)
                reference.column_failures.extend([UnavailableError("it is gone")] * 1000)
                await life.shows(lambda status: "references on the shared devices to score" in status.waiting_for)
                await life.stub.StopRun(controller_pb2.StopRunRequest(checkpoint=True))
                await life.ends()
                stopped = await life.status()
        assert (stopped.state, run.newest().step) == (controller_pb2.RUN_STATE_DONE, stopped.step)


class Unanswering(SharingEngine):
    """An engine that answers no evaluation."""

    def __init__(self, run: TwinRun) -> None:
        super().__init__(run)
        self.is_asked = asyncio.Event()

    async def sample(self, request: SampleRequest) -> Sample:
        if request.request_id.startswith("eval/"):
            self.is_asked.set()
            await asyncio.Event().wait()  # bounded: by the end of the rollout
        return await super().sample(request)


async def test_an_evaluation_on_a_shared_device_whose_only_rollout_dies_goes_on_with_the_next_one(
    light_run: LightRun, tmp_path: Path
) -> None:
    (tmp_path / "held.jsonl").write_text('{"prompt": "number 7", "ground_truth": "7"}\n')
    sets = {"held": {"path": str(tmp_path / "held.jsonl"), "max_tokens": 12}}
    async with light_run(rollout=SHARED, run={"num_steps": 1}, evaluation={"sets": sets}) as run:
        actor = share(run)
        async with run.controller() as life:
            dying = Unanswering(run)
            async with run.rollout("rollout-0", engine=dying):
                await until(dying.is_asked.is_set)
            await dying.sleep(2)  # as its memory goes with a process
            await life.shows(lambda status: any(worker.lost for worker in status.workers))
            async with run.rollout("rollout-0", engine=SharingEngine(run)):
                await life.ends()
        assert [step for step, _ in actor.publishes] == [0, 0, 1]
        lines = [json.loads(line) for line in (run.settings.run.dir / "metrics.jsonl").read_text().splitlines()]
        assert [line["eval/held/missing"] for line in lines if "eval/held/missing" in line] == [0, 0]


async def test_people_pause_resume_and_stop_a_run_that_shares_a_device(light_run: LightRun) -> None:
    async with light_run(rollout=SHARED, run={"num_steps": 50, "checkpoint_every_steps": 50}) as run:
        actor = share(run)
        async with run.controller() as life:
            async with run.rollout("rollout-0", engine=SharingEngine(run)):
                await life.reaches(1)
                await life.stub.PauseRun(controller_pb2.PauseRunRequest())
                paused = await life.shows(lambda status: status.state == controller_pb2.RUN_STATE_PAUSED)
                await life.stub.ResumeRun(controller_pb2.ResumeRunRequest())
                await life.reaches(paused.step + 2)
                saved = await life.saved()
                assert saved.step > paused.step
                await life.stub.StopRun(controller_pb2.StopRunRequest(checkpoint=True))
                await life.ends()
        assert run.newest().step == len(actor.records)


async def test_a_controller_that_starts_again_finds_the_device_in_any_shift(light_run: LightRun) -> None:
    async with light_run(rollout=SHARED, run={"num_steps": 4}) as run:
        actor, engine = share(run), SharingEngine(run)
        async with AsyncExitStack() as stack:
            async with run.controller() as life:
                await stack.enter_async_context(run.rollout("rollout-0", engine=engine))
                await life.reaches(1)
            async with run.controller() as life:
                await life.ends()
        check_trained_once(actor, 4 * 4 * 2)
        assert engine.beside == {0}
        assert actor.beside == {0}


@pytest.mark.parametrize("num_batches", [2.0, 2.5])
async def test_a_store_of_two_batches_is_enough_with_shifts(light_run: LightRun, num_batches: float) -> None:
    settings = {
        "rollout": SHARED,
        "run": {"num_steps": 8, "checkpoint_every_steps": 50},
        "controller": {"stall_timeout_s": 30.0},
    }
    async with light_run(**settings) as run:
        _leave_room_for(run, num_batches)
        actor = share(run)
        async with run.controller() as life, run.rollout("rollout-0", engine=SharingEngine(run)):
            await life.ends()
        check_trained_once(actor, 8 * 4 * 2)


async def test_a_controller_that_finds_the_store_full_of_trained_rows_frees_them_first(light_run: LightRun) -> None:
    """A checkpoint was being written when its controller was killed."""
    settings = {
        "rollout": SHARED,
        "run": {"num_steps": 12, "checkpoint_every_steps": 50},
        "controller": {"stall_timeout_s": 30.0},
    }
    async with light_run(**settings) as run:
        actor, engine = share(run), SharingEngine(run)
        async with AsyncExitStack() as stack:
            async with run.controller() as life:
                await stack.enter_async_context(run.rollout("rollout-0", engine=engine))
                await life.reaches(6)
            _leave_room_for(run, 2.0)
            async with run.controller() as life:
                await life.ends()
        check_trained_once(actor, 12 * 4 * 2)


def _leave_room_for(run: TwinRun, num_batches: float) -> None:
    """Gives the next controller a store of so many batches at their longest."""
    prompts = load_prompts(run.settings.data.train, run.settings.data, run.settings.reward)
    longest = StoreBudget.of(
        run.settings, PromptBytes.largest(prompts, run.settings.algorithm.groups_per_batch)
    ).batch_bytes
    max_bytes = int(num_batches * longest / STORE_SHARE) + 8
    run.settings = run.settings.model_copy(
        update={"store": run.settings.store.model_copy(update={"max_bytes": max_bytes})}
    )


async def test_adapters_keep_their_base_in_host_memory(light_run: LightRun) -> None:
    async with light_run(rollout=SHARED, run={"num_steps": 2}) as run:
        settings = run.settings.model_copy(
            update={"actor": run.settings.actor.model_validate({**run.settings.actor.model_dump(), "lora": {}})}
        )
        run.settings = settings
        share(run)
        async with run.controller() as life:
            engine = SharingEngine(run)
            async with run.rollout("rollout-0", engine=engine):
                await life.ends()
        assert set(engine.levels) == {1}


async def test_a_rollout_that_finds_the_device_full_says_so_and_the_run_goes_on_when_it_is_not(
    light_run: LightRun,
) -> None:
    async with light_run(rollout=SHARED, run={"num_steps": 3}) as run:
        actor = share(run)
        async with run.controller() as life:
            async with run.rollout("rollout-0", engine=SharingEngine(run)):
                await life.reaches(1)
                other = _takes_the_rest(run)
                status = await life.shows(lambda status: status.num_recoveries >= 1)
                assert "the device lacks" in status.last_failure
                other.close()
                await life.ends()
        check_trained_once(actor, 3 * 4 * 2)


async def test_a_device_that_stays_full_ends_the_run_with_the_bytes_that_are_missing(light_run: LightRun) -> None:
    controller = {"max_recoveries": 1}
    async with light_run(rollout=SHARED, run={"num_steps": 50}, controller=controller) as run:
        share(run)
        async with run.controller() as life:
            async with run.rollout("rollout-0", engine=SharingEngine(run)):
                await life.reaches(1)
                other = _takes_the_rest(run)
                with pytest.raises(BudgetSpentError, match=r"controller\.max_recoveries.*the device lacks \d+ bytes"):
                    await life.ends()
                other.close()


def _takes_the_rest(run: TwinRun) -> TwinDevice:
    """Somebody else on the device, who leaves it to one side's memory less a little."""
    other = TwinDevice(run.settings.run.dir.parent / "device", "other", 2**40)
    other.hold("memory", 12 * MIB)
    return other
