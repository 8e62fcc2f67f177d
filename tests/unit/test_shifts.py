"""Shifts on shared devices: the locks by which nobody is on a device together with the other side."""

import errno
import fcntl
import itertools
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from rolecall.errors import ConfigError
from rolecall.shifts import SIDES, Post, ShiftLocks, Side, file_system_of, is_shift_of

TAKES = "import sys; from rolecall.shifts import Post; from pathlib import Path\n"
TAKES += "print(Post(Path(sys.argv[1]), 'rollouts').take(), flush=True); sys.stdin.read()"

WAITS = """import asyncio, logging, sys
from pathlib import Path
from rolecall.shifts import Post
logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
asyncio.run(Post(Path(sys.argv[1]), sys.argv[2]).wait_until_due(float(sys.argv[3])))
print("on the devices", flush=True)
sys.stdin.read()
"""
DIRECTS = """import sys
from pathlib import Path
from rolecall.shifts import ShiftLocks
locks = ShiftLocks(Path(sys.argv[1]))
for line in sys.stdin:
    print(locks.give_to(line.strip()), flush=True)
"""


class Other:
    """Another process, which is told and tells in lines."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self._process = process

    def says(self) -> str:
        """Returns its next line."""
        assert self._process.stdout is not None
        return self._process.stdout.readline().strip()

    def gives_to(self, side: Side) -> bool:
        """Tells a controller to; whether it did."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{side}\n")
        self._process.stdin.flush()
        return self.says() == "True"


@contextmanager
def process(source: str, *arguments: object) -> Iterator[Other]:
    """A Python process of its own, killed at the end."""
    command = [sys.executable, "-c", source, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as found:
        try:
            yield Other(found)
        finally:
            found.kill()


@pytest.fixture
def locks(tmp_path: Path) -> Iterator[ShiftLocks]:
    locks = ShiftLocks(tmp_path)
    yield locks
    locks.close()


def test_nobody_begins_without_a_controller(tmp_path: Path) -> None:
    assert not Post(tmp_path, "rollouts").take()
    assert not Post(tmp_path, "references").take()
    assert not Post(tmp_path, "trainers").take()
    assert not any(is_shift_of(side, tmp_path) for side in SIDES)


@pytest.mark.parametrize(("side", "other"), list(itertools.permutations(SIDES, 2)))
def test_a_side_has_the_devices_to_itself_until_all_of_it_have_left(
    tmp_path: Path, locks: ShiftLocks, side: Side, other: Side
) -> None:
    first, second, opposite = Post(tmp_path, side), Post(tmp_path, side), Post(tmp_path, other)
    assert locks.give_to(side)
    assert [each for each in SIDES if is_shift_of(each, tmp_path)] == [side]
    assert first.take()
    assert second.take()
    assert first.take()  # again
    assert not opposite.take()
    first.leave()
    assert not locks.give_to(other)
    assert is_shift_of(side, tmp_path)  # nothing has changed
    assert first.take()
    first.leave()
    second.leave()
    assert locks.give_to(other)
    assert is_shift_of(other, tmp_path)
    assert not first.take()
    assert opposite.take()


def test_who_is_on_the_devices_stays_there_while_nobody_directs_the_shifts(tmp_path: Path) -> None:
    first, post = ShiftLocks(tmp_path), Post(tmp_path, "references")
    assert first.give_to("references")
    assert post.take()
    first.close()
    assert post.take()
    second = ShiftLocks(tmp_path)
    assert not second.give_to("trainers"), "its memory is there"
    post.leave()
    assert second.give_to("trainers")
    second.close()


def test_who_looks_is_not_on_the_devices(tmp_path: Path, locks: ShiftLocks) -> None:
    assert locks.give_to("rollouts")
    post = Post(tmp_path, "trainers")
    for _ in range(3):
        assert not post.take()
        assert locks.give_to("trainers")
        assert locks.give_to("rollouts")


def test_a_process_that_is_killed_leaves(tmp_path: Path, locks: ShiftLocks) -> None:
    assert locks.give_to("rollouts")
    command = [sys.executable, "-c", TAKES, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as rollout:
        assert rollout.stdout is not None
        assert rollout.stdout.readline() == "True\n"
        assert not locks.give_to("trainers")
        rollout.kill()
        rollout.wait(timeout=60)
        assert locks.give_to("trainers")


def test_the_next_controller_finds_who_is_on_the_devices(tmp_path: Path) -> None:
    locks = ShiftLocks(tmp_path)
    assert locks.give_to("rollouts")
    awake = Post(tmp_path, "rollouts")
    assert awake.take()
    locks.close()
    following = ShiftLocks(tmp_path)
    assert not Post(tmp_path, "rollouts").take()  # before it has said whose shift it is
    assert not following.give_to("trainers")
    awake.leave()
    assert following.give_to("trainers")
    following.close()


@pytest.mark.parametrize(("side", "wanted"), list(itertools.permutations(SIDES, 2)))
def test_ranks_that_load_together_all_come_though_the_controller_is_replaced_between_them(
    tmp_path: Path, side: Side, wanted: Side
) -> None:
    locks, ranks = ShiftLocks(tmp_path), [Post(tmp_path, side) for _ in range(2)]
    assert locks.give_to(side)
    assert ranks[0].take()  # it waits for the other from now on
    locks.close()
    assert not ranks[1].take()
    following = ShiftLocks(tmp_path)
    assert not following.give_to(wanted)
    assert not Post(tmp_path, wanted).take()
    assert ranks[1].take()
    for rank in ranks:
        assert not following.give_to(wanted)
        rank.leave()
    assert following.give_to(wanted)
    assert Post(tmp_path, wanted).take()
    following.close()


def test_a_process_that_does_not_see_the_controllers_locks_waits_for_ever_and_says_why(tmp_path: Path) -> None:
    """Another folder stands for a file system, or its locks, that do not reach from one machine to another."""
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    with process(DIRECTS, here) as controller, process(WAITS, elsewhere, "trainers", 0.5) as trainer:
        assert controller.gives_to("trainers")
        assert trainer.says() == "waiting for a controller, and the shift of the trainers on the shared devices"
        told = trainer.says()
        assert f"no controller has held a lock in {elsewhere}/shifts, as this machine sees it" in told
        assert "its locks do not reach this machine: then put run.dir on a file system that each machine" in told
        assert told.endswith(f"here it is on {file_system_of(tmp_path)}")
        assert controller.gives_to("rollouts"), "it holds no memory of any device"
        with process(DIRECTS, elsewhere) as other:
            assert other.gives_to("rollouts")
            assert trainer.says() == "waiting for the shift of the trainers on the shared devices"
            assert other.gives_to("trainers")
            assert trainer.says() == "on the devices"


def test_a_wait_for_another_sides_shift_alarms_nobody_however_long_it_is(tmp_path: Path) -> None:
    with process(DIRECTS, tmp_path) as controller:
        assert controller.gives_to("trainers")
        with process(WAITS, tmp_path, "rollouts", 0.2) as rollout:
            assert rollout.says() == "waiting for the shift of the rollouts on the shared devices"
            time.sleep(1.0)
            assert controller.gives_to("rollouts")
            assert rollout.says() == "on the devices"


def test_a_wait_outlasts_a_controller_that_ends_and_is_started_again(tmp_path: Path) -> None:
    waits = "waiting for the shift of the rollouts on the shared devices"
    with ExitStack() as stack:
        with process(DIRECTS, tmp_path) as first:
            assert first.gives_to("trainers")
            rollout = stack.enter_context(process(WAITS, tmp_path, "rollouts", 600))
            assert rollout.says() == waits
        assert rollout.says() == "waiting for a controller, and the shift of the rollouts on the shared devices"
        second = stack.enter_context(process(DIRECTS, tmp_path))
        assert second.gives_to("trainers")
        assert rollout.says() == waits
        assert second.gives_to("rollouts")
        assert rollout.says() == "on the devices"


def test_a_file_system_without_locks_is_refused_and_one_whose_locks_are_away_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(file: int, kind: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    post = Post(tmp_path / "worked", "rollouts")
    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.raises(ConfigError, match=r"run\.dir is on a file system that has no locks"):
        Post(tmp_path / "without", "rollouts")
    with pytest.raises(OSError, match="No locks available"):  # a role that ends so is started again
        post.take()
    monkeypatch.undo()
    assert not post.take()
    post.close()
