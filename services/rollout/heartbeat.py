"""What a replica's heartbeats say of it: whether its engine owes something, and whether it moves.

Not whether the pull loop turns: that says nothing of an engine. Decides nothing: the controller judges
(services/controller/fleet/liveness.py).
"""

import asyncio
from typing import Protocol

from services.rollout.replica import Replica

LOOK_S = 0.25
"""Seconds between two looks at the replica."""


class Pulse(Protocol):
    """Where it is shown: the membership."""

    busy: bool
    """Whether `progress` must be called now and then."""

    def progress(self) -> None:
        """Says that something moved."""


async def feed_heartbeat(replica: Replica, pulse: Pulse) -> None:
    """Runs until cancelled."""
    seen = -1
    while True:
        if replica.num_moves != seen:
            seen = replica.num_moves
            pulse.progress()
        pulse.busy = replica.is_busy
        await asyncio.sleep(LOOK_S)
