"""The critic of a chaos run as a process."""

import sys

from rolecall.rpc.fence import Fence
from rolecall.rpc.role_process import ServiceArgs
from rolecall.store.connection import Connection
from rolecall.training.serving.serve import make_server, on_shift, serve_role
from rolecall.v1 import controller_pb2, critic_pb2_grpc
from services.critic import config
from services.critic.service import CriticServicer
from tests.chaos.roles.process import run_role
from tests.chaos.trainer import ChaosCritic
from tests.chaos.wiring import Hook
from tests.twins.calls import trainer_calls


async def serve(args: ServiceArgs, hook: Hook, connection: Connection, fence: Fence) -> None:
    """Serves until it is stopped."""
    settings, section, consumer = args.settings, config.section(args.settings), f"{args.worker}.{args.incarnation}"
    async with on_shift(settings, "trainers" if settings.takes_shifts else None):
        critic = ChaosCritic(settings, connection, hook, args.incarnation)
    run = settings.run
    calls = trainer_calls(critic, connection, run.name, fence, run.checkpoints, section.token_budget, consumer)
    server = make_server(settings, section, "critic")
    server.add(critic_pb2_grpc.add_CriticServiceServicer_to_server, CriticServicer(calls), "rolecall.v1.CriticService")
    await serve_role(args, section, settings.model.path, controller_pb2.ROLE_CRITIC, server, calls)


if __name__ == "__main__":
    sys.exit(run_role("critic", "critic", serve))
