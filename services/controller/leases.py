"""Leases of claimed groups: which entries their worker no longer renews, judged by this process's clock.

A worker renews what it works on. The server's idle time is read only to see whether it fell since the last look: a stopped server or a jump of its clock
expires nothing. After an outage, in which nobody could renew, everyone gets a full lease again.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rolecall.store.position import PendingEntry


@dataclass
class _Lease:
    consumer: str
    delivery: int
    idle_s: float
    renewed_at: float


class Leases:
    """The claimed entries as seen at each look."""

    def __init__(self, lease_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._lease_s = lease_s
        self._clock = clock
        self._leases: dict[str, _Lease] = {}
        self._looked_at = clock()

    def expired(self, pending: Sequence[PendingEntry]) -> list[PendingEntry]:
        """Entries that were in the same hands at every look for lease_s, and never renewed. Call it several times in lease_s: a look that comes late
        (the store was away, this process stood still) grants everyone a new lease."""
        now = self._clock()
        known = self._leases if now - self._looked_at <= self._lease_s / 2 else {}
        self._looked_at, self._leases = now, {}
        expired = []
        for entry in pending:
            lease = known.get(entry.entry_id)
            if lease is None or (lease.consumer, lease.delivery) != (entry.consumer, entry.delivery) or entry.idle_s <= lease.idle_s:
                lease = _Lease(entry.consumer, entry.delivery, entry.idle_s, now)
            lease.idle_s = entry.idle_s
            self._leases[entry.entry_id] = lease
            if now - lease.renewed_at > self._lease_s:
                expired.append(entry)
        return expired
