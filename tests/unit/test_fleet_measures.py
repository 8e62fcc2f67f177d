"""What a step says of the engines of its fleet."""

from dataclasses import dataclass
from typing import Any

import pytest

from rolecall.errors import UnavailableError
from rolecall.v1.rollout_pb2 import EngineUse, GetRolloutInfoResponse
from services.controller.step import measures


@dataclass
class Answering:
    """A rollout, and the stub of its service, that answers or raises what it is made with."""

    answer: GetRolloutInfoResponse | Exception
    consumer: str = "rollout-0.abc"

    @property
    def stub(self) -> "Answering":
        return self

    async def GetInfo(self, request: Any, timeout: float) -> GetRolloutInfoResponse:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@dataclass
class Members:
    answers: list[Any]

    def rollouts(self) -> list[Answering]:
        return [Answering(answer) for answer in self.answers]


async def of_fleet(*answers: GetRolloutInfoResponse | Exception) -> dict[str, float]:
    members: Any = Members(list(answers))
    return (await measures.of_fleet(members)).values()


def using(**fields: Any) -> GetRolloutInfoResponse:
    return GetRolloutInfoResponse(engine_use=EngineUse(**fields))


async def test_the_fullest_cache_is_told_requests_add_up_and_tokens_weigh_the_hit_rate() -> None:
    first = using(
        num_running=3, num_waiting=1, kv_cache_usage=0.25, num_preemptions=2, num_prompt_tokens=300, num_cached_tokens=0
    )
    second = using(num_running=4, kv_cache_usage=0.75, num_prompt_tokens=100, num_cached_tokens=80)
    assert await of_fleet(first, second, UnavailableError("it died")) == pytest.approx(
        {
            "rollout/running_requests": 7,
            "rollout/waiting_requests": 1,
            "rollout/kv_cache_usage": 0.75,
            "rollout/preemptions": 2,
            "rollout/prefix_cache_hit_rate": 0.2,
            "rollout/replicas": 3,
        }
    )


async def test_an_engine_that_says_nothing_of_its_cache_adds_no_number() -> None:
    assert (await of_fleet(GetRolloutInfoResponse())).keys() == {"rollout/replicas"}
    idle = await of_fleet(using(kv_cache_usage=0.0))
    assert "rollout/prefix_cache_hit_rate" not in idle, "nothing was looked up"
    assert idle["rollout/kv_cache_usage"] == 0
