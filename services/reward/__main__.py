"""`rolecall serve reward`: settings, telemetry, dispatcher, serve, drain. No torch."""

import asyncio
import logging
import sys
from collections.abc import Sequence

from rolecall.rpc.role_process import ServiceArgs, parse_args, run

logger = logging.getLogger(__name__)

SERVING = "serving"
"""What it says it is doing while every component gives scores."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the service until it is asked to stop; returns the exit code."""
    args = parse_args("reward", argv)
    return run(lambda: serve_reward(args), "reward")


async def serve_reward(args: ServiceArgs) -> None:
    """Serves rewards until the process is asked to stop. Health is SERVING once every component but shadows
    can score.
    """
    from rolecall import telemetry  # gRPC and its friends after the configuration has been checked
    from rolecall.rpc.membership import Membership
    from rolecall.rpc.options import MAX_GROUP_BYTES, MAX_MESSAGE_BYTES, REPLICA_AGE_S
    from rolecall.rpc.role_process import serve
    from rolecall.rpc.server import Server
    from rolecall.v1 import controller_pb2, reward_pb2_grpc
    from services.reward.config import reward_settings
    from services.reward.dispatcher import Dispatcher
    from services.reward.service import SERVICE_NAME, RewardServicer

    settings = args.settings
    telemetry.configure(settings.telemetry, "reward", args.worker, run=settings.run.name, rpc=settings.rpc)
    reward = reward_settings(settings)
    dispatcher = Dispatcher(reward, settings.rpc)
    telemetry.show_states(dispatcher.states)
    server = Server(
        settings.rpc,
        reward.bind,
        setting="reward.bind",
        max_age_s=REPLICA_AGE_S,
        max_message_bytes=MAX_GROUP_BYTES if reward.takes_large else MAX_MESSAGE_BYTES,
    )
    membership: Membership | None = None

    def on_score() -> None:
        if membership is not None:
            membership.progress()

    async def tell(joined: Membership) -> None:
        while True:  # also while no call is answered
            joined.phase = dispatcher.trouble or SERVING
            await asyncio.sleep(settings.controller.heartbeat_s)

    telling: asyncio.Task[None] | None = None
    server.add(reward_pb2_grpc.add_RewardServiceServicer_to_server, RewardServicer(dispatcher, on_score), SERVICE_NAME)
    try:
        address = await server.start()
        await dispatcher.start(awaits_shadows=False)
        failed: asyncio.Future[None] | None = None
        if settings.controller.address is not None:
            membership = Membership(
                settings, controller_pb2.ROLE_REWARD, args.worker, args.incarnation, settings.reward.address or address
            )
            membership.start()
            telling = asyncio.create_task(tell(membership))
            failed = membership.failed
        await server.set_serving(True)
        logger.info("reward serves %s on %s", ", ".join(reward.components), address)
        await serve(server, failed=failed)
        if membership is not None:
            await membership.leave()
    finally:
        if telling is not None:
            telling.cancel()
        if membership is not None:
            membership.stop()
        await server.drain(0.0)  # nothing is left to drain after `serve`; a failed start has not been there
        await dispatcher.close()


if __name__ == "__main__":
    sys.exit(main())
