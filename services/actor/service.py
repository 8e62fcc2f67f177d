"""ActorService in gRPC: translates requests for the actor's calls and its weight channel. Reaches no torch."""

import asyncio
from typing import Protocol

from rolecall.training.serving.calls import TrainerCalls
from rolecall.training.serving.servicer import Context, TrainerServicer
from rolecall.training.serving.trainer import Trainer
from rolecall.v1 import actor_pb2, actor_pb2_grpc, training_pb2, weights_pb2


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


class ActorServicer(TrainerServicer, actor_pb2_grpc.ActorServiceServicer):
    """The actor's methods: each makes one call of `TrainerCalls` or of the actor on its ranks."""

    def __init__(self, actor: WeightPublishingTrainer, calls: TrainerCalls) -> None:
        super().__init__(calls)
        self._actor = actor

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
