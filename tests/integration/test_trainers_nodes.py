"""A trainer on two nodes, each with a torchrun of its own, as the pods of a Job start it: who serves, how both end, and
that they meet again.
"""

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from rolecall.rpc.channel import open_channel
from rolecall.rpc.role_process import RESTART, STOPPED, USAGE
from rolecall.shifts import ShiftLocks
from rolecall.v1 import actor_pb2_grpc
from rolecall.v1.training_pb2 import TrainRequest
from tests.contract.peer import Peer, serving
from tests.fixtures_store import StoreUnderTest
from tests.tiny_models import write_qwen3
from tests.twins.callers import party
from tests.twins.processes import Command, joined, nodes, started
from tests.twins.served import Batches, train, values_of, write_settings
from tests.waiting import until

END_TIMEOUT_S = 100.0
NODES = ("127.0.0.1", "127.0.0.2")
"""Their addresses; the second is loopback too, and another interface to whoever binds."""


@pytest.mark.thorough("test_a_killed_rank_ends_the_others_within_seconds")
@pytest.mark.timeout(300)
async def test_two_nodes_train_end_with_each_other_and_meet_again(store: StoreUnderTest, tmp_path: Path) -> None:
    model, peer = write_qwen3(tmp_path / "policy"), Peer()
    batch = Batches(store, model).sealed(0)
    algorithm = {"groups_per_batch": 4, "num_minibatches": 3}
    async with serving(peer) as (_, controller):
        config = write_settings(store, model, tmp_path, algorithm=algorithm, controller={"address": controller})
        async with joined(peer, config, nodes(config, NODES)) as actor:
            os.killpg(actor.processes[1].pid, signal.SIGKILL)
            async with asyncio.timeout(END_TIMEOUT_S):
                assert await actor.processes[0].wait() == RESTART
            assert "actor failed: rank 1 of actor is gone" in actor.said()
        async with (
            joined(peer, config, nodes(config, NODES)) as actor,
            open_channel(actor.join.address, party()) as channel,
        ):
            request = TrainRequest(ctl=store.ledger.ctl, step=0, digest=batch.digest)
            assert "actor/loss" in values_of(await train(actor_pb2_grpc.ActorServiceStub(channel), request))


@pytest.mark.thorough("test_a_killed_rank_ends_the_others_within_seconds")
@pytest.mark.timeout(300)
@pytest.mark.parametrize("drained", [0, 1])
async def test_nodes_of_which_one_is_drained_end_together_and_none_as_done(
    store: StoreUnderTest, tmp_path: Path, drained: int
) -> None:
    """Torchrun alone is signalled, as tini does in a pod. With 0 the index of a Job would be done, and never again be
    there to meet the others.
    """
    peer = Peer()
    async with serving(peer) as (_, controller):
        config = write_settings(store, write_qwen3(tmp_path / "policy"), tmp_path, controller={"address": controller})
        patient = [
            Command([command.words[0], "--shutdown-timeout=90", *command.words[1:]]) for command in nodes(config, NODES)
        ]
        async with joined(peer, config, patient) as actor:
            os.kill(actor.processes[drained].pid, signal.SIGTERM)
            async with asyncio.timeout(END_TIMEOUT_S):
                codes = [await process.wait() for process in actor.processes]
            assert codes == [STOPPED, STOPPED], (actor.said(0), actor.said(1))
            assert "forcefully" not in actor.said(drained), "its ranks ended by themselves"


@pytest.mark.thorough("test_a_killed_rank_ends_the_others_within_seconds")
@pytest.mark.timeout(300)
async def test_a_bad_setting_ends_both_nodes_with_a_code_that_says_so(store: StoreUnderTest, tmp_path: Path) -> None:
    config = write_settings(store, write_qwen3(tmp_path / "policy"), tmp_path)
    commands = nodes(config, NODES, "--weights.ports", "1024-1025")
    async with started(config, commands) as actor, asyncio.timeout(END_TIMEOUT_S):
        assert [await process.wait() for process in actor.processes] == [USAGE, USAGE]


@pytest.mark.thorough("test_roles_of_several_machines_take_shifts_without_a_launcher")
@pytest.mark.timeout(300)
async def test_ranks_on_two_nodes_wait_for_their_shift_and_load_together(store: StoreUnderTest, tmp_path: Path) -> None:
    model, peer, locks = write_qwen3(tmp_path / "policy"), Peer(), ShiftLocks(tmp_path)
    waits = "waiting for the shift of the trainers on the shared devices"
    assert locks.give_to("rollouts")
    async with serving(peer) as (_, controller):
        sections: dict[str, Any] = {"rollout": {"sleep_mode": True}, "controller": {"address": controller}}
        config = write_settings(store, model, tmp_path, **sections)
        async with started(config, nodes(config, NODES)) as actor:
            await until(lambda: all(waits in actor.said(node) for node in (0, 1)), END_TIMEOUT_S)
            assert peer.joins == []
            assert locks.give_to("trainers")
            await actor.joined(peer, 0)
            await until(lambda: locks.give_to("rollouts"))
        apart = ["--run.dir", str(tmp_path / "apart")]
        commands = nodes(config, NODES, "--controller.start_timeout_s", "15")
        commands[1] = commands[1]._replace(words=[*commands[1].words, *apart])
        assert locks.give_to("trainers")
        async with started(config, commands) as actor, asyncio.timeout(END_TIMEOUT_S):
            assert await actor.processes[0].wait() == RESTART
            assert "was still loading the model after controller.start_timeout_s = 15 s; a rank that" in actor.said()
            assert "waiting for a controller, and the shift of the trainers" in actor.said(1)
    locks.close()
