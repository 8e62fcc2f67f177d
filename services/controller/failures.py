"""What the controller survives: which errors start its loop over from the store, how often, and for how long.

The controller is crash-only: a failure of a role or of the store is not mended where it is met. The loop is abandoned and started over from what the store
holds, as a new controller would, so that there is one way to recover and it is used often.
"""

import time
from collections.abc import Callable

from rolecall.errors import BudgetSpentError, OutOfOrderError, RoleCallError
from rolecall.settings import ControllerSection


def starts_over(error: RoleCallError) -> bool:
    """Whether the store says how to go on: a peer or the store failed, or a trainer restarted and stands at another step than the ledger."""
    return error.retryable or isinstance(error, OutOfOrderError)


class RecoveryBudget:
    """Recoveries without an applied step in between: controller.max_recoveries of them, within controller.stall_timeout_s of the first."""

    def __init__(self, section: ControllerSection, clock: Callable[[], float] = time.monotonic) -> None:
        self._section = section
        self._clock = clock
        self._step = -1
        self._spent = 0
        self._since = 0.0

    def spend(self, error: RoleCallError, step: int) -> None:
        """One more recovery at `step`. BudgetSpentError, which names the cause, when none is left."""
        if step != self._step or not self._spent:
            self._step, self._spent, self._since = step, 0, self._clock()
        self._spent += 1
        if self._spent > self._section.max_recoveries:
            raise BudgetSpentError(
                f"{self._spent} failures without a step applied after step {step}, more than controller.max_recoveries; the last: {error.message}"
            ) from error
        if self._clock() - self._since > self._section.stall_timeout_s:
            raise BudgetSpentError(f"no step was applied after step {step} for controller.stall_timeout_s; the last failure: {error.message}") from error
