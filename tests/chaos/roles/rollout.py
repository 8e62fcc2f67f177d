"""A rollout of a chaos run as a process."""

import asyncio
import sys

from rolecall.rpc.fence import Fence
from rolecall.rpc.listening import advertised
from rolecall.rpc.membership import Membership
from rolecall.rpc.role_process import ServiceArgs, serve
from rolecall.store.connection import Connection
from rolecall.telemetry import show_states
from rolecall.v1 import controller_pb2
from services.rollout.__main__ import on_shift
from services.rollout.activity import feed_heartbeat
from tests.chaos.engine import ChaosEngine
from tests.chaos.roles.process import run_role
from tests.chaos.wiring import Hook, wire_of
from tests.twins.device import device_of
from tests.twins.rollout import NumberTokenizer, RolloutTwin, first_failure


async def serve_rollout(args: ServiceArgs, hook: Hook, connection: Connection, fence: Fence) -> None:
    """Serves until it is stopped."""
    settings, wire, consumer = args.settings, wire_of(args.settings), f"{args.worker}.{args.incarnation}"
    post = await on_shift(settings)
    device, longest = device_of(settings, args.worker), settings.data.max_prompt_tokens + settings.sampling.max_tokens
    engine = ChaosEngine(hook, longest, device)
    bind = f"unix:{wire / args.worker}.real" if wire.is_dir() else settings.rollout.bind
    twin = RolloutTwin.of_run(settings, consumer, engine, NumberTokenizer(), connection, bind, fence, post)
    show_states(twin.replica.states)
    bound = await twin.start()
    reachable = advertised(bound, settings.rollout.advertise_host, settings.controller.address)
    address = f"unix:{wire / args.worker}.link" if wire.is_dir() else reachable
    membership = Membership(
        settings, controller_pb2.ROLE_ROLLOUT, args.worker, args.incarnation, address, engine.info.num_weight_ranks
    )
    twin.on_turn = lambda phase: setattr(membership, "phase", phase)
    membership.start()

    async def drain() -> None:
        await twin.replica.stop_taking()
        await twin.pull.drain(1.0)

    beating = asyncio.create_task(feed_heartbeat(twin.replica, membership))
    failed = asyncio.ensure_future(first_failure(membership.failed, twin.pulling, beating))
    try:
        await serve(twin.server, drain=drain, failed=failed, grace_s=3.0)
        await membership.leave()
    finally:
        failed.cancel()
        membership.stop()
        connection.close()


if __name__ == "__main__":
    sys.exit(run_role("rollout", "", serve_rollout))
