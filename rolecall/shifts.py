"""Shifts on devices that rollouts, trainers and references of one machine share: who may hold device memory, by the
kernel's locks.

    <run.dir>/shifts/rollouts     held, shared, by every rollout with device memory: from before it loads to its sleep,
                                  and from its waking to the next
    <run.dir>/shifts/references   held, shared, by every reference with device memory, if it gives that up at all: while
                                  it loads, and from a column to Offload
    <run.dir>/shifts/trainers     held, shared, by every trainer that loads its model

The controller holds all but one of them exclusively: the one is that of the side which may hold memory. To have the
others is the proof that nobody of those sides is on the device, whatever became of the calls that told them to leave;
and a process that starts waits until the controller has the other sides'. The kernel frees a lock with its process,
however that ends; without a controller nobody begins to load.
"""

import asyncio
import fcntl
import os
from pathlib import Path
from typing import Literal, get_args

Side = Literal["rollouts", "references", "trainers"]
SIDES: tuple[Side, ...] = get_args(Side)
POLL_S = 0.1
"""Seconds between two looks of a process that waits for its shift."""
FOLDER = "shifts"


class Post:
    """A process of one side: on the device from `take` to `leave`."""

    def __init__(self, run_dir: Path, side: Side) -> None:
        self._own = _open(run_dir, side)
        self._is_on = False
        self._others = [_open(run_dir, other) for other in SIDES if other != side]

    def take(self) -> bool:
        """Whether the process may hold device memory from now on: whether it is its side's shift. Idempotent: who is on
        the device stays there until it leaves, whoever directs the shifts meanwhile.
        """
        if self._is_on:
            return True
        # held before the look: the controller, who gives the shift away, has to see it
        if not _lock(self._own, fcntl.LOCK_SH):
            return False
        if all(map(_is_exclusive, self._others)):
            self._is_on = True
            return True
        self.leave()
        return False

    async def wait_until_due(self) -> None:
        """Returns once it is taken. No deadline: a shift of another side may take as long as a step, and a pause of
        the run longer; the launcher does not count it either.
        """
        while not self.take():
            await asyncio.sleep(POLL_S)

    def leave(self) -> None:
        """The process holds no device memory any more. Idempotent."""
        self._is_on = False
        _unlock(self._own)

    def close(self) -> None:
        """Leaves for good."""
        for file in (self._own, *self._others):
            os.close(file)


class ShiftLocks:
    """The controller's hold on the sides whose shift it is not."""

    def __init__(self, run_dir: Path) -> None:
        self._files: dict[Side, int] = {side: _open(run_dir, side) for side in SIDES}

    def give_to(self, side: Side) -> bool:
        """Begins the shift of `side`; False while somebody of another one is on the device, whose shift goes on, also
        if a controller before this one began it: ranks that load wait there for each other.
        """
        others_left = [_lock(file, fcntl.LOCK_EX) for other, file in self._files.items() if other != side]
        if not all(others_left):
            _lock(self._files[side], fcntl.LOCK_EX)
            return False
        _unlock(self._files[side])
        return True

    def close(self) -> None:
        """Lets go of all: nobody begins to load until the next controller."""
        for file in self._files.values():
            os.close(file)


def is_shift_of(side: Side, run_dir: Path) -> bool:
    """Whether processes of `side` may begin to load: the controller keeps the others off, and not this one."""
    files = {each: _open(run_dir, each) for each in SIDES}
    try:
        return all(_is_exclusive(file) != (each == side) for each, file in files.items())
    finally:
        for file in files.values():
            os.close(file)


def _open(run_dir: Path, side: Side) -> int:
    folder = run_dir / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    return os.open(folder / side, os.O_RDWR | os.O_CREAT, 0o600)


def _lock(file: int, kind: int) -> bool:
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _unlock(file: int) -> None:
    fcntl.flock(file, fcntl.LOCK_UN)  # bounded: to let go never waits


def _is_exclusive(file: int) -> bool:
    """Whether another holds the file exclusively."""
    if not _lock(file, fcntl.LOCK_SH):
        return True
    _unlock(file)
    return False
