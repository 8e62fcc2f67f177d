"""A whole rollout replica in this process: the real servicer, server, pull loop and store around the scripted
engine.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import numpy as np

from rolecall.data.tokenizer import ChatTokenizer
from rolecall.rpc.channel import open_channel
from rolecall.rpc.fence import Fence
from rolecall.rpc.server import Server
from rolecall.store.prompts import PromptQueue
from rolecall.store.rows import Rows
from rolecall.store.sealed import read_ctl
from rolecall.v1 import rollout_pb2, rollout_pb2_grpc, trajectory_pb2, weights_pb2
from rolecall.wire import encode_tensor
from services.rollout.groups import MixedGroups
from services.rollout.pull import PullLoop, PullSettings
from services.rollout.replica import Replica
from services.rollout.scripted import ScriptedEngine, digest_of
from tests.fixtures_store import StoreUnderTest
from tests.twins.callers import party
from tests.twins.rollout import BriefQueue, RolloutTwin
from tests.waiting import until

CONSUMER = "rollout-0.abc"
PROMPT = (5, 6, 7)
MAX_GROUPS = 4


@dataclass
class ReplicaUnderTest:
    """What a test talks to."""

    engine: ScriptedEngine
    replica: Replica
    pull: PullLoop
    stub: rollout_pb2_grpc.RolloutServiceStub
    channel: grpc.aio.Channel
    store: StoreUnderTest
    pulling: "asyncio.Task[None]"
    epoch: int = 0
    phases: list[str] = field(default_factory=list)
    consumer: str = CONSUMER
    environment: str = ""
    """Name of the environment that prompts are played in; empty: none."""

    async def receive(
        self, version: int, *, mode: rollout_pb2.PauseMode.ValueType = rollout_pb2.PAUSE_MODE_KEEP, ctl: int = 1
    ) -> rollout_pb2.ReceiveWeightsResponse:
        """Opens an epoch if there is none and transfers `version`."""
        if not self.epoch:
            await self.open_epoch(1)
        probe = weights_pb2.Probe(token_ids=encode_tensor(np.array([5, 6, 7, 8], dtype=np.int32)), num_decoded=2)
        return await self.stub.ReceiveWeights(
            rollout_pb2.ReceiveWeightsRequest(
                ctl=ctl, epoch=self.epoch, policy_version=version, pause_mode=mode, bucket_timeout_s=1, probe=probe
            )
        )

    async def open_epoch(self, epoch: int) -> None:
        place = weights_pb2.JoinWeightChannelRequest(
            ctl=1, epoch=epoch, address="127.0.0.1:1", rank=1, world_size=2, timeout_s=1
        )
        place.backend = weights_pb2.WEIGHT_BACKEND_GLOO
        await self.stub.JoinWeightChannel(place)
        self.epoch = epoch

    async def resume(self, version: int, digest: str | None = None) -> None:
        await self.stub.Resume(
            rollout_pb2.ResumeRequest(ctl=1, policy_version=version, digest=digest or digest_of(version))
        )

    async def publish(
        self, version: int, *, mode: rollout_pb2.PauseMode.ValueType = rollout_pb2.PAUSE_MODE_KEEP
    ) -> None:
        """A whole publish, store included."""
        await asyncio.to_thread(self.store.ledger.begin_publish, version, version)
        await self.receive(version, mode=mode)
        await asyncio.to_thread(self.store.ledger.attest, version, version, digest_of(version), [self.consumer])
        await self.resume(version)

    async def sleep(
        self, level: int = 2, *, mode: rollout_pb2.PauseMode.ValueType = rollout_pb2.PAUSE_MODE_KEEP
    ) -> None:
        """Puts the engine to sleep, paused."""
        await self.stub.Pause(rollout_pb2.PauseRequest(ctl=1, mode=mode))
        await self.stub.Sleep(rollout_pb2.SleepRequest(ctl=1, level=level))

    async def generate(self, num_responses: int = 4, **fields: object) -> list[rollout_pb2.GenerateResponse]:
        request = generate_request(num_responses, **fields)
        request.prompt.environment = self.environment
        return [response async for response in self.stub.Generate(request)]

    async def info(self) -> rollout_pb2.GetRolloutInfoResponse:
        return await self.stub.GetInfo(rollout_pb2.GetRolloutInfoRequest())

    def admit(
        self,
        count: int,
        *,
        num_responses: int = 4,
        max_tokens: int = 20,
        prompt: tuple[int, ...] = PROMPT,
        greedy_response: bool = False,
    ) -> None:
        """Admits the next `count` groups."""
        first = self.store.ledger.position().next_gid
        for gid in range(first, first + count):
            group = trajectory_pb2.PromptGroup(
                gid=gid,
                prompt=trajectory_pb2.Prompt(
                    uid=f"u{gid}",
                    token_ids=np.array(prompt, dtype="<i4").tobytes(),
                    ground_truth="42",
                    environment=self.environment,
                ),
                num_responses=num_responses,
                sampling=trajectory_pb2.SamplingParams(temperature=1.0, top_p=1.0, max_tokens=max_tokens),
                run_seed=11,
                greedy_response=greedy_response,
            )
            assert self.store.ledger.admit(group, b"")

    async def runs(self, count: int) -> None:
        """Waits until the engine has `count` responses to sample."""
        await until(lambda: self.engine.num_running == count)

    async def committed(self, count: int) -> list[trajectory_pb2.CommittedGroup]:
        """Waits for `count` committed groups."""
        found: list[tuple[str, trajectory_pb2.CommittedGroup]] = []
        async with asyncio.timeout(60):
            while len(found) < count:
                found = await asyncio.to_thread(self.store.ledger.read_committed, "0", 1000, 0.2)
        return [group for _, group in found]


def generate_request(num_responses: int = 4, **fields: object) -> rollout_pb2.GenerateRequest:
    """The smallest valid one; `fields` replace its own."""
    request = rollout_pb2.GenerateRequest(
        id="eval/0/heldout/1",
        prompt=trajectory_pb2.Prompt(uid="1", token_ids=np.array(PROMPT, dtype="<i4").tobytes()),
        num_responses=num_responses,
        sampling=trajectory_pb2.SamplingParams(temperature=1.0, top_p=1.0, max_tokens=20),
        seed=3,
    )
    request.MergeFrom(rollout_pb2.GenerateRequest(**fields))  # type: ignore[arg-type]
    return request


@contextlib.asynccontextmanager
async def replica_under_test(
    store: StoreUnderTest,
    tokenizer: Path,
    engine: ScriptedEngine,
    *,
    generation_timeout_s: float = 60.0,
    pause_timeout_s: float = 5.0,
    keep_timeout_s: float = 10.0,
    lease_s: float = 3.0,
    consumer: str = CONSUMER,
    sampler: Callable[[Replica], MixedGroups] = MixedGroups,
    queue: PromptQueue | None = None,
    rows: Rows | None = None,
    shows_images: bool = False,
    row_expiry_s: int = 60,
    environment: str = "",
) -> AsyncIterator[ReplicaUnderTest]:
    """Serves `engine` on a free port and pulls from `store`, by `queue` and `rows` where they are given. `environment`:
    of the prompts that a test admits or asks for.
    """
    settings = PullSettings(consumer, MAX_GROUPS, lease_s, generation_timeout_s, row_expiry_s, 3, shows_images)
    twin = RolloutTwin(
        engine,
        settings,
        queue or BriefQueue(store.connection, store.run, consumer),
        rows or store.rows,
        ChatTokenizer(tokenizer),
        Server(party(), "127.0.0.1:0"),
        fence=Fence(lambda: read_ctl(store.connection, store.run)),
        sampler=sampler,
        pause_timeout_s=pause_timeout_s,
        keep_timeout_s=keep_timeout_s,
    )
    phases: list[str] = []
    twin.on_turn = phases.append
    channel = open_channel(await twin.start(), party())
    stub = rollout_pb2_grpc.RolloutServiceStub(channel)
    try:
        yield ReplicaUnderTest(
            engine,
            twin.replica,
            twin.pull,
            stub,
            channel,
            store,
            twin.pulling,
            phases=phases,
            consumer=consumer,
            environment=environment,
        )
    finally:
        await channel.close()
        await twin.close()
