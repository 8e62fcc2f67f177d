"""What `rolecall profile` shows of what a controller answers."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from rolecall.commands.steer import Run, profile
from rolecall.errors import RoleCallError, UnavailableError, WorkerLostError
from rolecall.rpc.callers import Caller
from rolecall.v1 import controller_pb2 as pb
from rolecall.v1.training_pb2 import OperatorTime, RankTrace, StepProfile
from tests.contract.peer import Peer, serving
from tests.twins.callers import party

WRITTEN = RankTrace(
    path="/run/profiles/actor-step4-rank0.json.gz",
    num_bytes=1_400_000,
    operators=[OperatorTime(name="aten::mm", num_calls=30, self_s=0.003)],
    total_s=0.004,
)
MISSING = RankTrace(failure="no space to write [/run/profiles]")


class Profiled(Peer):
    """A controller whose trainer records what it is given, then fails if told to."""

    def __init__(self, *profiles: StepProfile, then: RoleCallError | None = None) -> None:
        super().__init__()
        self.profiles, self.then = profiles, then
        self.asked: list[tuple[str, int]] = []

    async def ProfileWorker(
        self, request: pb.ProfileWorkerRequest, context: Any
    ) -> AsyncIterator[pb.ProfileWorkerResponse]:
        self.asked.append((request.worker, request.num_steps))
        yield pb.ProfileWorkerResponse()
        for each in self.profiles:
            yield pb.ProfileWorkerResponse(profile=each)
        if self.then is not None:
            raise self.then


async def commanded(peer: Peer, num_steps: int | None, worker: str = "actor") -> int:
    async with serving(peer) as (_, address):
        return await asyncio.to_thread(profile, Run(address, party(Caller.OPERATOR)), worker, num_steps)


async def test_each_step_is_shown_with_its_traces_and_the_heaviest_operators(
    capsys: pytest.CaptureFixture[str],
) -> None:
    peer = Profiled(StepProfile(step=4, num_passes=2, traces=[WRITTEN]))
    assert await commanded(peer, 1) == 0
    assert peer.asked == [("actor", 1)]
    said = capsys.readouterr().out
    assert "step 4: 2 microbatches of actor and the optimizer's step after" in said
    assert "rank 0: /run/profiles/actor-step4-rank0.json.gz, 1.4 MB" in said
    assert "3.00    75%     30  aten::mm" in said


async def test_a_rollout_records_twenty_steps_of_its_engine_unless_it_is_told_how_many(
    capsys: pytest.CaptureFixture[str],
) -> None:
    peer = Profiled(StepProfile(step=7, num_passes=20, traces=[WRITTEN, WRITTEN]))
    assert await commanded(peer, None, "rollout-1") == 0
    assert await commanded(peer, 5, "rollout-1") == 0
    assert await commanded(peer, None) == 0
    assert peer.asked == [("rollout-1", 20), ("rollout-1", 5), ("actor", 1)]
    assert "rollout-1, version 7: 20 steps of its engine" in capsys.readouterr().out
    lost = Profiled(then=UnavailableError("this role ends"))
    with pytest.raises(WorkerLostError, match="rollout-1 was lost or the run ended after 0 of 1 traces"):
        await commanded(lost, None, "rollout-1")


async def test_a_trace_that_is_not_there_is_said_and_makes_the_command_fail(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert await commanded(Profiled(StepProfile(step=4, traces=[MISSING, WRITTEN])), 1) == 1
    said = capsys.readouterr().out
    assert "rank 0: no trace: no space to write [/run/profiles]" in said
    assert "rank 1: operators" in said


async def test_a_trainer_that_is_lost_is_told_with_what_was_recorded_before() -> None:
    peer = Profiled(StepProfile(step=4, traces=[WRITTEN]), then=UnavailableError("127.0.0.1:1 is away"))
    with pytest.raises(WorkerLostError, match="after 1 of 3 traces; of a step under way there is none"):
        await commanded(peer, 3)
