"""How long the launcher waits for a process to join."""

import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from rolecall.launcher.joining import REJOIN_GRACE_S, Joining
from rolecall.launcher.processes import Start, Worker
from rolecall.settings import ControllerSection
from rolecall.shifts import ShiftLocks
from rolecall.v1 import controller_pb2

LIMIT_S = 30.0


class Clock:
    """What `time` is to the launcher here: it stands still until it is moved."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


def start_of(role: str, process: "subprocess.Popen[bytes]", at: float) -> Start:
    """A process that began at `at`."""
    worker = Worker(role, role, (), {}, Path("/dev/null"))
    return Start(worker, 0, f"{role}-incarnation", process, at)


def test_the_wait_for_a_shift_is_not_a_start_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("rolecall.launcher.joining.time", clock)
    joining = Joining(ControllerSection(start_timeout_s=LIMIT_S), tmp_path)
    locks = ShiftLocks(tmp_path)
    with subprocess.Popen(["true"]) as process:
        running = {role: start_of(role, process, clock.now) for role in ("rollout", "actor")}

        def judged(later_s: float = 0.0) -> set[str]:
            clock.now += later_s
            return {name for name, _ in joining.judge([], running, 0.0, ())}

        for _ in range(3):  # without a controller nobody begins
            assert judged(LIMIT_S) == set()
        assert locks.give_to("trainers")
        assert judged(0.9 * LIMIT_S) == set()
        assert judged(0.2 * LIMIT_S) == {"actor"}  # its own time has begun; the rollout's has not
        assert locks.give_to("rollouts")
        assert "rollout" not in judged(0.9 * LIMIT_S)
        assert "rollout" in judged(0.2 * LIMIT_S)
    locks.close()


def test_a_reference_waits_for_its_shift_where_it_takes_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("rolecall.launcher.joining.time", clock)
    joining = Joining(ControllerSection(start_timeout_s=LIMIT_S), tmp_path, ["sharing"])
    locks = ShiftLocks(tmp_path)
    with subprocess.Popen(["true"]) as process:
        began = start_of("reference", process, clock.now)
        running = {
            name: replace(began, worker=replace(began.worker, name=name), incarnation=name)
            for name in ("sharing", "apart")
        }
        assert locks.give_to("trainers")
        clock.now += 1.1 * LIMIT_S
        assert [name for name, _ in joining.judge([], running, 0.0, ())] == ["apart"]
        assert locks.give_to("references")
        clock.now += 1.1 * LIMIT_S
        assert "sharing" in dict(joining.judge([], running, 0.0, ()))
    locks.close()


def test_what_a_process_imports_while_it_waits_for_its_shift_is_part_of_how_long_it_takes_to_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr("rolecall.launcher.joining.time", clock)
    joining = Joining(ControllerSection(start_timeout_s=10 * LIMIT_S), tmp_path, ["reference"])
    locks = ShiftLocks(tmp_path)
    with subprocess.Popen(["true"]) as process:
        began = start_of("reference", process, clock.now)
        assert locks.give_to("trainers")
        clock.now += LIMIT_S
        assert list(joining.judge([], {"reference": began}, 0.0, ())) == []
        assert locks.give_to("references")
        clock.now += 1.0  # to load, for all else was there
        member = controller_pb2.WorkerStatus(worker="reference", incarnation=began.incarnation)
        assert list(joining.judge([member], {"reference": began}, 0.0, ())) == []
        again = replace(began, incarnation="another", at=clock.now)  # in its shift, with all before it
        clock.now += 2 * LIMIT_S
        assert list(joining.judge([], {"reference": again}, 0.0, ())) == []
        clock.now += 2 * LIMIT_S
        assert [name for name, _ in joining.judge([], {"reference": again}, 0.0, ())] == ["reference"]
    locks.close()


def test_a_worker_that_has_left_has_as_long_to_end_as_one_to_be_heard_of_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, controller = Clock(), ControllerSection(start_timeout_s=LIMIT_S)
    monkeypatch.setattr("rolecall.launcher.joining.time", clock)
    joining = Joining(controller)
    member = controller_pb2.WorkerStatus(worker="reward", incarnation="reward-incarnation")
    with subprocess.Popen(["true"]) as process:
        running = {"reward": start_of("reward", process, clock.now)}
        for _ in range(3):
            clock.now += 10 * LIMIT_S
            assert list(joining.judge([member], running, 0.0, ())) == []
        clock.now += controller.lease_s + REJOIN_GRACE_S - 1.0
        assert list(joining.judge([], running, 0.0, ())) == []
        clock.now += 2.0
        assert [name for name, _ in joining.judge([], running, 0.0, ())] == ["reward"]


def test_a_start_that_finds_its_model_on_the_disk_alone_is_not_taken_for_one_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """61 GiB at 200 MB/s take 328 s; the first start had them in memory and took a minute."""
    clock = Clock()
    monkeypatch.setattr("rolecall.launcher.joining.time", clock)
    joining = Joining(ControllerSection(start_timeout_s=1555), reading_s=655)
    member = controller_pb2.WorkerStatus(worker="actor", incarnation="actor-incarnation")
    with subprocess.Popen(["true"]) as process:
        first = start_of("actor", process, clock.now)
        clock.now += 60
        assert list(joining.judge([member], {"actor": first}, 0.0, ())) == []
        again = {"actor": replace(first, incarnation="another", at=clock.now)}
        clock.now += 60 + 328
        assert list(joining.judge([], again, 0.0, ())) == []
        clock.now += 500
        assert [name for name, _ in joining.judge([], again, 0.0, ())] == ["actor"]
