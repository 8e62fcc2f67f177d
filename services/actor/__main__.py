"""Starts the actor: `rolecall serve actor run.yaml`; with num_ranks > 1, under torchrun."""

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
    args = parse_args("actor", argv)
    return run(lambda: _serve(args), "actor", has_end=True)


async def _serve(args: ServiceArgs) -> None:
    settings = args.settings
    telemetry.configure(settings.telemetry, "actor", args.worker, run=settings.run.name, rpc=settings.rpc)
    with importing():
        from rolecall.rpc.fence import Fence
        from rolecall.store.connection import connect
        from rolecall.store.sealed import read_ctl, read_sealed
        from rolecall.training.serving.calls import TrainerCalls
        from rolecall.training.serving.device_thread import DeviceThread
        from rolecall.training.serving.serve import follow, load, make_server, serve_role
        from rolecall.v1 import actor_pb2_grpc, controller_pb2
        from services.actor.ranks import build
        from services.actor.service import ActorServicer

    section = settings.actor
    connection = await asyncio.to_thread(connect, settings.store, verify=False)
    side: Side | None = "trainers" if settings.takes_shifts else None
    building = partial(build, settings, connection)
    if rank_of_process()[0] > 0:
        await follow(args, building, side)
        return
    device_thread = DeviceThread()
    trainer = await load(args, device_thread, building, side)
    fence = Fence(lambda: read_ctl(connection, settings.run.name))
    consumer = f"{args.worker}.{args.incarnation}"
    calls = TrainerCalls(
        trainer,
        lambda step: read_sealed(connection, settings.run.name, step),
        device_thread,
        fence,
        section.token_budget,
        consumer,
        settings.run.checkpoints,
        settings.actor.train_timeout_s,
    )
    server = make_server(settings, section, "actor")
    server.add(
        actor_pb2_grpc.add_ActorServiceServicer_to_server, ActorServicer(trainer, calls), "rolecall.v1.ActorService"
    )
    await serve_role(
        args,
        section,
        settings.model.path,
        controller_pb2.ROLE_ACTOR,
        server,
        calls,
        on_drain=lambda: asyncio.to_thread(trainer.close),
    )


if __name__ == "__main__":
    sys.exit(main())
