"""The command group of the threads that write checkpoints beside the steps, apart from the one of the steps."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import numpy as np

from rolecall.errors import StorageUnavailableError
from rolecall.training.ranks.command_group import COMMAND_TIMEOUT_S, CommandGroup
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
        StorageUnavailableError when the ranks' disks are too far apart.
        """
        if self._group.sum(np.array([self._is_broken]))[0]:
            self._writers, self._is_broken = CommandGroup.of_default(), False
        writers = self._writers

        def together() -> T:
            try:
                return write(writers)
            except RuntimeError as error:
                self._is_broken = True
                raise StorageUnavailableError(
                    f"the ranks were more than {COMMAND_TIMEOUT_S:.0f} s apart in writing a checkpoint; see to the "
                    "storage on every node"
                ) from error

        return in_background(together, "checkpoint")
