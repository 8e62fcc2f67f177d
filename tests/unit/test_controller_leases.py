"""Leases expire by our own clock, and only where nobody renews, however looks and renewals fall against each other."""

import random

import pytest

from rolecall.store.position import PendingEntry
from services.controller.groups.leases import LOOKS_PER_LEASE, Leases

LEASE_S = 5.0


def held(renewed_at_s: float, consumer: str = "a.1", delivery: int = 1) -> PendingEntry:
    return PendingEntry("1-0", consumer, renewed_at_s, delivery)


class Looks:
    """Leases on a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.leases = Leases(LEASE_S, lambda: self.now)

    def expired_after(self, seconds: float, entry: PendingEntry) -> bool:
        self.now += seconds
        return bool(self.leases.expired([entry]))


def test_only_an_entry_that_is_never_renewed_expires_after_a_lease_of_our_clock() -> None:
    now = 0.0
    leases = Leases(LEASE_S, lambda: now)
    for look in range(8):
        now = float(look)
        renewed = PendingEntry("1-0", "a.1", now - look % 2, 1)
        abandoned = PendingEntry("2-0", "a.1", 0.0, 1)
        expired = leases.expired([renewed, abandoned])
        assert [entry.entry_id for entry in expired] == (["2-0"] if look > LEASE_S else [])


@pytest.mark.parametrize("jitter_s", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("look_s", [1.25, 1.45, 1.7, 2.05, 2.25, 2.6, 3.4, 5.0, 7.0])
def test_a_worker_that_renews_on_time_keeps_its_lease_however_slow_the_looks_are(
    look_s: float, jitter_s: float
) -> None:
    """Renewals every 1.68 s: most looks are farther apart, so that the time since the renewal grows from look to
    look.
    """
    rng = random.Random(f"{look_s}/{jitter_s}")
    for _ in range(40):
        looks, phase = Looks(), rng.uniform(0, 1.68)
        while looks.now < 60:
            wait_s = look_s + rng.uniform(-jitter_s, jitter_s)
            renewed_at_s = phase + (looks.now + wait_s - phase) // 1.68 * 1.68
            assert not looks.expired_after(wait_s, held(renewed_at_s))


@pytest.mark.parametrize("look_s", [1.25, 1.7, 2.5, 2.6, 5.0, 7.0])
def test_a_dead_worker_is_found_by_the_sixth_look_or_with_slow_looks_by_the_eleventh(look_s: float) -> None:
    looks, wanted = Looks(), 6 if look_s <= LEASE_S / 2 else 11
    num_looks = 1
    while not looks.expired_after(look_s, held(-1.0)):
        num_looks += 1
    assert LEASE_S / look_s < num_looks <= wanted


@pytest.mark.parametrize("seed", range(20))
def test_a_dead_worker_is_found_by_the_eleventh_look_of_a_controller_that_is_now_busy_and_now_not(seed: int) -> None:
    rng, looks = random.Random(seed), Looks()
    assert any(looks.expired_after(rng.choice([1.3, 1.7, 2.4, 2.6, 5.0, 30.0]), held(-1.0)) for _ in range(11))


def test_a_look_counts_for_its_pause_alone_because_its_call_may_have_waited() -> None:
    looks = Looks()
    assert not looks.expired_after(1.25, held(0.0))
    for _ in range(LOOKS_PER_LEASE):  # 1.25 s of pause and 1.2 s of waiting for the store each
        assert not looks.expired_after(2.45, held(0.0))
    assert looks.expired_after(2.45, held(0.0))


def test_a_jump_of_the_servers_clock_expires_nothing() -> None:
    looks = Looks()
    assert not looks.expired_after(1.0, held(0.1))
    assert not looks.expired_after(1.0, held(10_000.0))
    assert not looks.expired_after(1.0, held(-10_000.0))


def test_times_of_one_renewal_that_differ_by_milliseconds_are_no_renewals() -> None:
    looks = Looks()
    assert [looks.expired_after(1.0, held(look % 2 / 1000)) for look in range(7)] == [False] * 6 + [True]


def test_another_owner_or_delivery_starts_a_new_lease() -> None:
    looks = Looks()
    looks.expired_after(1.0, held(0.0))
    assert [looks.expired_after(1.0, held(0.0, "b.1", 2)) for _ in range(7)] == [False] * 6 + [True]
    assert not looks.expired_after(1.0, held(0.0, "b.1", 3))


def test_after_an_outage_of_the_store_everyone_gets_a_full_lease_again() -> None:
    looks = Looks()
    for _ in range(4):
        assert not looks.expired_after(1.0, held(0.0))
    assert not looks.expired_after(60.0, held(0.0))
    assert [looks.expired_after(1.0, held(0.0)) for _ in range(6)] == [False] * 5 + [True]


def test_a_second_outage_gives_no_second_lease_to_a_worker_that_did_not_renew_after_the_first() -> None:
    looks = Looks()
    looks.expired_after(1.0, held(0.0))
    looks.expired_after(60.0, held(0.0))
    assert [looks.expired_after(60.0, held(0.0)) for _ in range(5)] == [False] * 4 + [True]
    assert not looks.expired_after(1.0, held(300.0))
    assert not looks.expired_after(60.0, held(300.0)), "it renewed since: the next outage is forgiven again"
