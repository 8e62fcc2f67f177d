"""A controller that reports what `<run dir>/status.json` holds (a RunStatus) and coordinates nothing. StopRun ends it,
with a checkpoint when asked.

While `<run dir>/crowded` exists it has no room for another stream and ends those that there are.
"""

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

from google.protobuf import json_format

from rolecall.errors import ExhaustedError, NotOnThisDeviceError
from rolecall.rpc.role_process import ServiceArgs, parse_args, run
from rolecall.rpc.server import Server
from rolecall.v1 import controller_pb2, controller_pb2_grpc
from tests.integration.fake_roles.role import POLL_S, obey


class Reporter(controller_pb2_grpc.ControllerServiceServicer):
    """Reads the file again at every look."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self.stopped = asyncio.Event()

    async def WatchRun(
        self, request: controller_pb2.WatchRunRequest, context: Any
    ) -> AsyncIterator[controller_pb2.WatchRunResponse]:
        """The status, many times a second."""
        while not (self._run_dir / "crowded").exists():
            yield controller_pb2.WatchRunResponse(status=self._status())
            await asyncio.sleep(POLL_S)
        raise ExhaustedError("256 streams are open already")

    async def GetRun(self, request: controller_pb2.GetRunRequest, context: Any) -> controller_pb2.GetRunResponse:
        """The status, once."""
        return controller_pb2.GetRunResponse(status=self._status())

    async def StopRun(self, request: controller_pb2.StopRunRequest, context: Any) -> controller_pb2.StopRunResponse:
        """Ends the process as one that saved a checkpoint, and keeps what it was told."""
        (self._run_dir / "told_of").write_text(request.failure)
        if request.checkpoint:
            step = self._status().step
            checkpoint = self._run_dir / "checkpoints" / f"step-{step:08d}"
            checkpoint.mkdir(parents=True)
            (checkpoint / "COMMITTED").touch()
        asyncio.get_running_loop().call_later(0.2, self.stopped.set)
        return controller_pb2.StopRunResponse()

    def _status(self) -> controller_pb2.RunStatus:
        file = self._run_dir / "status.json"
        return json_format.Parse(file.read_text() if file.exists() else "{}", controller_pb2.RunStatus())

    async def _nothing(self, request: Any, context: Any) -> Any:
        raise NotOnThisDeviceError("a fake")

    Join = Heartbeat = PauseRun = ResumeRun = SaveCheckpoint = _nothing

    async def ProfileWorker(
        self, request: controller_pb2.ProfileWorkerRequest, context: Any
    ) -> AsyncIterator[controller_pb2.ProfileWorkerResponse]:
        """Refuses, as it does all else."""
        yield await self._nothing(request, context)


async def serve(args: ServiceArgs) -> None:
    """Reports until it is told to end."""
    assert args.settings.controller.bind is not None
    server = Server(args.settings.rpc, args.settings.controller.bind)
    reporter = Reporter(args.settings.run.dir)
    server.add(controller_pb2_grpc.add_ControllerServiceServicer_to_server, reporter, "rolecall.v1.ControllerService")
    await server.start()
    ends = [asyncio.ensure_future(reporter.stopped.wait()), asyncio.ensure_future(obey(args))]
    try:
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for end in ends:
            end.cancel()
        await server.drain(0.0)


if __name__ == "__main__":
    args = parse_args("controller")
    sys.exit(run(lambda: serve(args), "controller"))
