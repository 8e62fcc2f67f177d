"""Trainers as processes that die, are stopped or hang: all ranks end within 30 s, say who was lost, leave nothing
behind, and a new process goes on.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rolecall.errors import RoleCallError, WorkerLostError
from rolecall.rpc.channel import open_channel
from rolecall.rpc.role_process import RESTART
from rolecall.training.ranks.watch import LOST_S
from rolecall.v1 import actor_pb2_grpc, controller_pb2, critic_pb2_grpc
from rolecall.v1.training_pb2 import (
    GetTrainerInfoRequest,
    LoadTrainerCheckpointRequest,
    SaveTrainerCheckpointRequest,
    TrainRequest,
    TrainResult,
)
from tests.contract.peer import Peer, serving
from tests.fixtures_store import StoreUnderTest
from tests.tiny_models import write_qwen3
from tests.twins.callers import party
from tests.twins.processes import TrainerProcesses, joined, ranks_alone, ranks_together
from tests.twins.served import Batches, saved, train, write_settings

SLACK_S = 100.0
"""For torchrun to notice and leave, on a busy machine."""
LONG = {"groups_per_batch": 4, "num_minibatches": 2, "num_epochs": 2000}
"""A step that is still under way when the test is over."""
FSDP: tuple[str, ...] = ()
MEGATRON = ("--actor.backend=megatron", "--actor.parallel.pipeline=2")
CUT = ("--actor.backend=megatron", "--actor.parallel.tensor=2")
LORA = ("--actor.lora.rank=4", "--actor.lora.alpha=8")
OTHER_BACK_END = pytest.param(1, MEGATRON, marks=pytest.mark.megatron, id="megatron")


class Judge(Peer):
    """A controller that can give a worker up."""

    def __init__(self) -> None:
        super().__init__()
        self.lost: set[str] = set()

    async def Heartbeat(
        self, request: controller_pb2.HeartbeatRequest, context: Any
    ) -> controller_pb2.HeartbeatResponse:
        if request.incarnation in self.lost:
            raise WorkerLostError(f"the controller gave {request.worker} up")
        return await super().Heartbeat(request, context)


@pytest.fixture
async def peer() -> AsyncIterator[tuple[Judge, str]]:
    judge = Judge()
    async with serving(judge) as (_, address):
        yield judge, address


@pytest.fixture
def config(store: StoreUnderTest, tmp_path: Path, peer: tuple[Judge, str]) -> Path:
    model = write_qwen3(tmp_path / "policy")
    Batches(store, model).sealed(0)
    return write_settings(store, model, tmp_path, algorithm=LONG, controller={"address": peer[1]})


@asynccontextmanager
async def training(
    actor: TrainerProcesses, store: StoreUnderTest, peer: Judge, step: int = 0
) -> AsyncIterator["asyncio.Task[RoleCallError]"]:
    """With a step under way whose call ends in the error that is handed out."""
    async with open_channel(actor.join.address, party()) as channel:
        call = asyncio.create_task(_train(actor_pb2_grpc.ActorServiceStub(channel), store.ledger.ctl, step))
        async with asyncio.timeout(30):
            while not (peer.beats and peer.beats[-1].busy and peer.beats[-1].phase == "training"):
                assert not call.done(), await call
                await asyncio.sleep(0.02)
        try:
            yield call
        finally:
            call.cancel()
            await asyncio.wait({call})


async def _train(stub: actor_pb2_grpc.ActorServiceStub, ctl: int, step: int) -> RoleCallError:
    try:
        async for _ in stub.Train(TrainRequest(ctl=ctl, step=step, digest=f"batch-{step}"), timeout=120):
            pass
    except RoleCallError as error:
        return error
    raise AssertionError("the step ended")


@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", ["actor", "critic"])
async def test_a_killed_trainer_starts_afresh_and_a_checkpoint_and_the_sealed_batches_bring_it_forward(
    store: StoreUnderTest, tmp_path: Path, peer: tuple[Judge, str], role: str
) -> None:
    model, path, ctl = write_qwen3(tmp_path / "policy"), str(tmp_path / "checkpoints" / role), store.ledger.ctl
    algorithm = {"groups_per_batch": 4, "advantage": {"kind": "gae"}}
    section = {"token_budget": 64}
    config = write_settings(
        store,
        model,
        tmp_path,
        algorithm=algorithm,
        actor=section | {"num_threads": 1},
        critic=section,
        controller={"address": peer[1]},
    )
    batches = Batches(store, model)
    command = ranks_together(config, 1, role=role)
    async with joined(peer[0], config, command, role) as first:
        async with calling(first.join.address, role) as trainer:
            batches.commit(await train(trainer, TrainRequest(ctl=ctl, step=0, digest=batches.sealed(0).digest)))
            await saved(trainer, SaveTrainerCheckpointRequest(ctl=ctl, path=path, step=1))
            batches.commit(await train(trainer, TrainRequest(ctl=ctl, step=1, digest=batches.sealed(1).digest)))
        first.processes[0].kill()
        await first.ended(SLACK_S)
    async with joined(peer[0], config, command, role) as second, calling(second.join.address, role) as trainer:
        info = await trainer.GetInfo(GetTrainerInfoRequest(), timeout=30)
        assert (info.step, info.policy_version) == (0, -1)
        loaded = await trainer.LoadCheckpoint(LoadTrainerCheckpointRequest(ctl=ctl, path=path), timeout=60)
        assert loaded.step == 1
        replayed = await train(trainer, TrainRequest(ctl=ctl, step=1, digest="batch-1"))
        assert replayed.step == 1
        await train(trainer, TrainRequest(ctl=ctl, step=2, digest=batches.sealed(2).digest))


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(
            FSDP,
            marks=pytest.mark.thorough(
                "test_a_killed_trainer_starts_afresh_and_a_checkpoint_and_the_sealed_batches_bring_it_forward"
            ),
            id="fsdp",
        ),
        pytest.param(MEGATRON, marks=pytest.mark.megatron, id="megatron"),
        pytest.param((*CUT, *LORA), marks=pytest.mark.megatron, id="megatron-adapters"),
    ],
)
async def test_what_a_rank_killed_within_a_step_had_trained_of_it_is_not_trained_twice(
    store: StoreUnderTest, tmp_path: Path, peer: tuple[Judge, str], overrides: tuple[str, ...]
) -> None:
    """Bit for bit: a trainer that was never killed writes the same weights and moments after the step."""
    model, ctl = write_qwen3(tmp_path / "policy"), store.ledger.ctl
    saves = {step: str(tmp_path / "checkpoints" / f"step-{step}") for step in (1, 2)}
    config = write_settings(store, model, tmp_path, controller={"address": peer[1]})
    batches, command = Batches(store, model), ranks_together(config, 2, *overrides)

    async def step_of(trainer: Any, step: int) -> tuple[TrainResult, list[Any]]:
        """What a step whose batch is sealed comes to, and the checkpoint after it."""
        result = await train(trainer, TrainRequest(ctl=ctl, step=step, digest=f"batch-{step}"))
        request = SaveTrainerCheckpointRequest(ctl=ctl, path=saves[step + 1], step=step + 1)
        files = await saved(trainer, request)
        return result, [(file.name, file.checksum) for file in files if file.name.endswith(".safetensors")]

    async with joined(peer[0], config, command) as never, calling(never.join.address, "actor") as trainer:
        batches.sealed(0)
        result, _ = await step_of(trainer, 0)
        batches.commit(result)
        batches.sealed(1)
        _, expected = await step_of(trainer, 1)
    endless = ranks_together(config, 2, *overrides, "--algorithm.num_epochs=2000")
    async with joined(peer[0], config, endless) as doomed:
        async with calling(doomed.join.address, "actor") as trainer:
            await trainer.LoadCheckpoint(LoadTrainerCheckpointRequest(ctl=ctl, path=saves[1]), timeout=60)
        async with training(doomed, store, peer[0], 1) as call:
            doomed.ranks[1].kill()
            await doomed.ended(SLACK_S)
            assert (await call).retryable
    async with joined(peer[0], config, command) as second, calling(second.join.address, "actor") as trainer:
        loaded = await trainer.LoadCheckpoint(LoadTrainerCheckpointRequest(ctl=ctl, path=saves[1]), timeout=60)
        assert loaded.step == 1
        _, found = await step_of(trainer, 1)
        assert found == expected


@asynccontextmanager
async def calling(address: str, role: str) -> AsyncIterator[Any]:
    """A stub of the role."""
    async with open_channel(address, party()) as channel:
        yield (
            actor_pb2_grpc.ActorServiceStub(channel) if role == "actor" else critic_pb2_grpc.CriticServiceStub(channel)
        )


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("rank", "overrides"),
    [
        pytest.param(0, FSDP, marks=pytest.mark.thorough("test_a_killed_rank_ends_the_others_within_seconds")),
        (1, FSDP),
        OTHER_BACK_END,
    ],
)
async def test_a_killed_rank_ends_the_others_within_seconds(
    store: StoreUnderTest, config: Path, peer: tuple[Judge, str], rank: int, overrides: tuple[str, ...]
) -> None:
    command = ranks_together(config, 2, *overrides)
    async with joined(peer[0], config, command) as actor, training(actor, store, peer[0]) as call:
        actor.ranks[rank].kill()
        await actor.ended(SLACK_S)
        assert (await call).retryable


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("rank", "overrides"), [(0, FSDP), (1, FSDP), OTHER_BACK_END])
async def test_a_rank_that_dies_within_a_step_is_named_by_the_other(
    store: StoreUnderTest, config: Path, peer: tuple[Judge, str], rank: int, overrides: tuple[str, ...]
) -> None:
    """The survivor waits in a collective of the model, or for the command, which only say that a connection was
    closed.
    """
    command = ranks_alone(config, 2, *overrides)
    async with joined(peer[0], config, command) as actor, training(actor, store, peer[0]):
        actor.processes[rank].kill()
        async with asyncio.timeout(SLACK_S):
            assert await actor.processes[1 - rank].wait() == RESTART
        told = actor.said(1 - rank)
        assert f"actor failed: rank {rank} of actor is gone; " in told, told
        assert re.search(rf", rank {1 - rank} was at \w+\. All ranks end", told), told


@pytest.mark.thorough("test_a_stopped_rank_is_noticed_by_its_silence_and_only_a_sibling_would_be_killed")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_stopped_rank_ends_the_others_by_its_silence(
    store: StoreUnderTest, config: Path, peer: tuple[Judge, str], rank: int
) -> None:
    async with joined(peer[0], config, ranks_together(config, 2)) as actor, training(actor, store, peer[0]):
        actor.ranks[rank].suspend()
        await actor.ended(LOST_S + SLACK_S)
        assert f"actor failed: rank {rank} of actor has been silent for" in actor.said()


@pytest.mark.thorough("test_a_killed_rank_ends_the_others_within_seconds")
@pytest.mark.timeout(300)
async def test_the_ranks_end_with_their_torchrun(store: StoreUnderTest, config: Path, peer: tuple[Judge, str]) -> None:
    async with joined(peer[0], config, ranks_together(config, 2)) as actor, training(actor, store, peer[0]):
        actor.processes[0].kill()
        await actor.ended(SLACK_S)


@pytest.mark.thorough("test_a_killed_rank_ends_the_others_within_seconds")
@pytest.mark.timeout(300)
async def test_ranks_that_live_without_getting_on_end_when_the_controller_says_so(
    store: StoreUnderTest, config: Path, peer: tuple[Judge, str]
) -> None:
    """The device threads of a step that has no end stand for a stuck collective: the process leaves without them."""
    async with joined(peer[0], config, ranks_together(config, 2)) as actor, training(actor, store, peer[0]):
        peer[0].lost.add(actor.join.incarnation)
        await actor.ended(SLACK_S)
        assert "actor failed: the controller gave actor up" in actor.said()


@pytest.mark.timeout(300)
async def test_a_zombie_that_wakes_up_after_it_was_replaced_ends_at_once(
    store: StoreUnderTest, config: Path, peer: tuple[Judge, str]
) -> None:
    judge = peer[0]
    async with joined(judge, config, ranks_together(config, 1)) as zombie:
        async with training(zombie, store, judge):
            zombie.ranks[0].suspend()
        judge.lost.add(zombie.join.incarnation)  # silent, given up, replaced
        async with joined(judge, config, ranks_together(config, 1)) as successor:
            async with open_channel(successor.join.address, party()) as channel:
                info = await actor_pb2_grpc.ActorServiceStub(channel).GetInfo(GetTrainerInfoRequest(), timeout=30)
            assert (info.step, info.policy_version) == (0, -1)
            zombie.ranks[0].resume()
            await zombie.ended(SLACK_S)
            assert zombie.processes[0].returncode == RESTART
            assert successor.processes[0].returncode is None
