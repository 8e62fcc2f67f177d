"""`rolecall serve controller`: settings, telemetry, the run, serve, drain. No torch."""

import asyncio
import gc
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rolecall.errors import ConfigError
from rolecall.rpc.role_process import ServiceArgs, parse_args, run

if TYPE_CHECKING:
    from services.controller.run import ControllerRun

GIVE_BACK_S = 10.0
"""Most seconds in which a controller that is stopped gives the run back in the store, so that the next one waits for no
lease.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the run to its end, or until asked to stop; returns the exit code."""
    args = parse_args("controller", argv)
    return run(lambda: serve_controller(args), "controller", has_end=True)


async def serve_controller(args: ServiceArgs) -> None:
    """Answers workers and people while the loop runs; ends with it."""
    from rolecall import telemetry  # gRPC and its friends after the configuration has been checked
    from rolecall.rpc.role_process import serve
    from rolecall.rpc.server import Server
    from rolecall.v1 import controller_pb2, controller_pb2_grpc
    from services.controller.run import ControllerRun
    from services.controller.service import ControllerServicer

    settings = args.settings
    bind = settings.controller.bind or settings.controller.address
    if bind is None:
        raise ConfigError(
            "controller.address is not set; a controller that runs alone needs --controller.address HOST:PORT"
        )
    telemetry.configure(settings.telemetry, "controller", args.worker, run=settings.run.name, rpc=settings.rpc)
    settings.run.dir.mkdir(parents=True, exist_ok=True)
    controller = ControllerRun(settings)
    telemetry.show_states(controller.states)
    try:
        server = Server(settings.rpc, bind, setting="controller.bind")
        service_name = controller_pb2.DESCRIPTOR.services_by_name["ControllerService"].full_name
        server.add(
            controller_pb2_grpc.add_ControllerServiceServicer_to_server, ControllerServicer(controller), service_name
        )
        await server.start()
        await server.set_serving(True)
        running = asyncio.ensure_future(_run(controller))

        async def give_back() -> None:
            running.cancel()
            await asyncio.wait([running], timeout=GIVE_BACK_S)

        try:
            # while heartbeats are still heard: who is not would be given up
            await serve(server, drain=give_back, failed=running)
        finally:
            await give_back()
    finally:
        await controller.close()


async def _run(controller: "ControllerRun") -> None:
    """Runs the run to its end, and stays until the workers know."""
    gc.disable()  # a look through millions of prompts stops everything for seconds, and finds nothing
    try:
        await controller.run(_keep_what_is_there)
    finally:
        await controller.told_the_end()


def _keep_what_is_there() -> None:
    gc.freeze()  # a collection need not look again at the modules and the data set, which stay
    gc.enable()


if __name__ == "__main__":
    sys.exit(main())
