"""The service's half of controller fencing: calls that change state are obeyed for the newest controller alone; which
one that is, the store says.
"""

import asyncio
from collections.abc import Callable

from rolecall.errors import FencedError, StoreRolledBackError


class Fence:
    """The highest ctl that the store was seen to hold. Nothing is believed of a caller: a ctl above it makes this ask
    the store, at most once for each controller that there is; so also the first call of a service that was restarted,
    which therefore does not obey a controller that was replaced before.
    """

    def __init__(self, read_ctl: Callable[[], int]) -> None:
        """`read_ctl` asks the store; it blocks, and is called in a thread of its own."""
        self._read_ctl = read_ctl
        self.ctl = -1
        """Highest number seen in the store; -1 before the first call."""

    async def check(self, ctl: int) -> None:
        """Returns when `ctl` is the newest controller's. FencedError when it was replaced, StoreRolledBackError when
        the store does not know it yet, or no more; StoreUnavailableError.
        """
        if not 0 <= ctl <= self.ctl:
            seen = await asyncio.to_thread(self._read_ctl)  # bounded: by the store's retry_s
            self.ctl = max(self.ctl, seen)  # as it is now: another call may have seen more meanwhile
        self.require(ctl)
        if ctl > self.ctl:
            raise StoreRolledBackError(
                f"controller {ctl} is not known to the store, whose newest is {self.ctl}: its number is made up, or "
                "the store was set back; go on with --resume",
                ctl=str(self.ctl),
            )

    def require(self, ctl: int) -> None:
        """FencedError when the controller `ctl`, which was let through before, has been replaced meanwhile."""
        if ctl < self.ctl:
            raise FencedError(
                f"controller {ctl} was replaced by controller {self.ctl}; only the newest may call", ctl=str(self.ctl)
            )
