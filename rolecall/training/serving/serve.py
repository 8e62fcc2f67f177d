"""The life of a rank of a trainer or reference: load, then follow rank 0 or serve, join the controller, drain, stop.
Torch-free, the same for every role.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Protocol, TypeVar

from rolecall.data.images.tokens import image_processor_of
from rolecall.data.tokenizer import TOKENIZER, ChatTokenizer, read_ids_digest
from rolecall.errors import DeadlineError
from rolecall.rpc.membership import Membership
from rolecall.rpc.role_process import ServiceArgs, serve, stop_requested, way_out, way_to_stop
from rolecall.rpc.server import Server
from rolecall.settings import RunSettings, TrainerSection
from rolecall.shifts import Post, Side
from rolecall.telemetry import show_states
from rolecall.training.serving.calls import DRAIN_S, ColumnCalls
from rolecall.training.serving.device_thread import DeviceThread
from rolecall.training.serving.hooks import ProcessHooks
from rolecall.v1 import controller_pb2


class Follower(Protocol):
    """A role on a rank that does not serve."""

    def follow(self) -> bool:
        """Does what rank 0 commands, until it stops the group; returns whether the run is over."""


E = TypeVar("E")


async def load(
    args: ServiceArgs, device_thread: DeviceThread, build: Callable[[ProcessHooks], E], side: Side | None
) -> E:
    """Rank 0: builds the role in the device thread, once it is the shift of its `side`; None: it takes none.
    DeadlineError when the model is not loaded within controller.start_timeout_s.
    """
    timeout_s = args.settings.controller.start_timeout_s
    hooks = ProcessHooks(args.worker, device_thread.progressed, way_out(args.worker), stop=way_to_stop())
    try:
        async with on_shift(args.settings, side), asyncio.timeout(timeout_s):
            return await device_thread.run(lambda: build(hooks), "loading the model")
    except TimeoutError as error:
        waits = "; a rank that still waits for its shift says why in its log" if side is not None else ""
        raise DeadlineError(
            f"{args.worker} was still loading the model after controller.start_timeout_s = {timeout_s:g} s{waits}"
        ) from error


async def follow(args: ServiceArgs, build: Callable[[ProcessHooks], Follower], side: Side | None) -> None:
    """The other ranks: builds, as rank 0 does, and obeys it until it stops the group. They leave when rank 0 says so,
    whom a signal is passed on to, and at once when it is lost. Where it was stopped, so were they.
    """
    # of one thread: which GPU is the current one, and on which cores to stay, is known to the thread that builds
    loop, device_thread = asyncio.get_running_loop(), ThreadPoolExecutor(1, thread_name_prefix="device")
    async with on_shift(args.settings, side):
        stopping = stop_requested()  # a signal before ends the wait, and this process
        hooks = ProcessHooks(args.worker, lost=way_out(args.worker), is_stopping=stopping.is_set)
        role = await loop.run_in_executor(device_thread, build, hooks)
    if not await loop.run_in_executor(device_thread, role.follow):
        stopping.set()


@asynccontextmanager
async def on_shift(settings: RunSettings, side: Side | None) -> AsyncIterator[None]:
    """Entered in the shift of `side`, at once where it is None; while inside, it goes on."""
    if side is None:
        yield
        return
    post = Post(settings.run.dir, side)
    try:
        await post.wait_until_due()
        yield
    finally:
        post.close()


def make_server(settings: RunSettings, section: TrainerSection, name: str, *, max_age_s: float | None = None) -> Server:
    """A server where the section `name` says. max_age_s: as in Server."""
    bind = section.bind or section.address or "127.0.0.1:0"
    return Server(settings.rpc, bind, setting=f"{name}.bind", max_age_s=max_age_s)


async def serve_role(
    args: ServiceArgs,
    section: TrainerSection,
    path: Path,
    role: controller_pb2.Role.ValueType,
    server: Server,
    calls: ColumnCalls,
    on_drain: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Serves until asked to stop, or until the device thread or the membership fails; then raises what failed. `server`
    has its services already; `path` is the role's model directory.

    `on_drain` ends what would hold up the device thread, before the step under way is waited for.
    """
    calls.start()
    bound = await server.start()
    membership = Membership(
        args.settings,
        role,
        args.worker,
        args.incarnation,
        section.address or bound,
        image_processor=image_processor_of(args.settings, path),
        tokenizer=await asyncio.to_thread(_tokenizer_of, args.settings, path, role),
    )
    calls.device_thread.show_to(membership)
    show_states(calls.device_thread.states)
    membership.phase = "idle"
    membership.start()
    await server.set_serving(True)
    failed = _first(calls.device_thread.failed, membership.failed)

    async def drain() -> None:
        if on_drain is not None:
            await on_drain()  # bounded: by serve, which gives a drain its grace
        await calls.drain()

    over: bool | None = None
    try:
        await serve(server, drain=drain, failed=failed, grace_s=DRAIN_S)
        over = not stop_requested().is_set()
        await membership.leave()
    finally:
        membership.stop()
        await calls.close(over)


def _tokenizer_of(settings: RunSettings, path: Path, role: controller_pb2.Role.ValueType) -> str:
    """The digest that the role says of its tokenizer as it joins; empty where its directory has none."""
    if role == controller_pb2.ROLE_ACTOR and (path / TOKENIZER).is_file():
        return ChatTokenizer.of(settings.model, renders=False).digest
    return read_ids_digest(path)


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
