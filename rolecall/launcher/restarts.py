"""The budget and the back-off of each role's restarts, both renewed by every applied step.

Also the end of a run whose role is not started again. Pure bookkeeping; `supervisor.py` starts the processes.
"""

from rolecall.settings import LauncherSection


class RestartBudget:
    """The restarts of each name since a step was last applied."""

    def __init__(self, section: LauncherSection) -> None:
        self._section = section
        self._counts: dict[str, int] = {}
        self._step = 0

    def applied(self, step: int) -> None:
        """The run stands at `step`. Only one beyond all before it renews the budgets: a restarted controller counts up
        to where it was.
        """
        if step > self._step:
            self._step = step
            self._counts.clear()

    def take(self, name: str) -> float | None:
        """Seconds to wait before `name` is started again; None when its budget is spent."""
        count = self._counts.get(name, 0)
        if count >= self._section.max_restarts:
            return None
        self._counts[name] = count + 1
        # Doubling stops long before the float overflows.
        return min(self._section.backoff_s * 2.0 ** min(count, 64), self._section.max_backoff_s)

    def count(self, name: str) -> int:
        """Restarts of `name` taken since a step was last applied."""
        return self._counts.get(name, 0)


class GivenUp(Exception):
    """The run cannot go on here, because of a role."""

    def __init__(self, role: str, failure: str) -> None:
        super().__init__(failure)
        self.role = role
        self.failure = failure
