"""A rollout replica as a process: settings, environment, engine, serve, drain."""

import asyncio
import atexit
import contextlib
import logging
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rolecall import telemetry
from rolecall.data.images.tokens import image_processor_of
from rolecall.data.model.files import check_tokenizer
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.rpc.fence import Fence
from rolecall.rpc.listening import advertised
from rolecall.rpc.membership import Membership
from rolecall.rpc.role_process import ServiceArgs, importing, parse_args, run, serve, tie_to_parent
from rolecall.rpc.server import Server
from rolecall.settings import EnvironmentSection, RunSettings, parent_to_die_with, tied_to_this_process
from rolecall.shifts import Post
from rolecall.store.connection import connect
from rolecall.store.prompts import PromptQueue
from rolecall.store.rows import Rows
from rolecall.store.sealed import read_ctl
from rolecall.v1 import controller_pb2, rollout_pb2_grpc
from services.rollout.activity import feed_heartbeat
from services.rollout.config import RolloutConfig, configure, keep_timeout_s, machine_cores, start_environment
from services.rollout.episodes import sampler_of
from services.rollout.pull import PullLoop, PullSettings
from services.rollout.replica import Replica
from services.rollout.service import SERVICE_NAME, RolloutServicer
from services.rollout.vllm.leftovers import Leftovers
from services.rollout.vllm.profiles import EngineProfiles

if TYPE_CHECKING:
    from services.rollout.engine import VllmEngine
    from services.rollout.turns.tool_calls import ToolCalls

DRAIN_S = 3.0
"""Seconds that groups in hand get to finish when the process is asked to stop; the rest go back to the stream."""
GRACE_S = 5.0
"""Seconds of the whole drain, and then of the calls under way."""


def _leave_out_known_noise() -> None:
    """Keeps out of this process's log what is so on every machine without a GPU, and nothing to act on: torch finds no
    Triton, and vLLM uses names of torch.distributed that will go.
    """
    logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)


# a process that vLLM spawns, before it does anything else: it may not outlive the one that spawned it, however that
# ends
if __name__ == "__mp_main__":
    tie_to_parent()
    os.environ.update(tied_to_this_process())
    _leave_out_known_noise()


async def _main(args: ServiceArgs) -> None:
    settings, consumer = args.settings, f"{args.worker}.{args.incarnation}"
    telemetry.configure(settings.telemetry, "rollout", args.worker, run=settings.run.name, rpc=settings.rpc)
    config = configure(settings, args.worker, machine_cores())
    tokenizer = ChatTokenizer.of(settings.model)
    check_tokenizer(config.model_path, tokenizer.num_ids)
    connection = await asyncio.to_thread(connect, settings.store, verify=False)
    fence = Fence(lambda: read_ctl(connection, settings.run.name))
    launched = parent_to_die_with() is not None  # before this process says what its own children shall read
    post = await on_shift(settings)
    leftovers = Leftovers(settings.run.dir, args.worker)
    # on GPUs vLLM spawns, and what tells numbers elsewhere has threads that would go on in a fork
    tells_numbers = settings.telemetry.otlp_endpoint is not None or settings.telemetry.metrics_bind is not None
    engine = await _start_engine(config, leftovers, forks=not config.devices and not tells_numbers)
    server = Server(settings.rpc, settings.rollout.bind, setting="rollout.bind")
    replica = _replica(settings, engine, server, post)
    telemetry.show_states(replica.states)
    sampler = sampler_of(settings, replica, tokenizer, _tool_calls(settings.environments, tokenizer))
    pull = PullLoop(
        _pull_settings(args, config, consumer),
        replica,
        sampler,
        PromptQueue(connection, settings.run.name, consumer),
        Rows(connection, settings.run.name, settings.store.num_shards),
        tokenizer,
        lambda phase: _note(membership, phase),
    )
    profiles = EngineProfiles(engine, replica.held, settings.run.dir / "profiles", args.worker)
    servicer = RolloutServicer(
        replica,
        pull,
        sampler,
        tokenizer,
        fence,
        profiles,
        consumer=consumer,
        max_groups=config.max_groups,
        generation_timeout_s=settings.rollout.generation_timeout_s,
    )
    server.add(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, servicer, SERVICE_NAME)
    address = advertised(await server.start(), settings.rollout.advertise_host, settings.controller.address)
    membership = _membership(args, config, engine, tokenizer, address, launched=launched)
    try:
        await _serve(server, replica, pull, profiles, engine, membership)
    finally:
        await sampler.close()
        await engine.close()
        leftovers.remove()
        connection.close()


async def _serve(
    server: Server,
    replica: Replica,
    pull: PullLoop,
    profiles: EngineProfiles,
    engine: "VllmEngine",
    membership: Membership,
) -> None:
    """Begins the membership and serves until the role is over or a part of it fails, and drains. Ends the membership,
    whatever ends it.
    """

    async def drain() -> None:
        profiles.end()
        await replica.stop_taking()
        await pull.drain(DRAIN_S)

    membership.start()
    parts = [asyncio.create_task(part) for part in (pull.run(), engine.watch(), feed_heartbeat(replica, membership))]
    failed = asyncio.ensure_future(_first_failure(membership.failed, *parts))
    try:
        await serve(server, drain=drain, failed=failed, grace_s=GRACE_S)
        await membership.leave()
    finally:
        for task in (failed, *parts):
            task.cancel()
        # bounded: they are cancelled. A watch that went on would miss the engine that is closed next
        await asyncio.gather(failed, *parts, return_exceptions=True)
        membership.stop()


async def on_shift(settings: RunSettings) -> Post | None:
    """Returns once the rollouts may be on the device that they share, the post that says so; None where they share
    none.
    """
    if not settings.takes_shifts:
        return None
    post = Post(settings.run.dir, "rollouts")
    await post.wait_until_due()
    return post


async def _start_engine(config: RolloutConfig, leftovers: Leftovers, *, forks: bool) -> "VllmEngine":
    """Starts vLLM in its environment and warms it up."""
    leftovers.begin()
    sockets = {"VLLM_RPC_BASE_PATH": str(leftovers.folder)}
    os.environ.update({**start_environment(config), **sockets, **tied_to_this_process()})
    _leave_out_known_noise()
    with _ending_at_once():
        with importing():
            from services.rollout.engine import VllmEngine

        engine = VllmEngine(config, forks=forks)
        leftovers.note(await engine.shared_memory())
        await engine.warm_up()
    return engine


def _replica(settings: RunSettings, engine: "VllmEngine", server: Server, post: Post | None) -> Replica:
    return Replica(
        engine,
        pause_timeout_s=settings.rollout.generation_timeout_s,
        load_timeout_s=settings.weights.publish_timeout_s,
        keep_timeout_s=keep_timeout_s(settings.weights),
        on_serving=server.set_serving,
        post=post,
    )


def _tool_calls(environments: Mapping[str, EnvironmentSection], tokenizer: ChatTokenizer) -> "dict[str, ToolCalls]":
    """The readers of the policy's calls of tools, by environments that name a parser."""
    parsers = {name: section.tool_parser for name, section in environments.items() if section.tool_parser is not None}
    if not parsers:
        return {}
    from services.rollout.turns.vllm_parsers import tool_calls_of

    return {name: tool_calls_of(parser, tokenizer) for name, parser in parsers.items()}


def _pull_settings(args: ServiceArgs, config: RolloutConfig, consumer: str) -> PullSettings:
    settings = args.settings
    return PullSettings(
        consumer=consumer,
        max_groups=config.max_groups,
        lease_s=settings.controller.lease_s,
        generation_timeout_s=settings.rollout.generation_timeout_s,
        row_expiry_s=settings.store.row_expiry_s,
        max_deliveries=settings.controller.max_deliveries,
        shows_images=settings.shows_images,
    )


def _membership(
    args: ServiceArgs,
    config: RolloutConfig,
    engine: "VllmEngine",
    tokenizer: ChatTokenizer,
    address: str,
    *,
    launched: bool,
) -> Membership:
    return Membership(
        args.settings,
        controller_pb2.ROLE_ROLLOUT,
        args.worker,
        args.incarnation,
        address,
        engine.info.num_weight_ranks,
        on_gpus=bool(config.devices),
        image_processor=image_processor_of(args.settings, config.model_path),
        tokenizer=tokenizer.digest,
        launched=launched,
    )


def _note(membership: Membership, phase: str) -> None:
    membership.phase = phase


async def _first_failure(over: "asyncio.Future[None]", *parts: "asyncio.Future[None]") -> None:
    """Raises what the first failing part raised; a part that ends well (the pull loop, drained) does not end the
    role, `over` does.
    """
    pending: set[asyncio.Future[None]] = {over, *parts}
    while not over.done():
        # bounded: by nothing, on purpose: the role's whole life, until a part fails
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for part in done:
            part.result()


@contextlib.contextmanager
def _ending_at_once() -> Iterator[None]:
    """Ends the process on the spot at a signal while vLLM starts, which blocks the event loop for tens of seconds:
    nothing is held yet.
    """

    def end(number: int, frame: Any) -> None:
        os._exit(0)

    previous = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def main(argv: list[str] | None = None) -> int:
    """Runs the role and returns the exit code."""
    args = parse_args("rollout", argv)
    outcome: list[int] = []
    atexit.register(_leave, outcome)  # first come, last served: the telemetry that follows is flushed before it
    outcome.append(run(lambda: _main(args), "rollout"))
    return outcome[0]


def _leave(outcome: list[int]) -> None:
    """Ends the process without the interpreter's last search for garbage: with torch and vLLM loaded it takes seconds,
    to free what the kernel frees.
    """
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(outcome[0] if outcome else 1)


if __name__ == "__main__":
    # so that multiprocessing knows this file by its path: by its name it would leave a `__main__` out of the processes
    # that it spawns
    __spec__ = None
    sys.exit(main())
