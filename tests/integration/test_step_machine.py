"""Many steps of controller, actor, critic and store, model-checked (tests/step_machine.py): random lives, lives that
once went wrong, and planted violations, which the checks must see.
"""

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rolecall.errors import RoleCallError
from rolecall.rpc.fence import Fence
from rolecall.settings import RunSettings
from rolecall.store.budget import batch_bytes
from rolecall.training.serving.calls import TrainerCalls
from rolecall.training.serving.device_thread import DeviceThread
from rolecall.training.serving.train_chain import TrainChain
from rolecall.training.serving.trainer import Progress
from rolecall.v1 import training_pb2 as pb
from rolecall.v1.trajectory_pb2 import RowRef, TrainBatch
from rolecall.wire import Array
from services.controller.awaiting import NextBatch
from services.controller.board import RunBoard
from services.controller.durable.recovery import Recovery
from services.controller.loop import Loop
from services.controller.recovered import Recovered
from services.controller.step.trainers import Trainer
from tests.step_machine import HANG_S, StepMachine, explore
from tests.step_rig import (
    HashTrainer,
)
from tests.step_run import B, G, SweptRows

# --- planted violations: each must be seen --------------------------------------------------------


class UnmovedTrainer(Trainer):
    """Says that it applied a batch again, and did not."""

    async def train(self, ctl: int, step: int, digest: str, progress: Callable[[str], None]) -> pb.TrainResult:
        return pb.TrainResult(step=step, digest=digest)


class SkippedReplay(StepMachine):
    """A recovery that does not apply the batches since the checkpoint."""

    async def recovered(self) -> Recovered:
        unmoved = [UnmovedTrainer(trainer.name, trainer.stub, trainer.section) for trainer in self.trainers()]
        return await replace(self.recovery(), trainers=unmoved).run(self.ledger.ctl)


class UnchainedTrain(TrainChain):
    """Applies whatever it is asked, as often as it is asked."""

    async def train(self, request: pb.TrainRequest) -> AsyncIterator[pb.TrainResponse]:
        batch = await asyncio.to_thread(self._read_sealed, request.step)
        work = self._device_thread.run(lambda: self._trainer.train(batch, Progress(lambda: None)), "training")
        yield pb.TrainResponse(result=await work)


class UnchainedCalls(TrainerCalls):
    """Serves Train without a chain."""

    def __init__(
        self,
        engine: HashTrainer,
        read_sealed: Callable[[int], TrainBatch],
        device_thread: DeviceThread,
        fence: Fence,
        *others: Any,
    ) -> None:
        super().__init__(engine, read_sealed, device_thread, fence, *others)
        self.chain = UnchainedTrain(engine, read_sealed, device_thread, fence)


class UnchainedTrainer(StepMachine):
    make_calls = UnchainedCalls


class EarlySweep(StepMachine):
    """Rows are freed when a checkpoint begins instead of when it is committed."""

    def before_checkpoint(self) -> None:
        self.ledger.sweep(self.rows, self.ledger.position().step)


class OverwrittenRows(SweptRows):
    """Columns that the last writer owns, with what a clock or a random number adds."""

    def put(self, refs: Sequence[RowRef], columns: Sequence[Mapping[str, Array]]) -> int:
        for ref, column in zip(refs, columns, strict=True):
            for name, array in column.items():
                noise = (
                    np.array(time.monotonic_ns() % 1000, array.dtype) if name == "values" else np.zeros((), array.dtype)
                )
                self._connection.command("HSET", self._key(ref), name, (array + noise).tobytes())
        return 0


class RecomputingLoop(Loop):
    """Has the critic compute values of a batch that is sealed already."""

    async def _one_step(self, batch: NextBatch) -> None:
        if batch.sealed is not None:
            await self._compute(batch.groups)
        await super()._one_step(batch)


class OverwrittenColumns(StepMachine):
    """Values are computed whenever they are asked for, and not always the same."""

    def make_rows(self) -> SweptRows:
        return OverwrittenRows(self.connection, self.settings.run.name, 2)

    make_loop = RecomputingLoop


ADAPTIVE = {
    "groups_per_batch": B,
    "max_staleness": 1,
    "advantage": {"kind": "gae", "bootstrap_truncated": True},
    "kl": {"reference": "ref", "kl_coef": 0.1, "adaptive": {"target": 0.5, "horizon": 40}},
    "entropy": {"entropy_coef": 0.001, "target": 0.5, "coef_step": 0.0005},
    "shaping": {"normalize": "running"},
}
"""Values, and all that is carried from step to step."""


def run_settings(make_settings: Callable[..., RunSettings], folder: Path) -> RunSettings:
    """Of a run that neither ends nor saves by itself, with one batch in flight beside the next."""
    return make_settings(
        run={"name": "test", "dir": str(folder / "run"), "num_steps": 1000, "checkpoint_every_steps": 1000},
        model={"path": str(folder / "model"), "dtype": "float32"},
        data={"train": str(folder / "train.jsonl"), "shuffle": False},
        sampling={"num_responses": G},
        algorithm=ADAPTIVE,
        critic={},
        references={"ref": {}},
    )


@pytest.fixture
def make_machine(
    make_settings: Callable[..., RunSettings], tmp_path: Path
) -> Callable[[type[StepMachine]], Callable[[], StepMachine]]:
    """Machines of a kind, each in a folder and with a server of its own."""
    numbers = itertools.count()

    def of_kind(kind: type[StepMachine]) -> Callable[[], StepMachine]:
        return lambda: kind(run_settings(make_settings, tmp_path), tmp_path / str(next(numbers)))

    return of_kind


@pytest.mark.thorough("test_killed_trainers_end_with_the_weights_of_trainers_that_were_never_killed")
def test_steps_form_one_chain_of_what_was_sealed_whatever_crashes(
    make_machine: Callable[[type[StepMachine]], Callable[[], StepMachine]],
) -> None:
    explore(make_machine(StepMachine), 20)


def test_a_stop_whose_checkpoint_is_lost_with_a_trainer_says_so_and_is_gone_on_with(
    make_machine: Callable[[type[StepMachine]], Callable[[], StepMachine]],
) -> None:
    machine = make_machine(StepMachine)()
    machine.first_controller()
    machine.save()
    machine.checkpoint_that_fails(arrow="step is committed", fault="critic dies")
    assert "the run was stopped; no checkpoint of step 3 could be saved" in str(machine.causes[-1])
    machine.steps(1)
    machine.teardown()


def test_trainers_of_a_time_that_the_store_has_forgotten_are_refused(
    make_machine: Callable[[type[StepMachine]], Callable[[], StepMachine]],
) -> None:
    machine = make_machine(StepMachine)()
    machine.first_controller()
    machine.copy_the_store()
    machine.steps(2)
    machine.copy_the_store()
    older, newer = machine.copies
    machine.copies = [older]
    machine.step_that_fails("batch is prepared", "store is rolled back")
    machine.steps(len(newer.timeline) - len(machine.timeline))
    assert len(machine.timeline) == len(newer.timeline)
    machine.copies, machine.causes = [newer], []
    machine.roll_back()  # to as many steps as the trainers have applied, and other ones
    machine.stale = True
    machine.steps(1)
    assert any("another batch" in str(cause) for cause in machine.causes), machine.causes
    machine.teardown()


def test_prompts_that_wait_for_their_lineage_outlive_its_first_checkpoint(
    make_machine: Callable[[type[StepMachine]], Callable[[], StepMachine]],
) -> None:
    machine = make_machine(StepMachine)()
    machine.first_controller()
    machine.checkpoint_that_fails(arrow="actor save:written", fault="connection is cut")
    machine.copy_the_store()
    machine.recovery_that_fails(arrow="LoadCheckpoint answered by actor", fault="controller dies", lost={"actor"})
    machine.checkpoint_that_fails(arrow="rows are about to be deleted", fault="store is rolled back")
    machine.recovery_that_fails(arrow="Train sent to actor", fault="controller dies", lost={"critic", "actor"})
    machine.teardown()


def test_a_checkpoint_after_a_roll_back_covers_the_steps_made_since(
    make_machine: Callable[[type[StepMachine]], Callable[[], StepMachine]],
) -> None:
    machine = make_machine(StepMachine)()
    machine.first_controller()
    machine.copy_the_store()
    machine.save()
    machine.checkpoint_that_fails(arrow="SaveCheckpoint sent to actor", fault="store is rolled back")
    machine.teardown()


def test_a_life_frees_what_overlapping_checkpoints_cover_once(
    make_machine: Callable[[type[StepMachine]], Callable[[], StepMachine]],
) -> None:
    """A checkpoint is asked for while the one before is written, whose rows it covers, too."""
    machine = make_machine(StepMachine)()
    written, retained = threading.Event(), list[tuple[int, int]]()

    class Board(RunBoard):
        def wait_for(self, what: str, state: str | None = None) -> None:
            super().wait_for(what, state)
            if what == "the checkpoint of step 2":
                written.set()

    board = Board()

    def stay() -> None:
        assert written.wait(HANG_S)

    machine.arrows.arm("actor save:middle", stay)
    machine.take_over()

    async def live() -> None:
        recovered = await machine.recovered()

        def at(instant: str) -> None:
            step = machine.ledger.position().step
            if instant == "step is committed" and step <= 2:
                board.request_checkpoint()
            if instant == "step is committed" and step == 3:
                board.stop(checkpoint=True, failure="")
            if instant == "the checkpoint is begun" and step == 3:
                batch = machine.ledger.sealed(2)
                assert batch is not None
                retained.append((loop._intake.retained_bytes, batch_bytes(machine.settings, batch, 0)))

        loop = Loop(machine.parts(board), recovered, at)
        sampling = asyncio.create_task(machine.sample())
        await loop.run()
        sampling.cancel()

    machine.runner.run(live())
    machine.teardown()
    assert [counted for counted, _ in retained] == [rows for _, rows in retained] != []


def test_a_life_begins_with_what_its_trainers_need_again_and_with_what_was_seen(
    make_machine: Callable[[type[StepMachine]], Callable[[], StepMachine]],
) -> None:
    """Two steps after a checkpoint: their rows stay, and a restored actor's weights are published anew."""
    machine = make_machine(StepMachine)()
    machine.first_controller()
    machine.save()
    machine.steps(2)

    async def next_life() -> Recovered:
        machine.processes["actor"].start()
        critic = machine.processes["critic"].engine
        critic.applied = critic.applied.after_publish(9)
        return await machine.recovered()

    recovered = machine.runner.run(next_life())
    position = machine.ledger.position()
    kept = [machine.ledger.sealed(step) for step in range(position.freed_step, position.step)]
    assert recovered.saved_step == position.freed_step == position.step - 2 > 0
    assert recovered.retained_bytes == sum(batch_bytes(machine.settings, batch, 0) for batch in kept if batch) > 0
    assert recovered.policy_version == 9
    assert recovered.step_of_version[position.policy_version] <= position.step
    assert recovered.is_actor_restored
    machine.teardown()


class ForgottenState(StepMachine):
    """What a step leaves is lost when another controller counts it."""

    def recovery(self) -> Recovery:
        plain = self.settings.algorithm.model_copy(update={"kl": None})
        return replace(super().recovery(), settings=self.settings.model_copy(update={"algorithm": plain}))


SCENARIOS: dict[type[StepMachine], Callable[[StepMachine], None]] = {
    SkippedReplay: lambda machine: machine.recovery_that_fails({"actor"}, "actor load:end", "controller dies"),
    UnchainedTrainer: lambda machine: machine.step_that_fails("Train answered by actor", "connection is cut"),
    EarlySweep: lambda machine: machine.checkpoint_that_fails("SaveCheckpoint sent to actor", "actor dies"),
    ForgottenState: lambda machine: machine.step_that_fails("trained", "controller dies"),
    OverwrittenColumns: lambda machine: machine.step_that_fails("columns are written", "controller dies"),
}


@pytest.mark.thorough("test_trainers_of_a_time_that_the_store_has_forgotten_are_refused")
@pytest.mark.parametrize("kind", SCENARIOS)
def test_the_checks_see_a_planted_violation(
    make_machine: Callable[[type[StepMachine]], Callable[[], StepMachine]], kind: type[StepMachine]
) -> None:
    for sound in (True, False):
        machine = make_machine(StepMachine if sound else kind)()
        machine.first_controller()
        machine.steps(2)
        with contextlib.nullcontext() if sound else pytest.raises((AssertionError, RoleCallError, ExceptionGroup)):
            SCENARIOS[kind](machine)
        machine.teardown()
