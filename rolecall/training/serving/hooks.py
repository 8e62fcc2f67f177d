"""The hooks by which device work reports to its process and ends it. No torch."""

from collections.abc import Callable
from dataclasses import dataclass

from rolecall.errors import WorkerLostError


def nothing() -> None:
    """Does nothing: the hook of progress that nobody watches."""


def _stay(error: WorkerLostError) -> None:
    """Does nothing: a single rank has no other to lose."""


def _stays() -> bool:
    """Returns False: nobody asks this process to stop."""
    return False


@dataclass(frozen=True)
class ProcessHooks:
    """The calls by which device work shows its process that it moves, and ends it."""

    role: str = "trainer"
    """The role's name, for messages."""
    progressed: Callable[[], None] = nothing
    """Called in any thread whenever a part of the work is done; parts take less than the section's hang_s."""
    lost: Callable[[WorkerLostError], None] = _stay
    """Ends this process at once, from any thread, because another rank is lost."""
    stop: Callable[[], None] = nothing
    """Asks this process to stop, from any thread, because another rank was asked to."""
    is_stopping: Callable[[], bool] = _stays
    """Whether this process was asked to stop; called in any thread."""
