"""Controller, actor, critic and store over many steps, model-checked: crashes at every arrow, lost answers, restarts
and roll-backs of the store.

The loop is the one that ships, with its recovery, publisher, intake, collection, scorer and saver, on a real server.
The calls to trainers, chain and record are the real ones; weights are a hash of what was applied (tests/step_rig.py). A
rollout and a scorer answer at once (tests/step_run.py). Every move is a life of the loop, and what fails strikes at one
of its instants.

After every move: the applied steps form one chain, what was trained is what was sealed, rows are kept with the same
bits until both checkpoints cover them, no prompt is lost or trained twice.
"""

import asyncio
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from rolecall.errors import BudgetSpentError, FencedError, OutOfOrderError, RoleCallError, StoreRolledBackError
from rolecall.settings import RunSettings
from services.controller.groups.failures import starts_over
from services.controller.tasks import first_error
from tests.step_rig import (
    BASE,
    TRAINED_COLUMNS,
    Entry,
    Killed,
    TrainerProcess,
    cut_connection,
    digest_of_inputs,
    next_weights,
)
from tests.step_run import TRAINERS, B, StepRun

MAX_RECOVERIES = 8
"""A run that has not gone on after so many is stuck."""
HANG_S = 90.0
"""A move takes milliseconds, with a recovery a second; where two cores have fifteen processes, half a minute."""
STEP_ARROWS = (
    "values are computed",
    "batch is prepared",
    "batch is sealed",
    "columns are written",
    *(f"{arrow} {name}" for name in TRAINERS for arrow in ("Train sent to", "Train answered by")),
    *(f"{name} {arrow}" for name in TRAINERS for arrow in ("train:start", "train:applied")),
    "trained",
    "step is committed",
    "publish is begun",
    "weights are published",
)
CHECKPOINT_ARROWS = (
    *(f"{arrow} {name}" for name in TRAINERS for arrow in ("SaveCheckpoint sent to", "SaveCheckpoint answered by")),
    *(f"{name} {arrow}" for name in TRAINERS for arrow in ("save:start", "save:taken", "save:middle", "save:written")),
    "the checkpoint is begun",
    *(f"{name} train:applied" for name in TRAINERS),
    "step is committed",
    "checkpoint is committed",
    "rows are about to be deleted",
    "rows are deleted",
)
RECOVERY_ARROWS = (
    *(
        f"{arrow} {name}"
        for name in TRAINERS
        for arrow in ("LoadCheckpoint sent to", "LoadCheckpoint answered by", "Train sent to", "Train answered by")
    ),
    *(f"{name} {arrow}" for name in TRAINERS for arrow in ("load:end", "train:start", "train:applied")),
)
FAULTS = (
    "controller dies",
    "actor dies",
    "critic dies",
    "connection is cut",
    "store is killed",
    "store is rolled back",
)


class Crash(Exception):
    """The controller is gone."""


@dataclass(frozen=True)
class Copy:
    """An older copy of the store's directory, and what had been trained then."""

    folder: Path
    timeline: tuple[str, ...]
    lineage: int


class StepMachine(StepRun, RuleBasedStateMachine):
    """What befalls a run, and what should be true of it. Subclasses plant violations."""

    def __init__(self, run_settings: RunSettings, folder: Path) -> None:
        super().__init__(run_settings, folder)
        self.main = threading.current_thread()
        self.copies: list[Copy] = []
        self.causes: list[BaseException] = []
        """Why recoveries were needed."""

    # --- faults -----------------------------------------------------------------------------------

    def arm(self, arrow: str, fault: str, num_spared: int = 0) -> None:
        strikes: dict[str, Callable[[], None]] = {
            "controller dies": self.crash,
            "actor dies": lambda: self.kill(self.processes["actor"]),
            "critic dies": lambda: self.kill(self.processes["critic"]),
            "connection is cut": cut_connection if " sent to " in arrow or " answered by " in arrow else self.crash,
            "store is killed": self.kill_store,
            "store is rolled back": self.roll_back,
        }
        self.arrows.arm(arrow, strikes[fault], num_spared)

    def on_the_loop(self) -> bool:
        return threading.current_thread() is self.main

    def crash(self) -> None:
        self.stale = True
        if self.on_the_loop():
            raise Crash
        self.runner.get_loop().call_soon_threadsafe(self.driving.cancel)

    def kill(self, process: TrainerProcess) -> None:
        if self.on_the_loop():
            process.start()
            return
        at_work = threading.current_thread() in process.engine.threads
        self.runner.get_loop().call_soon_threadsafe(process.start)
        if at_work:
            raise Killed

    def kill_store(self) -> None:
        if self.on_the_loop():  # a server may be started from the main thread only
            self.stop_store()
            self.server.start()

    def stop_store(self) -> None:
        assert self.server.pid is not None
        os.kill(self.server.pid, signal.SIGKILL)
        while self.server.alive:
            time.sleep(0.002)

    def roll_back(self) -> None:
        if self.on_the_loop() and self.copies:
            self.stop_store()
            copy = self.copies.pop(next(self.attempts) % len(self.copies))
            live = self.folder / "store" / "appendonlydir"
            shutil.rmtree(live)
            shutil.copytree(copy.folder, live)
            self.server.start()
            self.timeline, self.lineage = list(copy.timeline), copy.lineage
            self.rolled_back = True
            del self.controllers[:-1]

    # --- moves ------------------------------------------------------------------------------------

    def drive(self, work: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """`work`, after as many recoveries as it takes; by the end everything is well again."""
        for _ in range(MAX_RECOVERIES):
            known = self.rolled_back
            if not self.runner.run(self.attempt(work)):
                continue
            if self.rolled_back and not known:  # it struck last: the next step shows it
                work = self.one_step
                continue
            self.check()
            return
        raise AssertionError(f"the run does not go on: {self.causes[-MAX_RECOVERIES:]}")

    async def attempt(self, work: Callable[[], Coroutine[Any, Any, None]]) -> bool:
        self.incarnations = {name: process.incarnation for name, process in self.processes.items()}
        self.driving = asyncio.create_task(work())
        assert (await asyncio.wait({self.driving}, timeout=HANG_S))[0], (
            f"nothing has moved since {self.arrows.passed[-1:]}"
        )
        for process in self.processes.values():
            process.raise_own_fault()
        error = Crash() if self.driving.cancelled() else self.driving.exception()
        if error is None:
            return True
        cause = first_error(error) if isinstance(error, BaseExceptionGroup) else error
        self.causes.append(cause)
        if isinstance(cause, Crash):
            return False
        if not isinstance(cause, RoleCallError):
            raise error
        if self.rolled_back and not cause.retryable and not isinstance(cause, OutOfOrderError):
            # Refused: the store is older than the trainers. People start the trainers and the controller again; the
            # checkpoint decides.
            self.stale = True
            await self.start_trainers()
        elif isinstance(cause, BudgetSpentError) and isinstance(failed := cause.__cause__, RoleCallError):
            # Stopped, and told that the last checkpoint was lost with a trainer: people start it again.
            assert starts_over(failed), failed
            self.stale = True
        elif not (cause.retryable or isinstance(cause, OutOfOrderError)):
            raise error
        return False

    @initialize()
    def first_controller(self) -> None:
        self.drive(self.one_step)

    @rule(count=st.integers(1, 2))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.drive(self.one_step)

    @rule(arrow=st.sampled_from(STEP_ARROWS), fault=st.sampled_from(FAULTS), second=st.booleans())
    def step_that_fails(self, arrow: str, fault: str, second: bool = False) -> None:
        """`second`: not the first step of a life fails, but the one after it."""
        self.arm(arrow, fault, int(second))
        self.drive(self.two_steps if second else self.one_step)

    @rule()
    def save(self) -> None:
        self.drive(self.checkpoint)

    @rule(arrow=st.sampled_from(CHECKPOINT_ARROWS), fault=st.sampled_from(FAULTS))
    def checkpoint_that_fails(self, arrow: str, fault: str) -> None:
        self.arm(arrow, fault)
        self.drive(self.checkpoint)

    @rule(
        lost=st.sets(st.sampled_from(TRAINERS), min_size=1),
        arrow=st.sampled_from(RECOVERY_ARROWS),
        fault=st.sampled_from(FAULTS),
    )
    def recovery_that_fails(self, lost: set[str], arrow: str, fault: str) -> None:
        for name in lost:
            self.runner.run(self.restart(self.processes[name]))
        self.stale = True
        self.arm(arrow, fault)
        self.drive(self.one_step)

    async def restart(self, process: TrainerProcess) -> None:
        process.start()

    @rule()
    def lose_the_next_answer(self) -> None:
        self.client.lose = 1

    @rule()
    def copy_the_store(self) -> None:
        folder = self.folder / f"copy-{next(self.attempts)}"
        shutil.copytree(self.folder / "store" / "appendonlydir", folder)
        self.copies.append(Copy(folder, tuple(self.timeline), self.lineage))

    @rule(which=st.integers(0, 3))
    def replaced_controller_wakes_up(self, which: int) -> None:
        replaced = self.controllers[:-1]
        if not replaced:
            return
        old = replaced[which % len(replaced)]
        step = self.ledger.position().step
        with pytest.raises(FencedError):
            old.commit_step(step, [])
        with pytest.raises(FencedError):
            old.sweep(self.rows, step)
        if self.processes["actor"].calls.fence.ctl != old.ctl:  # else it has not heard of the newest yet
            with pytest.raises(FencedError):
                self.runner.run(self.trainers()[0].train(old.ctl, step, "late", lambda what: None))

    @rule(ctl=st.integers(2**40, 2**63 - 1))
    def stranger_makes_a_number_up(self, ctl: int) -> None:
        for trainer in self.trainers():
            with pytest.raises(StoreRolledBackError):
                self.runner.run(trainer.train(ctl, self.ledger.position().step, "strange", lambda what: None))

    # --- what must hold ---------------------------------------------------------------------------

    def check(self) -> None:
        self.arrows.armed = None
        self.rolled_back = False
        self.follow_the_store()
        self.every_trainer_applied_what_was_sealed_in_one_chain()
        self.rows_are_kept_until_a_checkpoint_covers_them()
        self.no_prompt_is_lost_or_trained_twice()

    def every_trainer_applied_what_was_sealed_in_one_chain(self) -> None:
        expected = tuple(Entry(step, digest, self.sealed[digest].inputs) for step, digest in enumerate(self.timeline))
        weights = BASE
        for entry in expected:
            assert self.sealed[entry.digest].step == entry.step
            weights = next_weights(weights, entry.inputs)
        for process in self.processes.values():
            engine = process.engine
            if process.incarnation == self.incarnations[process.name]:
                assert engine.log == expected, f"{process.name} applied something else than what was sealed"
                assert engine.weights == weights
            # one killed at the last arrow is brought up by the next move
            assert engine.log == expected[: len(engine.log)]
            assert engine.applied.step == len(engine.log)
            assert {record.step: record.digest for record in engine.applied.records.values()} == dict(
                enumerate(self.timeline[: len(engine.log)])
            )

    def rows_are_kept_until_a_checkpoint_covers_them(self) -> None:
        latest = self.checkpoints.latest()
        covered = latest[1].step if latest else 0
        assert self.ledger.position().freed_step <= covered
        for step in range(covered, len(self.timeline)):
            batch = self.ledger.sealed(step)
            assert batch is not None
            refs = list(batch.rows)
            assert digest_of_inputs(refs, self.rows.read(refs, TRAINED_COLUMNS)) == self.sealed[batch.digest].inputs, (
                "a replay would read other inputs"
            )

    def no_prompt_is_lost_or_trained_twice(self) -> None:
        trained = [uid for digest in self.timeline for uid in self.sealed[digest].uids]
        gids = [gid for digest in self.timeline for gid in self.sealed[digest].gids]
        assert len(set(gids)) == len(gids) == B * len(self.timeline)
        live = [group.prompt.uid for group in self.ledger.queued()]
        live += [self.rows.read_meta(group.rows[:1])[0].prompt.uid for group in self.committed().values()]
        waiting = [prompt.uid for prompt in self.backlog]
        counts = self.ledger.counts()
        assert sorted(trained + live + waiting) == sorted(f"p{n}" for n in range(self.num_prompts_used()))
        assert counts.admitted == counts.trained + sum(counts.dropped.values()) + counts.live
        assert (counts.trained, counts.live) == (len(trained), len(live))


def explore(make: Callable[[], StepMachine], max_examples: int) -> None:
    run_state_machine_as_test(
        make,  # type: ignore[arg-type]
        settings=settings(
            max_examples=max_examples,
            stateful_step_count=12,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
            phases=(Phase.generate,),  # a failure is told by its seed; shrinking one would take minutes
        ),
    )
