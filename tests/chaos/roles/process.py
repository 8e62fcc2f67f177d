"""The start of a role of a chaos run: services/<role>/__main__.py with another engine, behind the driver's links."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeAlias

from rolecall import telemetry
from rolecall.rpc.fence import Fence
from rolecall.rpc.role_process import ServiceArgs, parse_args, run
from rolecall.store.connection import Connection, connect
from rolecall.store.sealed import read_ctl
from tests.chaos.wiring import Hook, hook_of, through_the_wire

Serve: TypeAlias = Callable[[ServiceArgs, Hook, Connection, Fence], Awaitable[None]]


def run_role(role: str, section: str, serve: Serve) -> int:
    """Runs `serve` as `role`, whose server the settings' `section` places (none: `serve` does); the exit code."""
    args = through_the_wire(parse_args(role), section)
    telemetry.configure(args.settings.telemetry, role, args.worker)

    async def start() -> None:
        hook = hook_of(args.settings, args.worker)
        hook.at("starting")
        connection = await asyncio.to_thread(connect, args.settings.store)
        fence = Fence(await asyncio.to_thread(read_ctl, connection, args.settings.run.name))
        await serve(args, hook, connection, fence)

    return run(start, role)
