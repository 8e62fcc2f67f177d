"""What the controller starts over for, and when it gives up."""

import pytest

from rolecall.errors import (
    BudgetSpentError,
    ChannelBrokenError,
    DeadlineError,
    FencedError,
    OutOfOrderError,
    RoleCallError,
    RowMissingError,
    StoreUnavailableError,
    WorkerLostError,
)
from rolecall.settings import ControllerSection
from services.controller.groups.failures import FailureBudget, RecoveryBudget, StallClock, starts_over


@pytest.mark.parametrize(
    "kind", [ChannelBrokenError, DeadlineError, StoreUnavailableError, WorkerLostError, OutOfOrderError]
)
def test_the_failure_of_a_role_or_the_store_starts_the_loop_over(kind: type[RoleCallError]) -> None:
    assert starts_over(kind("gone"))


@pytest.mark.parametrize("kind", [FencedError, BudgetSpentError, RowMissingError, RoleCallError])
def test_what_the_store_cannot_mend_ends_the_run(kind: type[RoleCallError]) -> None:
    assert not starts_over(kind("no"))


class Recoveries:
    """A budget with a clock that stands still between failures and roles that are away as long as they are told to
    be.
    """

    def __init__(self, **controller: float) -> None:
        self.now = 0.0
        self.budget = RecoveryBudget(ControllerSection.model_validate(controller), lambda: self.now)

    def fail(
        self,
        step: int,
        away_s: float = 0.0,
        *,
        after_s: float = 0.0,
        landed: int = 0,
        paused: bool = False,
        paused_s: float = 0.0,
        why: str = "gone",
    ) -> None:
        """After `after_s` of work something fails, and answers again `away_s` later, or where the run is paused
        meanwhile for `paused_s` that much later.
        """
        self.now += after_s
        self.budget.spend(WorkerLostError(why), step, (landed, 0), paused=paused)
        if paused_s:
            self.now += paused_s
            self.budget.paused()
        self.now += away_s
        self.budget.recovered()


def test_recoveries_are_counted_per_step_and_the_last_cause_is_named() -> None:
    recoveries = Recoveries(max_recoveries=2)
    for step in (0, 0, 1, 1):
        recoveries.fail(step)
    with pytest.raises(BudgetSpentError, match=r"max_recoveries; the last: the critic is gone"):
        recoveries.fail(1, why="the critic is gone")


def test_hiccups_far_apart_in_one_long_step_do_not_end_it() -> None:
    recoveries = Recoveries(stall_timeout_s=60)
    for _ in range(8):
        recoveries.fail(7, away_s=5.0, after_s=3600.0)


def test_roles_that_are_away_longer_than_the_stall_timeout_end_the_run() -> None:
    recoveries = Recoveries(stall_timeout_s=60)
    recoveries.fail(3, away_s=31.0)
    recoveries.fail(3, away_s=31.0)
    with pytest.raises(
        BudgetSpentError, match="stall_timeout_s, and no group arrived in between; the last failure: still gone"
    ):
        recoveries.fail(3, why="still gone")


def test_a_group_that_lands_renews_the_time_and_not_the_number() -> None:
    recoveries = Recoveries(stall_timeout_s=60, max_recoveries=3)
    for landed in range(3):
        recoveries.fail(3, away_s=40.0, landed=landed)
    with pytest.raises(BudgetSpentError, match="max_recoveries"):
        recoveries.fail(3, landed=3)


def test_a_long_quiet_pause_renews_both_budgets_and_failures_without_a_break_in_it_do_not() -> None:
    recoveries = Recoveries(stall_timeout_s=60, max_recoveries=1)
    for _ in range(5):
        recoveries.fail(3, away_s=40.0, after_s=3600.0, paused=True)
    with pytest.raises(BudgetSpentError):
        recoveries.fail(3, paused=True)


def test_roles_that_are_away_in_a_pause_are_not_missed() -> None:
    recoveries = Recoveries(stall_timeout_s=60)
    recoveries.fail(3, away_s=31.0, paused_s=3600.0)
    recoveries.fail(3, away_s=31.0)
    with pytest.raises(BudgetSpentError, match="roles were away for 62 s"):
        recoveries.fail(3)


def test_an_applied_step_renews_both_budgets() -> None:
    recoveries = Recoveries(stall_timeout_s=60, max_recoveries=1)
    for step in range(5):
        recoveries.fail(step, away_s=50.0)


@pytest.mark.parametrize("limit", [0, 1, 32])
def test_a_budget_of_failures_allows_its_number_and_ends_at_the_next(limit: int) -> None:
    budget = FailureBudget(limit, 1000)
    assert [budget.spend(gid) for gid in range(limit + 1)] == [*[False] * limit, True]


def test_a_run_of_a_million_groups_may_lose_three_in_a_hundred_all_along_and_not_more() -> None:
    budget = FailureBudget(32, 1000)
    assert not any(budget.spend(gid) for gid in range(0, 1_000_000, 32))
    assert any(budget.spend(gid) for gid in range(1_000_000, 1_001_000, 25))


def test_failures_of_earlier_controllers_count_and_a_spent_budget_begins_anew() -> None:
    known = [3, 5, 900]
    assert [FailureBudget(3, 1000, known).spend(gid) for gid in (950, 2000)] == [True, False]
    resumed = FailureBudget(2, 1000, known)
    assert [resumed.spend(gid) for gid in (950, 951, 952)] == [False, False, True]


def test_groups_fail_in_any_order() -> None:
    budget = FailureBudget(2, 10)
    assert [budget.spend(gid) for gid in (9, 20, 12, 18)] == [False, False, False, True]


def test_only_what_stands_still_while_it_should_move_is_a_stall() -> None:
    now = 0.0
    clock = StallClock(600.0, lambda: now)

    def looks(seconds: int, *, moved: object = 0, paused: bool = False) -> bool:
        nonlocal now
        stalled = False
        for _ in range(seconds):
            now += clock.look_s
            stalled = clock.has_stalled(moved, paused=paused)
        return stalled

    assert clock.look_s == 1.0
    assert not looks(599)
    assert not looks(1, moved=1)
    assert not looks(599, moved=1)
    assert not looks(100_000, moved=1, paused=True)
    assert not looks(599, moved=1)
    assert looks(1, moved=1)


def test_a_look_that_comes_late_is_no_silence_of_others() -> None:
    now = 0.0
    clock = StallClock(600.0, lambda: now)
    assert not clock.has_stalled(0, paused=False)
    now += 7200.0
    assert not clock.has_stalled(0, paused=False)
