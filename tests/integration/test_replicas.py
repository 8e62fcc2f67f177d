"""Replicas behind one address: reward services and references in processes of their own, of which some are killed,
stopped and started again under load.
"""

import asyncio
import signal
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
import yaml

from rolecall.reward import SERVICE_NAME
from rolecall.rpc.channel import open_channel
from rolecall.rpc.options import channel_options
from rolecall.rpc.server import Server
from rolecall.scoring.client import RewardClient, open_client
from rolecall.scoring.scores import Score
from rolecall.settings import RpcSection, child_environment, load_settings
from rolecall.v1 import reward_pb2, reward_pb2_grpc
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


class Names(asyncio.DatagramProtocol):
    """A name server that has `addresses` for every name, as a headless service whose replicas come and go."""

    def __init__(self) -> None:
        self.addresses = ["127.0.0.1"]
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.DatagramTransport) -> None:  # type: ignore[override]
        self._transport = transport

    def datagram_received(self, data: bytes, addr: Any) -> None:
        """Answers a question for addresses of IPv4; others have no answer."""
        end = data.index(0, 12) + 5  # the name, its type, its class
        is_ipv4 = data[end - 4 : end - 2] == b"\0\1"
        answers = [
            b"\xc0\x0c" + struct.pack("!HHIH", 1, 1, 5, 4) + socket.inet_aton(address)
            for address in (self.addresses if is_ipv4 else ())
        ]
        head = data[:2] + struct.pack("!HHHHH", 0x8180, 1, len(answers), 0, 0)
        assert self._transport is not None
        self._transport.sendto(head + data[12:end] + b"".join(answers), addr)


class Counting(reward_pb2_grpc.RewardServiceServicer):
    """A scorer that counts its calls, and answers a slow one once it may."""

    def __init__(self, may_answer: asyncio.Event) -> None:
        self.num_calls = 0
        self._may_answer = may_answer

    async def Score(
        self, request: reward_pb2.ScoreRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> reward_pb2.ScoreResponse:
        self.num_calls += 1
        if request.items[0].id == "slow":
            await self._may_answer.wait()
        return reward_pb2.ScoreResponse()

    async def Describe(
        self, request: reward_pb2.DescribeRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> reward_pb2.DescribeResponse:
        return reward_pb2.DescribeResponse()


@asynccontextmanager
async def counting(may_answer: asyncio.Event, host: str, port: int) -> AsyncIterator[Counting]:
    """A replica on `port` of `host`, whose callers connect again after a second."""
    scorer, server = Counting(may_answer), Server(RpcSection(), f"{host}:{port}", max_age_s=1.0)
    server.add(reward_pb2_grpc.add_RewardServiceServicer_to_server, scorer, SERVICE_NAME)
    await server.start()
    try:
        yield scorer
    finally:
        await server.drain(0.0)


async def test_a_replica_that_is_added_behind_the_name_is_called_and_no_call_ends_with_its_connection() -> None:
    may_answer, port, done = asyncio.Event(), free_port(), asyncio.Event()
    transport, names = await asyncio.get_running_loop().create_datagram_endpoint(Names, ("127.0.0.1", 0))
    target = f"dns://127.0.0.1:{transport.get_extra_info('sockname')[1]}/reward.test:{port}"
    often = ("grpc.dns_min_time_between_resolutions_ms", 100)  # 30 s otherwise
    # no method is repeated by itself: a call that is lost is seen
    options = [*channel_options([], loopback=False), often, ("grpc.enable_http_proxy", 0)]
    async with AsyncExitStack() as replicas, grpc.aio.insecure_channel(target, options) as channel:
        replicas.callback(transport.close)
        first = await replicas.enter_async_context(counting(may_answer, "127.0.0.1", port))
        stub = reward_pb2_grpc.RewardServiceStub(channel)

        async def score(number: int | str) -> None:
            request = reward_pb2.ScoreRequest(items=[reward_pb2.ScoreItem(id=str(number))])
            await stub.Score(request, timeout=100)

        slow = asyncio.create_task(score("slow"))
        load = asyncio.create_task(keep_busy(score, done))
        try:
            await until(lambda: first.num_calls > 20)
            added = [
                await replicas.enter_async_context(counting(may_answer, host, port))
                for host in ("127.0.0.2", "127.0.0.3")
            ]
            names.addresses = ["127.0.0.1", "127.0.0.2", "127.0.0.3"]
            await until(lambda: all(replica.num_calls > 20 for replica in (first, *added)))
            assert not slow.done()
        finally:
            done.set()
            may_answer.set()
            await load
        await slow
