"""The commands for a run that is under way: status, watch, pause, resume, stop. A thin client of ControllerService."""

import asyncio
import sys
from pathlib import Path

from rich.console import Console

from rolecall.errors import ConfigError
from rolecall.progress import STATES, open_view, render
from rolecall.rpc.channel import open_channel
from rolecall.settings import RpcSection, load_settings
from rolecall.v1 import controller_pb2, controller_pb2_grpc

WATCH_TIMEOUT_S = 24 * 3600.0
"""Deadline of one `rolecall watch`."""


def steer(command: str, run: str, *, checkpoint: bool) -> int:
    """Carries out `command` on the run named by a run directory, a configuration file or a controller's address; returns the exit code."""
    address, rpc = find(run)
    return asyncio.run(_steer(command, address, rpc, checkpoint))


def find(run: str) -> tuple[str, RpcSection]:
    """The controller's address and how to talk to it. ConfigError when `run` names neither a run nor an address."""
    path = Path(run)
    file = path / "config.yaml" if path.is_dir() else path
    if file.is_file():
        settings = load_settings(file)
        if settings.controller.address is None:
            raise ConfigError(f"{file} does not say where its controller is (controller.address); name the run's directory instead")
        return settings.controller.address, settings.rpc
    if ":" in run and not path.exists():
        return run, RpcSection()
    raise ConfigError(f"{run} is neither a run directory with a config.yaml, nor a configuration file, nor host:port")


async def _steer(command: str, address: str, rpc: RpcSection, checkpoint: bool) -> int:
    async with open_channel(address, rpc) as channel:
        stub = controller_pb2_grpc.ControllerServiceStub(channel)
        if command == "watch":
            return await _watch(stub)
        if command == "pause":
            await stub.PauseRun(controller_pb2.PauseRunRequest())
        elif command == "resume":
            await stub.ResumeRun(controller_pb2.ResumeRunRequest())
        elif command == "stop":
            await stub.StopRun(controller_pb2.StopRunRequest(checkpoint=checkpoint))
        status = (await stub.GetRun(controller_pb2.GetRunRequest())).status
        if command == "status":
            Console(file=sys.stdout).print(render(status))
        else:
            sys.stdout.write(f"{status.run}: {STATES.get(status.state, '?')} at step {status.step}/{status.total_steps}\n")
        return 0


async def _watch(stub: controller_pb2_grpc.ControllerServiceStub) -> int:
    view = open_view(sys.stdout)
    try:
        async for message in stub.WatchRun(controller_pb2.WatchRunRequest(), timeout=WATCH_TIMEOUT_S):
            view.show(message.status)
            if message.status.state == controller_pb2.RUN_STATE_FAILED:
                view.note(f"controller: {message.status.error}")
                return 1
    finally:
        view.close()
    return 0
