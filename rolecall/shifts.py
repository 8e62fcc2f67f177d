"""Shifts on devices that rollouts and trainers of one machine share: who may hold device memory, by the kernel's locks.

    <run.dir>/shifts/rollouts   held, shared, by every rollout with device memory: from before it loads to its sleep,
                                and from its waking to the next
    <run.dir>/shifts/trainers   held, shared, by every trainer that loads its model

The controller holds one of the two exclusively: `rollouts` while trainers may hold memory, `trainers` while rollouts
may. To have it is the proof that nobody of that side is on the device, whatever became of the calls that told them to
leave; and a process that starts waits until the controller has the other side's. The kernel frees a lock with its
process, however that ends; without a controller nobody begins to load.
"""

import asyncio
import fcntl
import os
from pathlib import Path
from typing import Literal

Side = Literal["rollouts", "trainers"]
_OTHER: dict[Side, Side] = {"rollouts": "trainers", "trainers": "rollouts"}
POLL_S = 0.1
"""Seconds between two looks of a process that waits for its shift."""
FOLDER = "shifts"


class Post:
    """A process of one side: on the device from `take` to `leave`."""

    def __init__(self, run_dir: Path, side: Side) -> None:
        self._own, self._other = _open(run_dir, side), _open(run_dir, _OTHER[side])

    def take(self) -> bool:
        """Whether the process may hold device memory from now on: whether it is its side's shift. Idempotent."""
        # held before the look: the controller, who gives the shift away, has to see it
        if not _lock(self._own, fcntl.LOCK_SH):
            return False
        if _is_exclusive(self._other):
            return True
        self.leave()
        return False

    async def wait_until_due(self) -> None:
        """Returns once it is taken. No deadline: a shift of the other side may take as long as a step, and a pause of
        the run longer; the launcher does not count it either.
        """
        while not self.take():
            await asyncio.sleep(POLL_S)

    def leave(self) -> None:
        """The process holds no device memory any more. Idempotent."""
        _unlock(self._own)

    def close(self) -> None:
        """Leaves for good."""
        for file in (self._own, self._other):
            os.close(file)


class ShiftLocks:
    """The controller's hold on the side whose shift it is not."""

    def __init__(self, run_dir: Path) -> None:
        self._files: dict[Side, int] = {side: _open(run_dir, side) for side in _OTHER}

    def give_to(self, side: Side) -> bool:
        """Begins the shift of `side`; False, and nothing has changed, while somebody of the other one is on the
        device.
        """
        if not _lock(self._files[_OTHER[side]], fcntl.LOCK_EX):
            return False
        _unlock(self._files[side])
        return True

    def close(self) -> None:
        """Lets go of both: nobody begins to load until the next controller."""
        for file in self._files.values():
            os.close(file)


def is_shift_of(side: Side, run_dir: Path) -> bool:
    """Whether processes of `side` may begin to load: the controller keeps the other one off, and not this one."""
    files = [_open(run_dir, each) for each in (side, _OTHER[side])]
    try:
        own, other = map(_is_exclusive, files)
    finally:
        for file in files:
            os.close(file)
    return other and not own


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
