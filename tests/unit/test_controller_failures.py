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
from services.controller.failures import RecoveryBudget, starts_over


@pytest.mark.parametrize("kind", [ChannelBrokenError, DeadlineError, StoreUnavailableError, WorkerLostError, OutOfOrderError])
def test_the_failure_of_a_role_or_the_store_starts_the_loop_over(kind: type[RoleCallError]) -> None:
    assert starts_over(kind("gone"))


@pytest.mark.parametrize("kind", [FencedError, BudgetSpentError, RowMissingError, RoleCallError])
def test_what_the_store_cannot_mend_ends_the_run(kind: type[RoleCallError]) -> None:
    assert not starts_over(kind("no"))


def test_recoveries_are_counted_per_step_and_the_last_cause_is_named() -> None:
    budget = RecoveryBudget(ControllerSection(max_recoveries=2), lambda: 0.0)
    for step in (0, 0, 1, 1):
        budget.spend(WorkerLostError("the actor is gone"), step)
    with pytest.raises(BudgetSpentError, match=r"max_recoveries; the last: the critic is gone"):
        budget.spend(WorkerLostError("the critic is gone"), 1)


def test_failures_that_last_longer_than_the_stall_timeout_end_the_run() -> None:
    now = 0.0
    budget = RecoveryBudget(ControllerSection(stall_timeout_s=60), lambda: now)
    budget.spend(WorkerLostError("gone"), 3)
    now = 59.0
    budget.spend(WorkerLostError("gone"), 3)
    now = 61.0
    with pytest.raises(BudgetSpentError, match="stall_timeout_s; the last failure: still gone"):
        budget.spend(WorkerLostError("still gone"), 3)


def test_an_applied_step_renews_both_budgets() -> None:
    now = 0.0
    budget = RecoveryBudget(ControllerSection(stall_timeout_s=60, max_recoveries=1), lambda: now)
    for step in range(5):
        budget.spend(WorkerLostError("gone"), step)
        now += 100.0
