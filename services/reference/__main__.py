"""Starts a reference: `rolecall serve reference run.yaml --name ref` (or ref/0, ref/1: replicas); with num_ranks > 1,
under torchrun.
"""

import asyncio
import sys
from collections.abc import Sequence
from functools import partial

from rolecall import telemetry
from rolecall.rpc.role_process import ServiceArgs, importing, parse_args, run
from rolecall.settings import rank_of_process
from rolecall.shifts import Side


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the process."""
    args = parse_args("reference", argv)
    return run(lambda: _serve(args), "reference", has_end=True)


async def _serve(args: ServiceArgs) -> None:
    settings = args.settings
    telemetry.configure(settings.telemetry, "reference", args.worker, run=settings.run.name, rpc=settings.rpc)
    with importing():
        from rolecall.rpc.fence import Fence
        from rolecall.rpc.options import REPLICA_AGE_S
        from rolecall.store.connection import connect
        from rolecall.store.sealed import read_ctl
        from rolecall.training.serving.calls import ColumnCalls
        from rolecall.training.serving.device_thread import DeviceThread
        from rolecall.training.serving.serve import follow, load, make_server, serve_role
        from rolecall.v1 import controller_pb2, reference_pb2_grpc
        from services.reference import config
        from services.reference.ranks import build
        from services.reference.service import ReferenceServicer

    instance = config.instance_of(args.worker)
    section = config.section(settings, instance)
    side: Side | None = "references" if section.offload else None
    connection = await asyncio.to_thread(connect, settings.store, verify=False)
    building = partial(build, settings, instance, connection)
    if rank_of_process()[0] > 0:
        await follow(args, building, side)
        return
    device_thread = DeviceThread()
    role = await load(args, device_thread, building, side)
    fence = Fence(lambda: read_ctl(connection, settings.run.name))
    calls = ColumnCalls(role, device_thread, fence, section.token_budget)
    server = make_server(settings, section, f"references.{args.worker}", max_age_s=REPLICA_AGE_S)
    servicer = ReferenceServicer(role, calls, instance, f"{args.worker}.{args.incarnation}")
    server.add(reference_pb2_grpc.add_ReferenceServiceServicer_to_server, servicer, "rolecall.v1.ReferenceService")
    path = config.model_path(settings, instance)
    await serve_role(args, section, path, controller_pb2.ROLE_REFERENCE, server, calls)


if __name__ == "__main__":
    sys.exit(main())
