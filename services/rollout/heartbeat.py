"""The feed of a replica's heartbeat: whether its engine owes something, and whether it moves.

Whether the pull loop turns is not said: that tells nothing of an engine. Decides nothing: the controller judges
(services/controller/fleet/liveness.py).
"""

import asyncio

from rolecall.rpc.membership import Pulse
from services.rollout.replica import Replica

LOOK_S = 0.25
"""Seconds between two looks at the replica."""


async def feed_heartbeat(replica: Replica, pulse: Pulse) -> None:
    """Shows `replica` to `pulse` every LOOK_S, until cancelled."""
    seen = -1
    while True:
        if replica.num_moves != seen:
            seen = replica.num_moves
            pulse.progress()
        pulse.busy = replica.is_busy
        await asyncio.sleep(LOOK_S)
