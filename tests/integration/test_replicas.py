"""Replicas behind one address: reward services and references in processes of their own, of which some are killed,
stopped and started again under load.
"""

import asyncio
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from rolecall.rpc.channel import open_channel
from rolecall.scoring.client import RewardClient, open_client
from rolecall.scoring.scores import Score
from rolecall.settings import RpcSection, child_environment, load_settings
from rolecall.v1 import reward_pb2
from rolecall.v1.reference_pb2_grpc import ReferenceServiceStub
from rolecall.v1.training_pb2 import ComputeColumnRequest
from rolecall.v1.trajectory_pb2 import RowRef
from tests.contract.peer import Peer, serving
from tests.fixtures_store import StoreUnderTest
from tests.ports import free_port
from tests.tiny_models import write_qwen3
from tests.twins.callers import party
from tests.twins.served import Batches, settings_tree, true_logprobs
from tests.waiting import until

START_TIMEOUT_S = 90.0
CONCURRENCY = 8
HUNG_S = 40.0
"""KEEPALIVE_S + KEEPALIVE_TIMEOUT_S of a hung connection, the repeated call, and a busy machine."""


@dataclass
class Replicas:
    """Two replicas of a role on ports of their own."""

    role: str
    peer: Peer
    config: Path
    option: str
    """The setting that says where a replica listens."""
    ports: list[int]
    processes: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)

    @property
    def target(self) -> str:
        return "ipv4:" + ",".join(f"127.0.0.1:{port}" for port in self.ports)

    def name(self, index: int) -> str:
        return f"{'ref' if self.role == 'reference' else 'reward'}/{index}"

    async def start(self, *indices: int) -> None:
        """Starts replicas and waits until they have joined."""
        joined = len(self.peer.joins)
        for index in indices:
            arguments = [str(self.config), "--name", self.name(index), self.option, f"127.0.0.1:{self.ports[index]}"]
            command = [sys.executable, "-m", f"services.{self.role}", *arguments]
            self.processes[index] = subprocess.Popen(
                command, env=child_environment({"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"})
            )
        async with asyncio.timeout(START_TIMEOUT_S):
            while len(self.peer.joins) < joined + len(indices):
                assert all(process.poll() is None for process in self.processes.values())
                await asyncio.sleep(0.05)

    def worked(self, index: int) -> int:
        """Calls that its present incarnation has answered, as its heartbeats say."""
        incarnations = [join.incarnation for join in self.peer.joins if join.worker == self.name(index)]
        return max((beat.progress for beat in self.peer.beats if beat.incarnation == incarnations[-1]), default=0)

    def signal(self, index: int, number: signal.Signals) -> None:
        self.processes[index].send_signal(number)

    def end(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.wait(30)


Make = Callable[..., Replicas]


@pytest.fixture
async def make(store: StoreUnderTest, tmp_path: Path) -> AsyncIterator[Make]:
    made: list[Replicas] = []
    peer = Peer()
    async with serving(peer) as (_, controller):

        def make_one(role: str, option: str, model: Path, **sections: Any) -> Replicas:
            config = tmp_path / "run.yaml"
            made.append(Replicas(role, peer, config, option, [free_port(), free_port()]))
            tree = settings_tree(store, model, tmp_path, controller={"address": controller}, **sections)
            section = tree["reward"] if role == "reward" else tree["references"]["ref"]
            section["address"] = made[-1].target
            config.write_text(yaml.safe_dump(tree))
            return made[-1]

        yield make_one
        for replicas in made:
            replicas.end()


async def keep_busy(work: Callable[[int], Awaitable[None]], done: asyncio.Event) -> int:
    """Does `work` 0, 1, 2... CONCURRENCY at a time until `done`; how many there were. Raises what any of it raises."""
    numbers = iter(range(1_000_000))

    async def one_after_the_other() -> None:
        while not done.is_set():
            await work(next(numbers))

    async with asyncio.TaskGroup() as tasks:
        for _ in range(CONCURRENCY):
            tasks.create_task(one_after_the_other())
    return next(numbers)


async def disturb(replicas: Replicas, num_done: Callable[[], int]) -> None:
    """Under load: kills a replica, sees the other go on, brings it back and sees it used again."""
    await until(lambda: all(replicas.worked(index) > 5 for index in (0, 1)))
    replicas.signal(0, signal.SIGKILL)
    replicas.processes[0].wait(30)
    before = num_done()
    await until(lambda: num_done() > before + 20)
    await replicas.start(0)
    await until(lambda: replicas.worked(0) > 5)


@pytest.mark.timeout(200)
async def test_no_item_is_lost_or_miscounted_while_reward_replicas_die_and_come_back(
    make: Make, tmp_path: Path
) -> None:
    reward = {"components": {"correct": {"scorer": {"kind": "exact_match"}}}, "num_workers": 1, "timeout_s": 60.0}
    replicas = make("reward", "--reward.bind", tmp_path / "no-model", reward=reward)
    await replicas.start(0, 1)
    settings = load_settings(replicas.config)
    client, channel = open_client(settings.reward, replicas.target, RpcSection())
    right = 0

    async def score(number: int) -> None:
        nonlocal right
        items = [reward_pb2.ScoreItem(id=f"{number}/{i}", response_text=str(i), ground_truth="1") for i in range(4)]
        outcomes = await client.score(items)
        assert all(isinstance(outcome, Score) for outcome in outcomes), outcomes
        assert [outcome.value for outcome in outcomes if isinstance(outcome, Score)] == [0.0, 1.0, 0.0, 0.0]
        right += 1

    async with channel:
        done = asyncio.Event()
        load = asyncio.create_task(keep_busy(score, done))
        try:
            await disturb(replicas, lambda: right)
        finally:
            done.set()
            num_calls = await load
        assert right == num_calls
        await a_hung_one_costs_its_callers_one_deadline(replicas, client)


async def a_hung_one_costs_its_callers_one_deadline(replicas: Replicas, client: RewardClient) -> None:
    replicas.signal(1, signal.SIGSTOP)
    try:
        items = [
            [reward_pb2.ScoreItem(id=f"hung-{number}", response_text="1", ground_truth="1")] for number in range(4)
        ]
        async with asyncio.timeout(HUNG_S):
            outcomes = await asyncio.gather(*(client.score(each) for each in items))
        assert [outcome.value for (outcome,) in outcomes if isinstance(outcome, Score)] == [1.0] * 4
    finally:
        replicas.signal(1, signal.SIGCONT)


@pytest.mark.thorough("test_no_item_is_lost_or_miscounted_while_reward_replicas_die_and_come_back")
@pytest.mark.timeout(240)
async def test_every_row_gets_its_logprobs_while_references_die_hang_and_come_back(
    make: Make, store: StoreUnderTest, tmp_path: Path
) -> None:
    model = write_qwen3(tmp_path / "policy", seed=4)
    sections = {
        "algorithm": {"groups_per_batch": 4, "kl": {"reference": "ref", "kl_coef": 0.1}},
        "references": {"ref": {"token_budget": 64}},
    }
    replicas = make("reference", "--references.ref.bind", model, **sections)
    batches = Batches(store, model)
    rows = [row for group in batches.sampled(60) for row in group.rows]
    await replicas.start(0, 1)
    method = "rolecall.v1.ReferenceService/ComputeLogprobs"
    async with open_channel(replicas.target, party(), idempotent=[method]) as channel:
        reference = ReferenceServiceStub(channel)
        computed = 0

        async def compute(number: int) -> None:
            nonlocal computed
            part: list[RowRef] = [rows[number % 100]]
            answer = await reference.ComputeLogprobs(ComputeColumnRequest(ctl=store.ledger.ctl, rows=part), timeout=60)
            assert answer.num_tokens == part[0].num_tokens
            computed += 1

        done = asyncio.Event()
        load = asyncio.create_task(keep_busy(compute, done))
        try:
            await disturb(replicas, lambda: computed)
        finally:
            done.set()
            assert await load == computed
        replicas.signal(1, signal.SIGSTOP)
        try:
            async with asyncio.timeout(HUNG_S):
                calls = (
                    reference.ComputeLogprobs(ComputeColumnRequest(ctl=store.ledger.ctl, rows=[row]), timeout=HUNG_S)
                    for row in rows[100:]
                )
                await asyncio.gather(*calls)
        finally:
            replicas.signal(1, signal.SIGCONT)
    for read in store.rows.read(rows, ["token_ids", "response_mask", "ref/logprobs"]):
        expected = true_logprobs(model, read["token_ids"], batches.temperature) * read["response_mask"]
        np.testing.assert_allclose(read["ref/logprobs"], expected, atol=1e-4)
