"""A reference of a chaos run as a process."""

import sys

from rolecall.rpc.fence import Fence
from rolecall.rpc.role_process import ServiceArgs
from rolecall.store.connection import Connection
from rolecall.training.serving.calls import ColumnCalls
from rolecall.training.serving.device_thread import DeviceThread
from rolecall.training.serving.serve import make_server, on_shift, serve_role
from rolecall.v1 import controller_pb2, reference_pb2_grpc
from services.reference import config
from services.reference.service import ReferenceServicer
from tests.chaos.roles.process import run_role
from tests.chaos.trainer import ChaosReference
from tests.chaos.wiring import Hook


async def serve(args: ServiceArgs, hook: Hook, connection: Connection, fence: Fence) -> None:
    """Serves until it is stopped."""
    settings, section = args.settings, config.section(args.settings, args.worker)
    async with on_shift(settings, "references" if section.offload else None):
        reference = ChaosReference(settings, connection, hook, args.worker)
    calls = ColumnCalls(reference, DeviceThread(), fence, section.token_budget)
    server = make_server(settings, section, f"references.{args.worker}")
    servicer = ReferenceServicer(reference, calls, args.worker, f"{args.worker}.{args.incarnation}")
    server.add(reference_pb2_grpc.add_ReferenceServiceServicer_to_server, servicer, "rolecall.v1.ReferenceService")
    await serve_role(args, section, settings.model.path, controller_pb2.ROLE_REFERENCE, server, calls)


if __name__ == "__main__":
    sys.exit(run_role("reference", "references", serve))
