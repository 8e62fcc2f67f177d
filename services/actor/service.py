"""ActorService in gRPC: translates requests for the actor's calls and its weight channel. Reaches no torch."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, Protocol, TypeAlias

import grpc

from rolecall.training.serving.calls import TrainerCalls
from rolecall.training.serving.trainer import Trainer
from rolecall.v1 import actor_pb2, actor_pb2_grpc, training_pb2, weights_pb2

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class WeightPublishingTrainer(Trainer, Protocol):
    """A trainer that can hand its weights out."""

    @property
    def all_ranks_send(self) -> bool:
        """Whether the ranks open an epoch together, on the device thread; else rank 0 opens it beside that."""

    def end_before(self, epoch: int) -> None:
        """Ends what is sent over an earlier epoch; called beside the device thread, which it frees."""

    def open_channel(self, request: weights_pb2.OpenWeightChannelRequest) -> weights_pb2.OpenWeightChannelResponse:
        """Says where and how the ranks meet. StaleEpochError."""

    def publish(self, request: actor_pb2.PublishWeightsRequest) -> actor_pb2.PublishWeightsResponse:
        """Sends the weights. OutOfOrderError, StaleEpochError, StaleVersionError, ChannelBrokenError."""

    def abort_publish(self, epoch: int, reason: str) -> None:
        """Ends what is sent, or about to be, over `epoch`; called beside the device thread. Waits for no peer."""


class ActorServicer(actor_pb2_grpc.ActorServiceServicer):
    """The actor's methods: each makes one call of `TrainerCalls` or of the actor on its ranks."""

    def __init__(self, actor: WeightPublishingTrainer, calls: TrainerCalls) -> None:
        self._actor = actor
        self._calls = calls

    async def Train(
        self, request: training_pb2.TrainRequest, context: Context
    ) -> AsyncIterator[training_pb2.TrainResponse]:
        async for response in self._calls.chain.train(request):
            yield response

    async def ComputeLogprobs(
        self, request: training_pb2.ComputeColumnRequest, context: Context
    ) -> training_pb2.ComputeColumnResponse:
        return await self._calls.compute(request)

    async def OpenWeightChannel(
        self, request: weights_pb2.OpenWeightChannelRequest, context: Context
    ) -> weights_pb2.OpenWeightChannelResponse:
        await self._calls.fence.check(request.ctl)
        await asyncio.to_thread(self._actor.end_before, request.epoch)
        if self._actor.all_ranks_send:
            return await self._calls.device_thread.run(lambda: self._actor.open_channel(request), "publishing")
        return await asyncio.to_thread(self._actor.open_channel, request)

    async def PublishWeights(
        self, request: actor_pb2.PublishWeightsRequest, context: Context
    ) -> actor_pb2.PublishWeightsResponse:
        await self._calls.fence.check(request.ctl)
        try:
            return await self._calls.device_thread.run(lambda: self._actor.publish(request), "publishing")
        except asyncio.CancelledError:
            # Nobody waits for it any more: the controller left or makes it again. Whoever is stuck in it, here or at a
            # receiver, must be freed.
            asyncio.get_running_loop().run_in_executor(
                None, self._actor.abort_publish, request.epoch, "its caller left"
            )
            raise

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
