"""ControllerService over ControllerRun: decode, one call, encode."""

from collections.abc import AsyncIterator
from typing import Any, TypeAlias

from grpc.aio import ServicerContext

from rolecall.rpc.identity import require_worker
from rolecall.v1 import controller_pb2 as pb
from rolecall.v1.controller_pb2_grpc import ControllerServiceServicer
from services.controller.run import ControllerRun

Context: TypeAlias = ServicerContext[Any, Any]
_ROLES = {role: name.removeprefix("ROLE_").lower() for name, role in pb.Role.items()}


class ControllerServicer(ControllerServiceServicer):
    """Translates; the contract is in proto/rolecall/v1/controller.proto."""

    def __init__(self, run: ControllerRun) -> None:
        self._run = run

    async def Join(self, request: pb.JoinRequest, context: Context) -> pb.JoinResponse:
        require_worker(_ROLES.get(request.role, ""), request.worker)
        return self._run.join(request)

    async def Heartbeat(self, request: pb.HeartbeatRequest, context: Context) -> pb.HeartbeatResponse:
        role = self._run.role_of(request.worker)
        if role is not None:
            require_worker(_ROLES[role], request.worker)
        return self._run.heartbeat(request)

    async def GetRun(self, request: pb.GetRunRequest, context: Context) -> pb.GetRunResponse:
        return pb.GetRunResponse(status=await self._run.status())

    async def WatchRun(self, request: pb.WatchRunRequest, context: Context) -> AsyncIterator[pb.WatchRunResponse]:
        async for status in self._run.watch():
            yield pb.WatchRunResponse(status=status)

    async def PauseRun(self, request: pb.PauseRunRequest, context: Context) -> pb.PauseRunResponse:
        await self._run.pause()
        return pb.PauseRunResponse()

    async def ResumeRun(self, request: pb.ResumeRunRequest, context: Context) -> pb.ResumeRunResponse:
        await self._run.resume()
        return pb.ResumeRunResponse()

    async def StopRun(self, request: pb.StopRunRequest, context: Context) -> pb.StopRunResponse:
        self._run.stop(checkpoint=request.checkpoint, failure=request.failure)
        return pb.StopRunResponse()

    async def SaveCheckpoint(self, request: pb.SaveCheckpointRequest, context: Context) -> pb.SaveCheckpointResponse:
        path, step = await self._run.save_checkpoint()
        return pb.SaveCheckpointResponse(path=path, step=step)

    async def ProfileWorker(
        self, request: pb.ProfileWorkerRequest, context: Context
    ) -> AsyncIterator[pb.ProfileWorkerResponse]:
        async for response in self._run.profile(request.worker, request.num_steps):
            yield pb.ProfileWorkerResponse(profile=response.profile if response.HasField("profile") else None)
