"""The budget and the back-off of restarts."""

from rolecall.launcher.restarts import RestartBudget
from rolecall.settings import LauncherSection


def test_the_pause_doubles_up_to_its_bound_and_the_budget_ends() -> None:
    budget = RestartBudget(LauncherSection(max_restarts=9, backoff_s=0.5))
    assert [budget.take("actor") for _ in range(10)] == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 30.0, None]
    assert budget.count("actor") == 9


def test_roles_have_budgets_of_their_own() -> None:
    budget = RestartBudget(LauncherSection(max_restarts=1))
    assert budget.take("rollout-0") is not None
    assert budget.take("rollout-0") is None
    assert budget.take("rollout-1") is not None


def test_an_applied_step_renews_budget_and_pause_and_one_that_was_seen_before_does_not() -> None:
    budget = RestartBudget(LauncherSection(max_restarts=1, backoff_s=0.5))
    budget.applied(3)
    assert budget.take("actor") == 0.5
    for step in (0, 2, 3):  # as a restarted controller counts up to where it was
        budget.applied(step)
    assert budget.take("actor") is None
    budget.applied(4)
    assert budget.take("actor") == 0.5


def test_no_restart_at_all_may_be_asked_for() -> None:
    assert RestartBudget(LauncherSection(max_restarts=0)).take("actor") is None
