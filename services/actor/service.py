"""ActorService in gRPC: translates calls for the actor's front and its weight channel. Reaches no torch."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol, TypeAlias

import grpc

from rolecall.training.serving.calls import TrainerEngine, TrainerFront
from rolecall.v1 import actor_pb2, actor_pb2_grpc, training_pb2, weights_pb2

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class ActorEngine(TrainerEngine, Protocol):
    """A trainer that can hand its weights out."""

    def open_channel(self, request: weights_pb2.OpenWeightChannelRequest) -> weights_pb2.OpenWeightChannelResponse:
        """Where and how the ranks meet; called beside the lane, so that a new epoch can end a stuck publish.
        StaleEpochError.
        """

    def publish(self, request: actor_pb2.PublishWeightsRequest) -> actor_pb2.PublishWeightsResponse:
        """Sends the weights. OutOfOrderError, StaleEpochError, StaleVersionError, ChannelBrokenError."""

    def abort_publish(self, epoch: int, reason: str) -> None:
        """Ends what is sent, or about to be, over `epoch`; called beside the lane. Does not wait for a peer."""


class ActorServicer(actor_pb2_grpc.ActorServiceServicer):
    """One call of the front or the engine per method."""

    def __init__(self, engine: ActorEngine, front: TrainerFront) -> None:
        self._engine = engine
        self._front = front

    async def Train(
        self, request: training_pb2.TrainRequest, context: Context
    ) -> AsyncIterator[training_pb2.TrainResponse]:
        async for response in self._front.train(request):
            yield response

    async def ComputeLogprobs(
        self, request: training_pb2.ComputeColumnRequest, context: Context
    ) -> training_pb2.ComputeColumnResponse:
        return await self._front.compute(request)

    async def OpenWeightChannel(
        self, request: weights_pb2.OpenWeightChannelRequest, context: Context
    ) -> weights_pb2.OpenWeightChannelResponse:
        self._front.fence.check(request.ctl)
        return await asyncio.to_thread(self._engine.open_channel, request)

    async def PublishWeights(
        self, request: actor_pb2.PublishWeightsRequest, context: Context
    ) -> actor_pb2.PublishWeightsResponse:
        self._front.fence.check(request.ctl)
        try:
            return await self._front.lane.run(lambda: self._engine.publish(request), "publishing")
        except asyncio.CancelledError:
            # Nobody waits for it any more: the controller left or makes it again. Whoever is stuck in it, here or at a
            # receiver, must be freed.
            asyncio.get_running_loop().run_in_executor(
                None, self._engine.abort_publish, request.epoch, "its caller left"
            )
            raise

    async def SaveCheckpoint(
        self, request: training_pb2.SaveTrainerCheckpointRequest, context: Context
    ) -> AsyncIterator[training_pb2.SaveTrainerCheckpointResponse]:
        async for response in self._front.save(request):
            yield response

    async def LoadCheckpoint(
        self, request: training_pb2.LoadTrainerCheckpointRequest, context: Context
    ) -> training_pb2.LoadTrainerCheckpointResponse:
        return await self._front.load(request)

    async def Offload(self, request: training_pb2.OffloadRequest, context: Context) -> training_pb2.OffloadResponse:
        return await self._front.offload(request)

    async def Onload(self, request: training_pb2.OnloadRequest, context: Context) -> training_pb2.OnloadResponse:
        return await self._front.onload(request)

    async def GetInfo(
        self, request: training_pb2.GetTrainerInfoRequest, context: Context
    ) -> training_pb2.GetTrainerInfoResponse:
        return self._front.info()
