"""The store's clock jumps: leases are judged by the controller's own, so that a jump costs nobody a group and gives
nobody two.
"""

import time

import pytest

from rolecall.errors import LeaseLostError
from services.controller.groups.leases import Leases
from tests.fixtures_store import DIGEST, StoreUnderTest

LEASE_S = 5.0
HOUR_MS = 3_600_000


def jump(store: StoreUnderTest, consumer: str, milliseconds: int) -> None:
    """What a jump of the server's clock does to claimed entries: their idle time is suddenly this long. Nothing else
    about them changes.
    """
    stream = f"{{rl:{store.run}}}:prompts"
    for entry in store.connection.ledger.xpending_range(stream, "rollout", "-", "+", 10):
        store.connection.ledger.xclaim(
            stream, "rollout", consumer, 0, [entry["message_id"]], idle=milliseconds, justid=True
        )


def test_a_clock_that_jumps_an_hour_ahead_and_back_expires_only_what_is_not_renewed(store: StoreUnderTest) -> None:
    store.admit(2)
    queue = store.attested("r.0")
    renewed, abandoned = queue.claim(2)
    now = 0.0
    leases = Leases(LEASE_S, lambda: now)
    for look in range(12):
        now = float(look)
        if look == 3:
            jump(store, "r.0", HOUR_MS)
        if look == 5:
            jump(store, "r.0", 0)
        time.sleep(0.03)  # what is not renewed grows older on the server's clock
        assert queue.renew([renewed]) == []
        expired = [entry.entry_id for entry in leases.expired(store.ledger.pending())]
        # The jump back looks like a renewal: it is good for one lease, by our clock, and no more.
        assert expired == ([abandoned.entry_id] if look > 5 + LEASE_S else [])
    store.ledger.reap([entry for entry in store.ledger.pending() if entry.entry_id == abandoned.entry_id])
    with pytest.raises(LeaseLostError):
        queue.commit(abandoned, store.stage(abandoned), {(0, DIGEST)})
    store.commit(queue, renewed)
    assert store.balance() == (2, 0, 0, 2)
