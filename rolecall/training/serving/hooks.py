"""How a rank shows its process that it moves, and how it ends it. No torch."""

from collections.abc import Callable
from dataclasses import dataclass

from rolecall.errors import WorkerLostError


def nothing() -> None:
    """Progress that nobody watches."""


def _stay(error: WorkerLostError) -> None:
    """Of a single rank: there is no other to lose."""


@dataclass(frozen=True)
class Vitals:
    """What device work is given of the process around it."""

    role: str = "trainer"
    """For messages."""
    progressed: Callable[[], None] = nothing
    """Called in any thread whenever a part of the work is done; parts take less than the section's hang_s."""
    lost: Callable[[WorkerLostError], None] = _stay
    """Ends this process at once, from any thread, because another rank is lost."""


UNWATCHED = Vitals()
"""A rank on its own, in a test."""
