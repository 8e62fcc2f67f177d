"""Starts a reference: `rolecall serve reference --config run.yaml --name ref`; with num_ranks > 1, under torchrun."""

import asyncio
import sys
from collections.abc import Sequence

from rolecall import telemetry
from rolecall.rpc.process import ServiceArgs, parse_args, run, stop_requested
from rolecall.settings import rank_of_process


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code of the process."""
    args = parse_args("reference", argv)
    telemetry.configure(args.settings.telemetry, "reference", args.worker)
    return run(lambda: _serve(args), "reference")


async def _serve(args: ServiceArgs) -> None:
    from rolecall.store.connection import connect
    from rolecall.store.sealed import read_ctl
    from rolecall.training.fence import Fence
    from rolecall.training.front import ColumnFront
    from rolecall.training.host import host, make_server
    from rolecall.training.lane import Lane
    from rolecall.v1 import controller_pb2, reference_pb2_grpc
    from services.reference import config
    from services.reference.engine import build
    from services.reference.service import ReferenceServicer

    settings, section = args.settings, config.section(args.settings, args.worker)
    connection = await asyncio.to_thread(connect, settings.store)
    if rank_of_process()[0] > 0:
        stop_requested()  # a follower leaves when rank 0 says so, not at a signal
        await asyncio.to_thread(lambda: build(settings, args.worker, connection).follow())
        return
    lane = Lane()
    engine = await lane.run(lambda: build(settings, args.worker, connection), "loading the model")
    fence = Fence(await asyncio.to_thread(read_ctl, connection, settings.run.name))
    front = ColumnFront(engine, lane, fence, section.token_budget)
    server = make_server(settings, section)
    servicer = ReferenceServicer(engine, front, args.worker, f"{args.worker}.{args.incarnation}")
    server.add(reference_pb2_grpc.add_ReferenceServiceServicer_to_server, servicer, "rolecall.v1.ReferenceService")
    await host(args, section, controller_pb2.ROLE_REFERENCE, server, front)


if __name__ == "__main__":
    sys.exit(main())
