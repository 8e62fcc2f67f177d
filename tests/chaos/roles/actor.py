"""The actor of a chaos run as a process."""

import asyncio
import sys

from rolecall.rpc.fence import Fence
from rolecall.rpc.role_process import ServiceArgs
from rolecall.store.connection import Connection
from rolecall.training.serving.serve import make_server, on_shift, serve_role
from rolecall.v1 import actor_pb2_grpc, controller_pb2
from services.actor.service import ActorServicer
from tests.chaos.roles.process import run_role
from tests.chaos.trainer import ChaosActor
from tests.chaos.wiring import Hook
from tests.twins.calls import trainer_calls


async def serve(args: ServiceArgs, hook: Hook, connection: Connection, fence: Fence) -> None:
    """Serves until it is stopped."""
    settings, section, consumer = args.settings, args.settings.actor, f"{args.worker}.{args.incarnation}"
    async with on_shift(settings, "trainers" if settings.takes_shifts else None):
        actor = ChaosActor(settings, connection, hook, args.incarnation)
    run = settings.run
    calls = trainer_calls(actor, connection, run.name, fence, run.checkpoints, section.token_budget, consumer)
    server = make_server(settings, section, "actor")
    servicer = ActorServicer(actor, calls)
    server.add(actor_pb2_grpc.add_ActorServiceServicer_to_server, servicer, "rolecall.v1.ActorService")
    await serve_role(
        args,
        section,
        settings.model.path,
        controller_pb2.ROLE_ACTOR,
        server,
        calls,
        lambda: asyncio.to_thread(actor.close),
    )


if __name__ == "__main__":
    sys.exit(run_role("actor", "actor", serve))
