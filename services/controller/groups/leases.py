"""Leases of claimed groups: which entries their worker no longer renews, judged by this process's clock.

A worker renews what it works on every lease_s / 3. The server's time of the last renewal is read only to see whether it
changed since the last look: a stopped server or a jump of its clock expires nothing, and how looks and renewals fall
against each other does not matter.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rolecall.store.position import PendingEntry

LOOKS_PER_LEASE = 4
"""The pause between two looks is lease_s / LOOKS_PER_LEASE. A look counts for that much at most: its call may have
waited for the store or for this process at either end, and as long as that a renewal may have waited, too. So a slow
store makes leases longer, never shorter.
"""
SAME_RENEWAL_S = 0.02
"""Times of one renewal, as two looks read them, may be so far apart on servers whose clock goes on within a script;
renewals are lease_s / 3 apart.
"""


@dataclass
class _Lease:
    entry: PendingEntry
    """The entry as it was when it was last found renewed."""
    silent_s: float = 0.0
    is_forgiven: bool = False
    """A late look has begun it anew."""


class Leases:
    """The claimed entries as seen at each look."""

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._leases: dict[str, _Lease] = {}
        self._looked_at = clock()

    def expired(self, pending: Sequence[PendingEntry]) -> list[PendingEntry]:
        """Entries that were in the same hands, unrenewed, at every look for more than lease_s. Pause lease_s /
        LOOKS_PER_LEASE between two calls.

        A look that comes later than lease_s / 2 (the store was away, this process stood still) begins every lease anew,
        once until it is renewed. Of looks c seconds apart, the sixth after the last renewal finds a dead worker, the
        eleventh where c is above lease_s / 2.
        """
        now = self._clock()
        gap_s, self._looked_at = now - self._looked_at, now
        known, self._leases = self._leases, {}
        expired = []
        for entry in pending:
            lease = known.get(entry.entry_id)
            if lease is None or _is_renewed(lease.entry, entry):
                lease = _Lease(entry)
            elif gap_s > self._lease_s / 2 and not lease.is_forgiven:
                lease.silent_s, lease.is_forgiven = 0.0, True
            else:
                lease.silent_s += min(gap_s, self._lease_s / LOOKS_PER_LEASE)
            self._leases[entry.entry_id] = lease
            if lease.silent_s > self._lease_s:
                expired.append(entry)
        return expired


def _is_renewed(before: PendingEntry, now: PendingEntry) -> bool:
    changed = (before.consumer, before.delivery) != (now.consumer, now.delivery)
    return changed or abs(now.renewed_at_s - before.renewed_at_s) > SAME_RENEWAL_S
