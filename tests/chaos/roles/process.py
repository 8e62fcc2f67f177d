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
    settings = args.settings

    async def start() -> None:
        telemetry.configure(settings.telemetry, role, args.worker, run=settings.run.name, rpc=settings.rpc)
        hook = hook_of(settings, args.worker)
        hook.at("starting")
        connection = await asyncio.to_thread(connect, settings.store, verify=False)
        fence = Fence(lambda: read_ctl(connection, settings.run.name))
        await serve(args, hook, connection, fence)

    return run(start, role)
