"""A few hours of the week that benchmarks/lease_week.py simulates."""

from benchmarks.lease_week import simulate


def test_a_slow_store_and_a_busy_controller_cost_no_group_and_hide_no_dead_rollout() -> None:
    """Five hours: every load of the controller, stalls of the store, pauses, deaths."""
    found = simulate(5 * 3600.0, num_rollouts=30, seed=1)
    assert found.num_groups > 3000
    assert found.num_lost == 0
    assert found.num_not_found == 0
    assert len(found.found_after_looks) > 5
    assert max(found.found_after_looks) <= 11
    assert found.max_cycle_s > 5


def test_the_simulation_sees_leases_that_are_too_short_for_the_store() -> None:
    """A renewal takes up to twelve seconds on its ways, of which a lease of 1 s bears one."""
    assert simulate(600.0, num_rollouts=30, lease_s=1.0).num_lost > 0
