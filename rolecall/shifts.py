"""Shifts on devices that rollouts, trainers and references share: who may hold device memory, by locks of files.

    <run.dir>/shifts/rollouts     held, shared, by every rollout with device memory: from before it loads to its sleep,
                                  and from its waking to the next
    <run.dir>/shifts/references   held, shared, by every reference with device memory, if it gives that up at all: while
                                  it loads, and from a column to Offload
    <run.dir>/shifts/trainers     held, shared, by every trainer that loads its model

The controller holds all but one of them exclusively: the one is that of the side which may hold memory. To have the
others is the proof that nobody of those sides is on the device, whatever became of the calls that told them to leave;
and a process that starts waits until the controller has the other sides'. The kernel frees a lock with its process,
however that ends; without a controller nobody begins to load. Where the roles are on several machines, run.dir is on a
file system of theirs whose locks hold between them: to a process that does not see the controller's locks there is no
controller, and it waits.
"""

import asyncio
import errno
import fcntl
import logging
import os
import time
from pathlib import Path
from typing import Literal, get_args

from rolecall.errors import ConfigError

logger = logging.getLogger(__name__)

Side = Literal["rollouts", "references", "trainers"]
SIDES: tuple[Side, ...] = get_args(Side)
POLL_S, MAX_POLL_S = 0.1, 1.0
"""Seconds between two looks of a process that waits for its shift: at first, and after a while, for files of several
machines are another machine's work.
"""
ALONE_S, AGAIN_S = 60.0, 600.0
"""Seconds without a controller until a process that waits says what may be wrong, and until it does so again."""
NO_LOCKS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
"""What a file system says that has no locks; later one whose locks are away for a while."""
FOLDER = "shifts"


class Post:
    """A process of one side: on the device from `take` to `leave`."""

    def __init__(self, run_dir: Path, side: Side) -> None:
        self._run_dir, self._side = run_dir, side
        self._own = _open(run_dir, side)
        self._is_on = False
        self._is_directed = True
        """Whether a controller kept any side off the devices at the last look."""
        self._others = [_open(run_dir, other) for other in SIDES if other != side]

    def take(self) -> bool:
        """Whether the process may hold device memory from now on: whether it is its side's shift. Idempotent: who is on
        the device stays there until it leaves, whoever directs the shifts meanwhile.
        """
        if self._is_on:
            return True
        # held before the look: the controller, who gives the shift away, has to see it
        if not _lock(self._own, fcntl.LOCK_SH):
            self._is_directed = True
            return False
        are_off = [_is_exclusive(file) for file in self._others]
        self._is_directed = any(are_off)
        if all(are_off):
            self._is_on = True
            return True
        self.leave()
        return False

    async def wait_until_due(self, alone_s: float = ALONE_S) -> None:
        """Returns once it is taken, and logs what it waits for: after `alone_s` without a controller, why that may be.
        No deadline: a shift of another side may take as long as a step, and a pause of the run longer; the launcher
        does not count it either.
        """
        began = directed_at = time.monotonic()
        tell_at, was_directed = began + alone_s, None
        while not self.take():
            now = time.monotonic()
            if self._is_directed != was_directed:
                was_directed = self._is_directed
                what = "the" if was_directed else "a controller, and the"
                logger.info("waiting for %s shift of the %s on the shared devices", what, self._side)
            if self._is_directed:
                directed_at, tell_at = now, now + alone_s
            elif now >= tell_at:
                tell_at = now + AGAIN_S
                logger.warning("%s", self._why_alone(now - directed_at))
            await asyncio.sleep(min(max(POLL_S, (now - began) / 100), MAX_POLL_S))

    def _why_alone(self, for_s: float) -> str:
        folder = self._run_dir / FOLDER
        return (
            f"for {for_s:.0f} s no controller has held a lock in {folder}, as this machine sees it, so no {self._side} "
            "begin to load. Either none is at work, or its locks do not reach this machine: then put run.dir on a file "
            "system that each machine of the run has mounted, and whose locks hold between them (NFS 4, CephFS, GPFS, "
            f"Lustre with -o flock); here it is on {file_system_of(folder)}"
        )

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


def file_system_of(path: Path) -> str:
    """Returns the kind of the file system that `path` lies on and its options, as the kernel lists them."""
    mounts: dict[Path, str] = {}  # of those that are mounted on one place the last is seen
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        mounted, _, kind = line.partition(" - ")
        mounts[Path(mounted.split()[4].replace("\\040", " "))] = kind
    place = path.resolve()
    described = (mounts[each].split(" ") for each in (place, *place.parents) if each in mounts)
    return next((f"{words[0]} ({words[-1]})" for words in described), "an unknown file system")


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
    file = os.open(folder / side, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _is_exclusive(file)
    except OSError as error:
        os.close(file)
        if error.errno not in NO_LOCKS:
            raise
        raise ConfigError(
            f"run.dir is on a file system that has no locks, by which roles take turns on shared devices ({error}); "
            "mount it with them (Lustre: -o flock), or name another"
        ) from error
    return file


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
