"""RewardService over the dispatcher: checks the request, makes one call, encodes the response."""

from collections.abc import Callable
from typing import Any

import grpc

from rolecall.errors import InvalidInputError
from rolecall.v1 import reward_pb2, reward_pb2_grpc
from services.reward.dispatcher import Dispatcher

SERVICE_NAME = "rolecall.v1.RewardService"


class RewardServicer(reward_pb2_grpc.RewardServiceServicer):
    """The servicer of the public contract, `proto/rolecall/v1/reward.proto`."""

    def __init__(self, dispatcher: Dispatcher, on_score: Callable[[], None]) -> None:
        """`on_score` is called once per answered Score call (progress for the heartbeat)."""
        self._dispatcher = dispatcher
        self._on_score = on_score

    async def Score(
        self, request: reward_pb2.ScoreRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> reward_pb2.ScoreResponse:
        """Scores items. Idempotent. INVALID_ARGUMENT for an empty request or ids that are empty or not unique."""
        items = list(request.items)
        ids = {item.id for item in items}
        if not items or len(ids) != len(items) or "" in ids:
            raise InvalidInputError(
                f"items: {len(items)} items with {len(ids)} different ids; send at least one item, each with an id "
                "of its own"
            )
        results = await self._dispatcher.score(items)
        self._on_score()
        return reward_pb2.ScoreResponse(results=results)

    async def Describe(
        self, request: reward_pb2.DescribeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> reward_pb2.DescribeResponse:
        """Describes the weighted sum. Idempotent."""
        return await self._dispatcher.describe()
