"""Trainers as processes that die, are stopped or hang: all ranks end within 30 s, say who was lost, leave nothing
behind, and a new process goes on.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from rolecall.errors import RoleCallError, WorkerLostError
from rolecall.rpc.channel import open_channel
from rolecall.rpc.role_process import RESTART
from rolecall.settings import RpcSection, child_environment
from rolecall.training.ranks.watch import LOST_S
from rolecall.v1 import actor_pb2_grpc, controller_pb2, critic_pb2_grpc
from rolecall.v1.training_pb2 import (
    GetTrainerInfoRequest,
    LoadTrainerCheckpointRequest,
    SaveTrainerCheckpointRequest,
    TrainRequest,
)
from tests.contract.peer import Peer, serving
from tests.fixtures_store import StoreUnderTest
from tests.ports import free_port
from tests.tiny_models import write_qwen3
from tests.twins.served import Batches, saved, settings_tree, train

START_TIMEOUT_S = 120.0
SLACK_S = 100.0
"""For torchrun to notice and leave, on a busy machine."""
LONG = {"groups_per_batch": 4, "num_minibatches": 2, "num_epochs": 2000}
"""A step that is still under way when the test is over."""


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


@dataclass
class Actor:
    """An actor's processes."""

    process: asyncio.subprocess.Process
    address: str
    incarnation: str
    log: Path
    ranks: list[psutil.Process]

    async def ended(self, within_s: float) -> None:
        """Waits until the outermost process and all ranks are gone. One that nobody reaped has ended, too."""
        async with asyncio.timeout(within_s):
            await self.process.wait()
            while any(_lives(rank) for rank in self.ranks):
                await asyncio.sleep(0.05)

    def says(self) -> str:
        return self.log.read_text(errors="replace")


def _lives(rank: psutil.Process) -> bool:
    try:
        return bool(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@asynccontextmanager
async def actor_process(config: Path, num_ranks: int, peer: Judge, role: str = "actor") -> AsyncIterator[Actor]:
    """An actor (or critic) of `num_ranks` ranks that has joined, in a session of its own which is killed whole at the
    end.
    """
    torchrun = [
        "torch.distributed.run",
        "--nnodes=1",
        f"--nproc-per-node={num_ranks}",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=127.0.0.1:0",
    ]
    launcher = [*torchrun, "--local-addr=127.0.0.1", "-m"] if num_ranks > 1 else []
    num_joins = len(peer.joins)
    arguments = [
        sys.executable,
        "-m",
        *launcher,
        f"services.{role}",
        str(config),
        f"--{role}.num_ranks",
        str(num_ranks),
    ]
    environment = child_environment(
        {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "ROLECALL_DIE_WITH_PARENT": "1"}
    )
    log = config.parent / f"{role}-{num_joins}.log"
    with log.open("wb") as output:
        process = await asyncio.create_subprocess_exec(
            *arguments, env=environment, stdout=output, stderr=output, start_new_session=True
        )
    try:
        async with asyncio.timeout(START_TIMEOUT_S):
            while len(peer.joins) == num_joins:
                assert process.returncode is None, log.read_text()
                await asyncio.sleep(0.05)
        own = psutil.Process(process.pid)
        ranks = [child for child in own.children() if f"services.{role}" in child.cmdline()] if num_ranks > 1 else [own]
        yield Actor(
            process,
            peer.joins[-1].address,
            peer.joins[-1].incarnation,
            log,
            sorted(ranks, key=lambda rank: rank.environ().get("RANK", "0")),
        )
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


@pytest.fixture
async def peer() -> AsyncIterator[tuple[Judge, str]]:
    judge = Judge()
    async with serving(judge) as (_, address):
        yield judge, address


@pytest.fixture
def config(store: StoreUnderTest, tmp_path: Path, peer: tuple[Judge, str]) -> Path:
    model = write_qwen3(tmp_path / "policy")
    Batches(store, model).sealed(0)
    path = tmp_path / "run.yaml"
    path.write_text(
        yaml.safe_dump(settings_tree(store, model, tmp_path, algorithm=LONG, controller={"address": peer[1]}))
    )
    return path


@asynccontextmanager
async def training(address: str, store: StoreUnderTest, peer: Judge) -> AsyncIterator["asyncio.Task[RoleCallError]"]:
    """With a step under way whose call ends in the error that is handed out."""
    async with open_channel(address, RpcSection()) as channel:
        call = asyncio.create_task(_train(actor_pb2_grpc.ActorServiceStub(channel), store.ledger.ctl))
        async with asyncio.timeout(30):
            while not (peer.beats and peer.beats[-1].busy and peer.beats[-1].phase == "training"):
                assert not call.done(), await call
                await asyncio.sleep(0.02)
        try:
            yield call
        finally:
            call.cancel()
            await asyncio.wait({call})


async def _train(stub: actor_pb2_grpc.ActorServiceStub, ctl: int) -> RoleCallError:
    try:
        async for _ in stub.Train(TrainRequest(ctl=ctl, step=0, digest="batch-0"), timeout=120):
            pass
    except RoleCallError as error:
        return error
    raise AssertionError("the step ended")


@pytest.mark.thorough("test_killed_trainers_end_with_the_weights_of_trainers_that_were_never_killed")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", ["actor", "critic"])
async def test_a_killed_trainer_starts_afresh_and_a_checkpoint_and_the_sealed_batches_bring_it_forward(
    store: StoreUnderTest, tmp_path: Path, peer: tuple[Judge, str], role: str
) -> None:
    model, path, ctl = write_qwen3(tmp_path / "policy"), str(tmp_path / "checkpoint" / role), store.ledger.ctl
    algorithm = {"groups_per_batch": 4, "advantage": {"kind": "gae"}}
    section = {"token_budget": 64}
    tree = settings_tree(
        store,
        model,
        tmp_path,
        algorithm=algorithm,
        actor=section | {"num_threads": 1},
        critic=section,
        controller={"address": peer[1]},
    )
    config = tmp_path / "run.yaml"
    config.write_text(yaml.safe_dump(tree))
    batches = Batches(store, model)
    async with actor_process(config, 1, peer[0], role) as first:
        async with calling(first.address, role) as trainer:
            batches.commit(await train(trainer, TrainRequest(ctl=ctl, step=0, digest=batches.sealed(0).digest)))
            await saved(trainer, SaveTrainerCheckpointRequest(ctl=ctl, path=path, step=1))
            batches.commit(await train(trainer, TrainRequest(ctl=ctl, step=1, digest=batches.sealed(1).digest)))
        first.process.kill()
        await first.ended(SLACK_S)
    async with actor_process(config, 1, peer[0], role) as second, calling(second.address, role) as trainer:
        info = await trainer.GetInfo(GetTrainerInfoRequest(), timeout=10)
        assert (info.step, info.policy_version) == (0, -1)
        loaded = await trainer.LoadCheckpoint(LoadTrainerCheckpointRequest(ctl=ctl, path=path), timeout=60)
        assert loaded.step == 1
        replayed = await train(trainer, TrainRequest(ctl=ctl, step=1, digest="batch-1"))
        assert replayed.step == 1
        await train(trainer, TrainRequest(ctl=ctl, step=2, digest=batches.sealed(2).digest))


@asynccontextmanager
async def calling(address: str, role: str) -> AsyncIterator[Any]:
    """A stub of the role."""
    async with open_channel(address, RpcSection()) as channel:
        yield (
            actor_pb2_grpc.ActorServiceStub(channel) if role == "actor" else critic_pb2_grpc.CriticServiceStub(channel)
        )


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "rank", [pytest.param(0, marks=pytest.mark.thorough("test_a_killed_rank_ends_the_others_within_seconds")), 1]
)
async def test_a_killed_rank_ends_the_others_within_seconds(
    store: StoreUnderTest, config: Path, peer: tuple[Judge, str], rank: int
) -> None:
    async with actor_process(config, 2, peer[0]) as actor, training(actor.address, store, peer[0]) as call:
        actor.ranks[rank].kill()
        await actor.ended(SLACK_S)
        assert (await call).retryable


@asynccontextmanager
async def ranks_of_two_machines(
    config: Path, peer: Judge
) -> AsyncIterator[tuple[str, list[asyncio.subprocess.Process], list[Path]]]:
    """The address, processes and logs of an actor of two ranks, each on a machine of its own as far as it knows: nobody
    sees both end.
    """
    common = {
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "0",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    logs = [config.parent / f"rank-{rank}.log" for rank in (0, 1)]
    command = [sys.executable, "-m", "services.actor", str(config), "--actor.num_ranks", "2"]
    processes = []
    try:
        for rank, log in enumerate(logs):
            with log.open("wb") as output:
                environment = child_environment({**common, "RANK": str(rank)})
                processes.append(
                    await asyncio.create_subprocess_exec(*command, env=environment, stdout=output, stderr=output)
                )
        async with asyncio.timeout(START_TIMEOUT_S):
            while not peer.joins:
                assert all(process.returncode is None for process in processes), [log.read_text() for log in logs]
                await asyncio.sleep(0.05)
        yield peer.joins[-1].address, processes, logs
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
            await process.wait()


@pytest.mark.thorough("test_a_killed_rank_is_named_to_every_other_rank")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_rank_that_dies_within_a_step_is_named_by_the_other(
    store: StoreUnderTest, config: Path, peer: tuple[Judge, str], rank: int
) -> None:
    """The survivor waits in a collective of the model, which only says that a connection was closed."""
    async with ranks_of_two_machines(config, peer[0]) as (address, processes, logs), training(address, store, peer[0]):
        processes[rank].kill()
        async with asyncio.timeout(30):
            await processes[1 - rank].wait()
        told = logs[1 - rank].read_text(errors="replace")
        assert processes[1 - rank].returncode == RESTART
        assert f"actor failed: rank {rank} of actor is gone; " in told, told
        assert f", rank {1 - rank} was at train. All ranks end" in told


@pytest.mark.thorough("test_a_stopped_rank_is_noticed_by_its_silence_and_only_a_sibling_would_be_killed")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("rank", [0, 1])
async def test_a_stopped_rank_ends_the_others_by_its_silence(
    store: StoreUnderTest, config: Path, peer: tuple[Judge, str], rank: int
) -> None:
    async with actor_process(config, 2, peer[0]) as actor, training(actor.address, store, peer[0]):
        actor.ranks[rank].suspend()
        await actor.ended(LOST_S + SLACK_S)
        assert f"actor failed: rank {rank} of actor has been silent for" in actor.says()
        assert "at train" in actor.says()


@pytest.mark.thorough("test_a_killed_rank_ends_the_others_within_seconds")
@pytest.mark.timeout(300)
async def test_the_ranks_end_with_their_torchrun(store: StoreUnderTest, config: Path, peer: tuple[Judge, str]) -> None:
    async with actor_process(config, 2, peer[0]) as actor, training(actor.address, store, peer[0]):
        actor.process.kill()
        await actor.ended(SLACK_S)


@pytest.mark.thorough("test_a_killed_rank_ends_the_others_within_seconds")
@pytest.mark.timeout(300)
async def test_ranks_that_live_without_getting_on_end_when_the_controller_says_so(
    store: StoreUnderTest, config: Path, peer: tuple[Judge, str]
) -> None:
    """The device threads of a step that has no end stand for a stuck collective: the process leaves without them."""
    async with actor_process(config, 2, peer[0]) as actor, training(actor.address, store, peer[0]):
        peer[0].lost.add(actor.incarnation)
        await actor.ended(SLACK_S)
        assert "actor failed: the controller gave actor up" in actor.says()


@pytest.mark.thorough("test_a_zombie_does_not_take_its_successors_place")
@pytest.mark.timeout(300)
async def test_a_zombie_that_wakes_up_after_it_was_replaced_ends_at_once(
    store: StoreUnderTest, config: Path, peer: tuple[Judge, str]
) -> None:
    judge = peer[0]
    async with actor_process(config, 1, judge) as zombie:
        async with training(zombie.address, store, judge):
            zombie.ranks[0].suspend()
        judge.lost.add(zombie.incarnation)  # silent, given up, replaced
        async with actor_process(config, 1, judge) as successor:
            async with open_channel(successor.address, RpcSection()) as channel:
                info = await actor_pb2_grpc.ActorServiceStub(channel).GetInfo(GetTrainerInfoRequest(), timeout=10)
            assert (info.step, info.policy_version) == (0, -1)
            zombie.ranks[0].resume()
            await zombie.ended(SLACK_S)
            assert zombie.process.returncode == RESTART
            assert successor.process.returncode is None
