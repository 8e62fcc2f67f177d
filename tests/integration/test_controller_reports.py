"""The reports of steps, beside the steps: in order, whole, and never lost without a word."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from rolecall.errors import StoreUnavailableError, UnavailableError
from rolecall.settings import RunSettings
from rolecall.store.ledger import Ledger
from rolecall.telemetry import Metrics
from rolecall.v1.trajectory_pb2 import RowRef, TrajectoryMeta
from services.controller.board import RunBoard
from services.controller.loop import Loop
from services.controller.parts import Parts
from services.controller.recovered import Recovered
from tests.integration.test_step_machine import run_settings
from tests.step_run import B, StepRun, SweptRows

WAIT_S = 20.0
SAMPLES_S = 0.2
"""Longer than a checkpoint of this run takes."""


@dataclass
class Diary:
    """Trackers that write down what they are told, each step once they may."""

    steps: list[int] = field(default_factory=list)
    numbers: list[dict[str, float]] = field(default_factory=list)
    samples: list[int] = field(default_factory=list)
    may_log: threading.Event = field(default_factory=threading.Event)
    failure: Exception | None = None

    def log(self, step: int, values: Any) -> None:
        assert self.may_log.wait(WAIT_S)
        if self.failure is not None:
            raise self.failure
        self.steps.append(step)
        self.numbers.append(values)

    def keep_samples(self, step: int, samples: Any) -> None:
        self.samples += [each["step"] for each in samples]


class Died(Exception):
    """The controller is gone."""


class SlowMeta(SweptRows):
    """Rows of which a report has its samples late."""

    def read_meta(self, refs: Sequence[RowRef]) -> list[TrajectoryMeta]:
        if len(refs) == B:  # not a checkpoint, which reads row by row
            time.sleep(SAMPLES_S)
        return super().read_meta(refs)


class DiaryRun(StepRun):
    """A run whose trackers are a diary."""

    def make_rows(self) -> SweptRows:
        return SlowMeta(self.connection, self.settings.run.name, 2)

    def __init__(self, settings: RunSettings, folder: Path) -> None:
        super().__init__(settings, folder)
        self.diary = Diary()

    def parts(self, board: RunBoard) -> Parts:
        trackers: Any = self.diary
        return replace(super().parts(board), trackers=trackers)


@pytest.fixture
def run(make_settings: Callable[..., RunSettings], tmp_path: Path) -> Iterator[DiaryRun]:
    run = DiaryRun(run_settings(make_settings, tmp_path), tmp_path / "run-0")
    run.take_over()
    yield run
    run.teardown()


def test_steps_go_on_beside_a_report_and_the_last_ones_numbers_are_there_at_the_end(run: DiaryRun) -> None:
    trained: list[list[int]] = []

    class Watched(Loop):
        """A loop whose first report ends once the second step is trained."""

        def __init__(self, parts: Parts, recovered: Recovered, at: Callable[[str], None]) -> None:
            def watched(instant: str) -> None:
                if instant == "trained":
                    trained.append(list(run.diary.steps))
                    if len(trained) == 2:
                        run.diary.may_log.set()
                at(instant)

            super().__init__(parts, recovered, watched)

    run.make_loop = Watched
    run.runner.run(asyncio.wait_for(run.live(3), WAIT_S))

    assert trained[:2] == [[], []], "the second step was trained while the first was reported"
    assert run.diary.steps == [1, 2, 3]
    assert sorted(set(run.diary.samples)) == [1, 2, 3]


def test_a_checkpoint_frees_no_row_that_a_report_still_reads(run: DiaryRun) -> None:
    run.diary.may_log.set()
    asked: list[asyncio.Future[tuple[str, int]]] = []

    class Asked(Loop):
        """A loop whose first step is to be saved."""

        def __init__(self, parts: Parts, recovered: Recovered, at: Callable[[str], None]) -> None:
            def watched(instant: str) -> None:
                if instant == "trained" and not asked:
                    asked.append(parts.board.request_checkpoint())
                at(instant)

            super().__init__(parts, recovered, watched)

    run.make_loop = Asked
    run.runner.run(asyncio.wait_for(run.live(2), WAIT_S))
    assert asked[0].result()[1] == 1
    assert run.diary.steps == [1, 2]
    assert sorted(set(run.diary.samples)) == [1, 2]


def test_steps_that_a_loop_ended_without_telling_are_told_by_the_next_and_none_twice(run: DiaryRun) -> None:
    run.diary.may_log.set()
    run.diary.failure = StoreUnavailableError("the store did not answer")
    with pytest.raises(StoreUnavailableError):
        run.runner.run(asyncio.wait_for(run.live(2), WAIT_S))
    run.diary.failure = None
    step = run.ledger.position().step
    for _ in range(2):
        run.runner.run(asyncio.wait_for(run.live(1), WAIT_S))

    assert run.diary.steps == [*range(1, step + 3)], "and none is made again to be told"


@pytest.mark.parametrize("instant", ["trained", "step is committed"])
def test_a_step_whose_controller_dies_around_its_commit_is_told_with_what_was_known_then(
    run: DiaryRun, instant: str
) -> None:
    class Dying(Loop):
        """A loop whose process ends at the instant."""

        def __init__(self, parts: Parts, recovered: Recovered, at: Callable[[str], None]) -> None:
            def dying(now: str) -> None:
                at(now)
                if now == instant:
                    raise Died

            super().__init__(parts, recovered, dying)

    run.diary.may_log.set()
    living, run.make_loop = run.make_loop, Dying
    with pytest.raises(Died):
        run.runner.run(asyncio.wait_for(run.live(1), WAIT_S))
    assert run.diary.steps == []
    run.make_loop = living
    run.runner.run(asyncio.wait_for(run.live(1), WAIT_S))

    assert run.diary.steps == [1, 2]
    lost, whole = run.diary.numbers
    of_the_end = {name for name in whole if name.startswith(("time/", "publish/", "throughput/"))}
    assert whole.keys() - lost.keys() == of_the_end - {"time/generation_s", "time/scoring_s"}


def test_a_step_that_is_told_late_takes_neither_the_run_back_nor_what_it_waits_for() -> None:
    board = RunBoard()
    board.begin(5)
    board.wait_for("rollouts", "publishing")
    board.applied(4, Metrics())
    assert (board.step, board.waiting_for) == (5, "rollouts")


def test_a_process_that_told_a_step_and_could_not_note_it_does_not_tell_it_again(
    run: DiaryRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(ledger: Ledger, step: int) -> None:
        raise StoreUnavailableError("the store did not answer")

    boards: list[RunBoard] = []

    class OfOneProcess(Loop):
        """A loop whose board knows what that of the life before did."""

        def __init__(self, parts: Parts, recovered: Recovered, at: Callable[[str], None]) -> None:
            parts.board.told_step = boards[-1].told_step if boards else 0
            boards.append(parts.board)
            super().__init__(parts, recovered, at)

    run.diary.may_log.set()
    run.make_loop = OfOneProcess
    with monkeypatch.context() as patched:
        patched.setattr(Ledger, "reported", failing)
        with pytest.raises(StoreUnavailableError):
            run.runner.run(asyncio.wait_for(run.live(2), WAIT_S))
    assert run.ledger.position().reported_step == 0
    run.runner.run(asyncio.wait_for(run.live(1), WAIT_S))
    assert run.diary.steps == [*range(1, run.ledger.position().step + 1)]


def test_a_step_is_told_also_when_the_report_before_failed(run: DiaryRun, monkeypatch: pytest.MonkeyPatch) -> None:
    log = run.diary.log

    def failing_once(step: int, values: Any) -> None:
        log(step, values)
        if step == 1:
            raise StoreUnavailableError("the store did not answer")

    run.diary.may_log.set()
    monkeypatch.setattr(run.diary, "log", failing_once)
    with pytest.raises(StoreUnavailableError):
        run.runner.run(asyncio.wait_for(run.live(3), WAIT_S))
    step = run.ledger.position().step
    assert run.diary.steps == list(range(1, step + 1))


@pytest.mark.parametrize("ends", ["fails", "is cancelled"])
def test_a_step_whose_publish_does_not_end_is_reported(run: DiaryRun, ends: str) -> None:
    """And the loop ends by what ended the publish."""
    run.diary.may_log.set()
    publishes: list[str] = []
    life: asyncio.Task[None] | None = None

    class Failing(Loop):
        """A loop whose first publish of a trained step does not end."""

        def __init__(self, parts: Parts, recovered: Recovered, at: Callable[[str], None]) -> None:
            def failing(instant: str) -> None:
                at(instant)
                if instant == "weights are published":
                    publishes.append(instant)
                    if len(publishes) == 2 and ends == "fails":  # one at the start
                        raise UnavailableError("a rollout did not answer")
                    if len(publishes) == 2:
                        assert life is not None
                        life.cancel()

            super().__init__(parts, recovered, failing)

    async def lives() -> None:
        nonlocal life
        life = asyncio.create_task(run.live(2))
        await asyncio.wait([life], timeout=WAIT_S)
        assert life.cancelled() if ends == "is cancelled" else isinstance(life.exception(), UnavailableError)

    run.make_loop = Failing
    run.runner.run(lives())
    assert run.diary.steps == [1]
    run.runner.run(asyncio.wait_for(run.live(1), WAIT_S))
    assert run.diary.steps == [1, 2]
