"""ReferenceService in gRPC: translates calls for the reference's front. Reaches no torch."""

from typing import Any, TypeAlias

import grpc

from rolecall.training.serving.calls import ColumnEngine, ColumnFront
from rolecall.v1 import reference_pb2, reference_pb2_grpc, training_pb2

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class ReferenceServicer(reference_pb2_grpc.ReferenceServiceServicer):
    """One call of the front per method."""

    def __init__(self, engine: ColumnEngine, front: ColumnFront, instance: str, worker: str) -> None:
        """`instance` names the column; `worker` is "<worker>.<incarnation>"."""
        self._front = front
        self._info = reference_pb2.GetReferenceInfoResponse(
            instance=instance, worker=worker, num_parameters=engine.num_parameters, world_size=engine.world_size
        )

    async def ComputeLogprobs(
        self, request: training_pb2.ComputeColumnRequest, context: Context
    ) -> training_pb2.ComputeColumnResponse:
        return await self._front.compute(request)

    async def GetInfo(
        self, request: reference_pb2.GetReferenceInfoRequest, context: Context
    ) -> reference_pb2.GetReferenceInfoResponse:
        return self._info
