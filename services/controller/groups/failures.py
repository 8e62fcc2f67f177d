"""The failures that a controller survives, and their budgets.

Which errors start its loop over from the store, how often, and for how long; how many groups may fail; and when a run
that waits has stalled.

The controller is crash-only: a failure of a role or of the store is not mended where it is met. The loop is abandoned
and started over from what the store holds, as a new controller would, so that there is one way to recover and it is
used often.
"""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable

from rolecall.errors import BudgetSpentError, OutOfOrderError, RoleCallError
from rolecall.settings import ControllerSection


def starts_over(error: RoleCallError) -> bool:
    """Whether the store says how to go on: a peer or the store failed, or a trainer restarted and stands at another
    step than the ledger.
    """
    return error.retryable or isinstance(error, OutOfOrderError)


class RecoveryBudget:
    """Recoveries without an applied step in between: controller.max_recoveries of them, and controller.stall_timeout_s
    in which roles were away.

    A group that lands meanwhile renews the time, for what failed has worked since. So does a quiet pause of
    stall_timeout_s, and the number, too: a paused run applies no steps.
    """

    def __init__(self, section: ControllerSection, clock: Callable[[], float] = time.monotonic) -> None:
        self._section = section
        self._clock = clock
        self._step = -1
        self._landed = (0, 0)
        self._spent = 0
        self._away_s = 0.0
        self._failed_at = 0.0
        self._recovered_at = 0.0

    def spend(self, error: RoleCallError, step: int, landed: tuple[int, int], *, paused: bool) -> None:
        """One more recovery at `step`; `landed` grows with each group that lands. BudgetSpentError, which names the
        cause, when none is left.
        """
        now, limit_s = self._clock(), self._section.stall_timeout_s
        if step != self._step or (paused and now - self._recovered_at >= limit_s):
            self._step, self._spent, self._away_s = step, 0, 0.0
        elif landed > self._landed:
            self._away_s = 0.0
        self._landed, self._failed_at = max(landed, self._landed), now
        self._spent += 1
        if self._spent > self._section.max_recoveries:
            raise BudgetSpentError(
                f"{self._spent} failures without a step applied after step {step}, more than "
                f"controller.max_recoveries; the last: {error.message}"
            ) from error
        if self._away_s > limit_s:
            raise BudgetSpentError(
                f"roles were away for {self._away_s:.0f} s after step {step}, more than controller.stall_timeout_s, "
                "and no group arrived in between; "
                f"the last failure: {error.message}"
            ) from error

    def paused(self) -> None:
        """Leaves the time until now out: roles may be away, for people paused the run."""
        self._failed_at = self._clock()

    def recovered(self) -> None:
        """Store and roles answer again."""
        self._recovered_at = self._clock()
        self._away_s += self._recovered_at - self._failed_at


class FailureBudget:
    """Groups that may fail, of any `window` groups admitted one after another.

    A run that goes on after it was spent begins anew: people saw to the cause.
    """

    def __init__(self, limit: int, window: int, failed: Iterable[int] = ()) -> None:
        """`failed`: gids of failures before, as the ledger knows them."""
        self._window = window
        self._gids: deque[int] = deque(maxlen=limit + 1)
        for gid in failed:
            if self.spend(gid):
                self._gids.clear()

    def spend(self, gid: int) -> bool:
        """One more group failed; whether that is one too many."""
        self._gids.append(gid)
        return len(self._gids) == self._gids.maxlen and max(self._gids) - min(self._gids) < self._window


class RunEnd:
    """The first budget that one life of the loop spent: it ends the run at the next step boundary, after a checkpoint.

    Used from one event loop.
    """

    def __init__(self) -> None:
        self.error: BudgetSpentError | None = None
        """The error the run ends with; None while nothing ends it."""
        self._called = asyncio.Event()

    def call(self, error: BudgetSpentError) -> None:
        """Ends the run with `error`, unless it ends already."""
        self.error = self.error or error
        self._called.set()

    async def wait(self) -> None:
        """Returns once the run is to end."""
        await self._called.wait()  # bounded: by its caller, the loop, which waits for a batch beside it


class StallClock:
    """A clock of how long nothing has moved in a run that waits for groups. While people pause the run nothing has to
    move.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """`limit_s`: controller.stall_timeout_s."""
        self.look_s = min(1.0, limit_s / 4)
        """Time between two looks; one that comes later than twice that is of a process that stood still itself, and the
        rest is nobody's silence.
        """
        self._limit_s = limit_s
        self._clock = clock
        self._seen: object = None
        self._still_s = 0.0
        self._looked_at = clock()

    def has_stalled(self, moved: object, *, paused: bool) -> bool:
        """One look: `moved` differs from the last one's when something has moved since."""
        now = self._clock()
        self._still_s = (
            0.0 if paused or moved != self._seen else self._still_s + min(now - self._looked_at, 2 * self.look_s)
        )
        self._seen, self._looked_at = moved, now
        return self._still_s >= self._limit_s
