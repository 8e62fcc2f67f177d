"""The light rollout as a process: services/rollout/__main__.py with another engine, behind the driver's links."""

import asyncio
import sys

from rolecall import telemetry
from rolecall.rpc.fence import Fence
from rolecall.rpc.membership import Membership
from rolecall.rpc.role_process import ServiceArgs, parse_args, run, serve
from rolecall.rpc.server import Server
from rolecall.store.connection import connect
from rolecall.store.prompts import PromptQueue
from rolecall.store.rows import Rows
from rolecall.store.sealed import read_ctl
from rolecall.v1 import controller_pb2, rollout_pb2_grpc
from services.rollout.heartbeat import feed_heartbeat
from services.rollout.pull import PullLoop, PullSettings
from services.rollout.replica import Replica
from services.rollout.service import SERVICE_NAME, RolloutServicer
from tests.chaos.light_rollout import LightEngine, LightTokenizer
from tests.chaos.wiring import hook_of, through_the_wire, wire_of


def main() -> int:
    """Exit code of the process."""
    args = through_the_wire(parse_args("rollout"))
    telemetry.configure(args.settings.telemetry, "rollout", args.worker)
    return run(lambda: _serve(args), "rollout")


async def _serve(args: ServiceArgs) -> None:
    settings, hook, consumer = args.settings, hook_of(args.settings, args.worker), f"{args.worker}.{args.incarnation}"
    hook.at("starting")
    section, wire = settings.rollout, wire_of(settings)
    connection = await asyncio.to_thread(connect, settings.store)
    fence = Fence(await asyncio.to_thread(read_ctl, connection, settings.run.name))
    tokenizer = LightTokenizer()
    engine = LightEngine(hook, settings.data.max_prompt_tokens + settings.sampling.max_tokens)
    server = Server(settings.rpc, f"unix:{wire / args.worker}.real" if wire.is_dir() else section.bind)
    replica = Replica(
        engine,
        pause_timeout_s=section.generation_timeout_s,
        load_timeout_s=settings.weights.publish_timeout_s,
        keep_timeout_s=settings.weights.bucket_timeout_s,
        on_serving=server.set_serving,
    )
    max_groups = section.max_groups or 1

    def on_turn(phase: str) -> None:
        membership.phase = phase

    pull = PullLoop(
        PullSettings(
            consumer,
            max_groups,
            settings.controller.lease_s,
            section.generation_timeout_s,
            settings.store.row_expiry_s,
            settings.controller.max_deliveries,
        ),
        replica,
        PromptQueue(connection, settings.run.name, consumer),
        Rows(connection, settings.run.name, settings.store.num_shards),
        tokenizer,
        on_turn,
    )
    servicer = RolloutServicer(
        replica,
        pull,
        tokenizer,
        fence,
        consumer=consumer,
        max_groups=max_groups,
        generation_timeout_s=section.generation_timeout_s,
    )
    server.add(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, servicer, SERVICE_NAME)
    bound = await server.start()
    address = f"unix:{wire / args.worker}.link" if wire.is_dir() else bound
    membership = Membership(
        settings, controller_pb2.ROLE_ROLLOUT, args.worker, args.incarnation, address, engine.info.num_weight_ranks
    )
    membership.start()
    pulling = asyncio.create_task(pull.run())

    async def drain() -> None:
        await replica.stop_taking()
        await pull.drain(1.0)

    beating = asyncio.create_task(feed_heartbeat(replica, membership))
    failed = asyncio.ensure_future(_first_failure(pulling, beating, membership.failed))
    try:
        await serve(server, drain=drain, failed=failed, grace_s=3.0)
    finally:
        failed.cancel()
        membership.stop()
        connection.close()


async def _first_failure(*parts: "asyncio.Future[None]") -> None:
    """Raises what the first failing part raised; a pull loop that was drained ends well and ends nothing."""
    await asyncio.wait(parts, return_when=asyncio.FIRST_EXCEPTION)
    for part in parts:
        if part.done():
            part.result()


if __name__ == "__main__":
    sys.exit(main())
