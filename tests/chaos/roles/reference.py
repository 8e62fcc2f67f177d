"""The light reference as a process: services/reference/__main__.py with another engine, behind the driver's links."""

import asyncio
import sys

from rolecall import telemetry
from rolecall.rpc.fence import Fence
from rolecall.rpc.role_process import ServiceArgs, parse_args, run
from rolecall.store.connection import connect
from rolecall.store.sealed import read_ctl
from rolecall.training.serving.calls import ColumnCalls
from rolecall.training.serving.device_thread import DeviceThread
from rolecall.training.serving.serve import make_server, serve_role
from rolecall.v1 import controller_pb2, reference_pb2_grpc
from services.reference import config
from services.reference.service import ReferenceServicer
from tests.chaos.trainer import ChaosReference
from tests.chaos.wiring import hook_of, through_the_wire


def main() -> int:
    """Exit code of the process."""
    args = through_the_wire(parse_args("reference"), "references")
    telemetry.configure(args.settings.telemetry, "reference", args.worker)
    return run(lambda: _serve(args), "reference")


async def _serve(args: ServiceArgs) -> None:
    settings, section, hook = (
        args.settings,
        config.section(args.settings, args.worker),
        hook_of(args.settings, args.worker),
    )
    hook.at("starting")
    connection = await asyncio.to_thread(connect, settings.store)
    engine, device_thread = ChaosReference(settings, connection, hook, args.worker), DeviceThread()
    fence = Fence(await asyncio.to_thread(read_ctl, connection, settings.run.name))
    calls = ColumnCalls(engine, device_thread, fence, section.token_budget)
    server = make_server(settings, section, f"references.{args.worker}")
    servicer = ReferenceServicer(engine, calls, args.worker, f"{args.worker}.{args.incarnation}")
    server.add(reference_pb2_grpc.add_ReferenceServiceServicer_to_server, servicer, "rolecall.v1.ReferenceService")
    await serve_role(args, section, controller_pb2.ROLE_REFERENCE, server, calls)


if __name__ == "__main__":
    sys.exit(main())
