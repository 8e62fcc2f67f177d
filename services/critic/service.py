"""CriticService in gRPC: translates requests for the critic's calls. Reaches no torch."""

from rolecall.training.serving.servicer import Context, TrainerServicer
from rolecall.v1 import critic_pb2_grpc, training_pb2


class CriticServicer(TrainerServicer, critic_pb2_grpc.CriticServiceServicer):
    """The critic's methods: each makes one call of `TrainerCalls`."""

    async def ComputeValues(
        self, request: training_pb2.ComputeColumnRequest, context: Context
    ) -> training_pb2.ComputeColumnResponse:
        return await self._calls.compute(request)
