"""Leases expire by our own clock, and only where nobody renews."""

from rolecall.store.position import PendingEntry
from services.controller.leases import Leases


def test_only_an_entry_that_is_never_renewed_expires_after_a_lease_of_our_clock() -> None:
    now = 0.0
    leases = Leases(5.0, lambda: now)
    for look in range(8):
        now = float(look)
        renewed = PendingEntry("1-0", "a.1", look % 2, 1)
        abandoned = PendingEntry("2-0", "a.1", float(look), 1)
        expired = leases.expired([renewed, abandoned])
        assert [entry.entry_id for entry in expired] == (["2-0"] if look > 5 else [])


def test_a_jump_of_the_servers_clock_expires_nothing() -> None:
    now = 0.0
    leases = Leases(5.0, lambda: now)
    assert leases.expired([PendingEntry("1-0", "a.1", 0.1, 1)]) == []
    now = 1.0
    assert leases.expired([PendingEntry("1-0", "a.1", 10_000.0, 1)]) == []


def test_another_owner_or_delivery_starts_a_new_lease() -> None:
    now = 0.0
    leases = Leases(5.0, lambda: now)
    leases.expired([PendingEntry("1-0", "a.1", 1.0, 1)])
    for now in (2.0, 4.0, 6.0):
        assert leases.expired([PendingEntry("1-0", "b.1", now, 2)]) == []
    now = 7.5
    assert len(leases.expired([PendingEntry("1-0", "b.1", now, 2)])) == 1


def test_after_an_outage_of_the_store_everyone_gets_a_full_lease_again() -> None:
    now = 0.0
    leases = Leases(5.0, lambda: now)
    leases.expired([PendingEntry("1-0", "a.1", 0.0, 1)])
    for now in (60.0, 62.0, 64.0):
        assert leases.expired([PendingEntry("1-0", "a.1", now, 1)]) == []
    now = 65.5
    assert len(leases.expired([PendingEntry("1-0", "a.1", now, 1)])) == 1
