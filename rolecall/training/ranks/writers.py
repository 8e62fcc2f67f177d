"""The command group of the threads that write checkpoints beside the steps, apart from the one of the steps."""

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import numpy as np

from rolecall.errors import StorageUnavailableError
from rolecall.training.ranks import command_group
from rolecall.training.ranks.command_group import CommandGroup
from rolecall.training.serving.background import in_background

T = TypeVar("T")


class Writers:
    """The ranks' writing threads. Used from the thread that leads or follows the steps."""

    def __init__(self, group: CommandGroup) -> None:
        """A collective of `group`, the ranks' own."""
        self._group = group
        self._writers = CommandGroup.of_default()
        self._is_broken = False
        """Whether a wait was too long for it: torch closes a group then."""

    def begin(self, write: Callable[[CommandGroup], T]) -> Future[T]:
        """Has `write` run in a thread, with the writers' group. A collective. The future fails as `write` does, or with
        StorageUnavailableError when the ranks' disks are too far apart for it.
        """
        if self._group.sum(np.array([self._is_broken]))[0]:
            self._writers, self._is_broken = CommandGroup.of_default(), False
        writers, longest_s = self._writers, command_group.COMMAND_TIMEOUT_S

        def together() -> T:
            begun = time.monotonic()
            try:
                with self._group.watched():
                    return write(writers)
            except RuntimeError as error:
                if writers.world_size == 1 or time.monotonic() - begun < longest_s:
                    raise
                self._is_broken = True
                raise StorageUnavailableError(
                    f"the ranks were more than {longest_s:.0f} s apart in writing a checkpoint; see to the storage on "
                    "every node"
                ) from error

        return in_background(together, "checkpoint")
