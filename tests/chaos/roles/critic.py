"""The light critic as a process: services/critic/__main__.py with another engine, behind the driver's links."""

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
from rolecall.v1 import controller_pb2, critic_pb2_grpc
from services.critic import config
from services.critic.service import CriticServicer
from tests.chaos.trainer import ChaosCritic
from tests.chaos.wiring import hook_of, through_the_wire


def main() -> int:
    """Exit code of the process."""
    args = through_the_wire(parse_args("critic"), "critic")
    telemetry.configure(args.settings.telemetry, "critic", args.worker)
    return run(lambda: _serve(args), "critic")


async def _serve(args: ServiceArgs) -> None:
    settings, section, hook = args.settings, config.section(args.settings), hook_of(args.settings, args.worker)
    hook.at("starting")
    connection = await asyncio.to_thread(connect, settings.store)
    engine, device_thread = ChaosCritic(settings, connection, hook, args.incarnation), DeviceThread()
    fence = Fence(await asyncio.to_thread(read_ctl, connection, settings.run.name))
    consumer = f"{args.worker}.{args.incarnation}"
    calls = TrainerCalls(
        engine,
        lambda step: read_sealed(connection, settings.run.name, step),
        device_thread,
        fence,
        section.token_budget,
        consumer,
    )
    server = make_server(settings, section, "critic")
    server.add(critic_pb2_grpc.add_CriticServiceServicer_to_server, CriticServicer(calls), "rolecall.v1.CriticService")
    await serve_role(args, section, controller_pb2.ROLE_CRITIC, server, calls)


if __name__ == "__main__":
    sys.exit(main())
