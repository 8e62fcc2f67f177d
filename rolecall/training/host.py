"""The life of rank 0 of a trainer or reference, once its engine is built: serve, join the controller, drain, stop. Torch-free, the same for every role."""

import asyncio
from collections.abc import Awaitable, Callable

from rolecall.rpc.membership import Membership
from rolecall.rpc.process import ServiceArgs, serve
from rolecall.rpc.server import Server
from rolecall.settings import RunSettings, TrainerSection
from rolecall.training.front import DRAIN_S, ColumnFront
from rolecall.v1 import controller_pb2


def make_server(settings: RunSettings, section: TrainerSection) -> Server:
    """A server where the section says."""
    return Server(settings.rpc, section.bind or section.address or "127.0.0.1:0")


async def host(
    args: ServiceArgs,
    section: TrainerSection,
    role: controller_pb2.Role.ValueType,
    server: Server,
    front: ColumnFront,
    on_drain: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Serves until asked to stop, or until the device thread or the membership fails; then raises what failed. `server` has its services already.

    `on_drain` ends what would hold up the lane, before the step under way is waited for.
    """
    front.start()
    bound = await server.start()
    membership = Membership(args.settings, role, args.worker, args.incarnation, section.address or bound)
    front.lane.show_to(membership)
    membership.phase = "idle"
    membership.start()
    await server.set_serving(True)
    failed = _first(front.lane.failed, membership.failed)

    async def drain() -> None:
        if on_drain is not None:
            await on_drain()
        await front.drain()

    try:
        await serve(server, drain=drain, failed=failed, grace_s=DRAIN_S)
    finally:
        membership.stop()
        await front.close()


def _first(*futures: "asyncio.Future[None]") -> "asyncio.Future[None]":
    """Done as soon as one of `futures` is, with its result or exception."""
    first: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def done(future: "asyncio.Future[None]") -> None:
        if first.done() or future.cancelled():
            return
        error = future.exception()
        if error is None:
            first.set_result(None)
        else:
            first.set_exception(error)

    for future in futures:
        future.add_done_callback(done)
    return first
