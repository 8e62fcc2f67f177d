"""ReferenceService in gRPC: translates requests for the reference's calls. Reaches no torch."""

from typing import Any, TypeAlias

import grpc

from rolecall.training.serving.calls import ColumnCalls
from rolecall.training.serving.trainer import ColumnComputer
from rolecall.v1 import reference_pb2, reference_pb2_grpc, training_pb2

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]


class ReferenceServicer(reference_pb2_grpc.ReferenceServiceServicer):
    """The reference's methods: each makes one call of `ColumnCalls`."""

    def __init__(self, role: ColumnComputer, calls: ColumnCalls, instance: str, worker: str) -> None:
        """`instance` names the column; `worker` is "<worker>.<incarnation>"."""
        self._calls = calls
        self._info = reference_pb2.GetReferenceInfoResponse(
            instance=instance, worker=worker, num_parameters=role.num_parameters, world_size=role.world_size
        )

    async def ComputeLogprobs(
        self, request: training_pb2.ComputeColumnRequest, context: Context
    ) -> training_pb2.ComputeColumnResponse:
        return await self._calls.compute(request)

    async def Offload(self, request: training_pb2.OffloadRequest, context: Context) -> training_pb2.OffloadResponse:
        return await self._calls.offload(request)

    async def GetInfo(
        self, request: reference_pb2.GetReferenceInfoRequest, context: Context
    ) -> reference_pb2.GetReferenceInfoResponse:
        return self._info
