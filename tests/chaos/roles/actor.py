"""The light actor as a process: services/actor/__main__.py with another engine, behind the driver's links."""

import asyncio
import sys

from rolecall import telemetry
from rolecall.rpc.fence import Fence
from rolecall.rpc.role_process import ServiceArgs, parse_args, run
from rolecall.store.connection import connect
from rolecall.store.sealed import read_ctl, read_sealed
from rolecall.training.serving.calls import TrainerCalls
from rolecall.training.serving.device_thread import DeviceThread
from rolecall.training.serving.serve import make_server, serve_role
from rolecall.v1 import actor_pb2_grpc, controller_pb2
from services.actor.service import ActorServicer
from tests.chaos.trainer import ChaosActor
from tests.chaos.wiring import hook_of, through_the_wire


def main() -> int:
    """Exit code of the process."""
    args = through_the_wire(parse_args("actor"), "actor")
    telemetry.configure(args.settings.telemetry, "actor", args.worker)
    return run(lambda: _serve(args), "actor")


async def _serve(args: ServiceArgs) -> None:
    settings, hook = args.settings, hook_of(args.settings, args.worker)
    hook.at("starting")
    connection = await asyncio.to_thread(connect, settings.store)
    engine, device_thread = ChaosActor(settings, connection, hook, args.incarnation), DeviceThread()
    fence = Fence(await asyncio.to_thread(read_ctl, connection, settings.run.name))
    consumer = f"{args.worker}.{args.incarnation}"
    calls = TrainerCalls(
        engine,
        lambda step: read_sealed(connection, settings.run.name, step),
        device_thread,
        fence,
        settings.actor.token_budget,
        consumer,
    )
    server = make_server(settings, settings.actor, "actor")
    server.add(
        actor_pb2_grpc.add_ActorServiceServicer_to_server, ActorServicer(engine, calls), "rolecall.v1.ActorService"
    )
    await serve_role(
        args, settings.actor, controller_pb2.ROLE_ACTOR, server, calls, on_drain=lambda: asyncio.to_thread(engine.close)
    )


if __name__ == "__main__":
    sys.exit(main())
