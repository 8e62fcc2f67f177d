"""The gRPC methods that the actor's and the critic's services have alike. Reaches no torch."""

from collections.abc import AsyncIterator
from typing import Any, TypeAlias

import grpc

from rolecall.training.serving.calls import TrainerCalls
from rolecall.v1 import training_pb2

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class TrainerServicer:
    """The methods of every trainer's service: each makes one call of `TrainerCalls`."""

    def __init__(self, calls: TrainerCalls) -> None:
        self._calls = calls

    async def Train(
        self, request: training_pb2.TrainRequest, context: Context
    ) -> AsyncIterator[training_pb2.TrainResponse]:
        async for response in self._calls.chain.train(request):
            yield response

    async def SaveCheckpoint(
        self, request: training_pb2.SaveTrainerCheckpointRequest, context: Context
    ) -> AsyncIterator[training_pb2.SaveTrainerCheckpointResponse]:
        async for response in self._calls.save(request):
            yield response

    async def LoadCheckpoint(
        self, request: training_pb2.LoadTrainerCheckpointRequest, context: Context
    ) -> training_pb2.LoadTrainerCheckpointResponse:
        return await self._calls.load(request)

    async def Offload(self, request: training_pb2.OffloadRequest, context: Context) -> training_pb2.OffloadResponse:
        return await self._calls.offload(request)

    async def Onload(self, request: training_pb2.OnloadRequest, context: Context) -> training_pb2.OnloadResponse:
        return await self._calls.onload(request)

    async def Profile(
        self, request: training_pb2.ProfileRequest, context: Context
    ) -> AsyncIterator[training_pb2.ProfileResponse]:
        async for response in self._calls.profile(request):
            yield response

    async def GetInfo(
        self, request: training_pb2.GetTrainerInfoRequest, context: Context
    ) -> training_pb2.GetTrainerInfoResponse:
        return self._calls.info()
