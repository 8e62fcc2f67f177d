"""A whole run in one process with light roles: the real controller, rollout service, store, gRPC and membership around
engines without a model.

The trainers apply a step once and in order (chain, digest, record) and note which rows they trained, so that a test can
count. The rollouts sample by the scripted engine, whose weights of version v have a known digest and probe; the light
actor publishes exactly those.
"""

import asyncio
import json
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rolecall.checkpoint.manifest import store as store_file
from rolecall.checkpoint.storage import open_storage
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.errors import DiskFullError, OutOfOrderError, RoleCallError
from rolecall.reward import SERVICE_NAME as REWARD_SERVICE
from rolecall.reward import Scorer, description, one_by_one
from rolecall.rpc.channel import open_channel
from rolecall.rpc.fence import Fence
from rolecall.rpc.membership import Membership
from rolecall.rpc.server import Server
from rolecall.scoring.scores import Item, ScoreFunction
from rolecall.settings import RpcSection, RunSettings
from rolecall.store.ledger import Ledger
from rolecall.store.prompts import PromptQueue
from rolecall.store.rows import Rows
from rolecall.store.sealed import read_sealed
from rolecall.telemetry import Metrics
from rolecall.v1 import (
    actor_pb2,
    actor_pb2_grpc,
    controller_pb2,
    controller_pb2_grpc,
    critic_pb2_grpc,
    reward_pb2_grpc,
    rollout_pb2_grpc,
    weights_pb2,
)
from rolecall.v1 import training_pb2 as pb
from rolecall.v1.controller_pb2_grpc import ControllerServiceStub
from rolecall.v1.trajectory_pb2 import TrainBatch
from rolecall.wire import Array, encode_tensor
from services.controller.run import ControllerEngine
from services.controller.service import ControllerServicer
from services.rollout.pull import PullLoop, PullSettings
from services.rollout.replica import Replica
from services.rollout.scripted import ScriptedEngine, digest_of
from services.rollout.service import SERVICE_NAME as ROLLOUT_SERVICE
from services.rollout.service import RolloutServicer
from tests.fixtures_store import StoreUnderTest
from tests.tiny_models import write_tokenizer

MAX_GROUPS = 4


def set_event() -> asyncio.Event:
    """An event that has happened."""
    event = asyncio.Event()
    event.set()
    return event


@dataclass
class LightTrainer:
    """What actor and critic have in common. A record of every applied step stays, as in a checkpoint."""

    store: StoreUnderTest
    step: int = 0
    records: list[pb.TrainResult] = field(default_factory=list)
    trained: list[str] = field(default_factory=list)
    """Row ids in the order trained."""
    policy_version: int = -1
    failures: deque[RoleCallError] = field(default_factory=deque)
    """Errors that the next calls of train answer, one each."""
    disk_is_full: bool = False
    may_write: asyncio.Event = field(default_factory=set_event)
    """Clear, it holds up every checkpoint between its snapshot and its files."""

    async def train(self, request: pb.TrainRequest) -> AsyncIterator[pb.TrainResponse]:
        if self.failures:
            raise self.failures.popleft()
        if request.step > self.step:
            raise OutOfOrderError(f"step {self.step} is next, not {request.step}")
        if request.step == self.step:
            batch = await asyncio.to_thread(read_sealed, self.store.connection, self.store.run, request.step)
            assert batch.digest == request.digest
            await asyncio.to_thread(self.store.rows.read, list(batch.rows), ["token_ids", "advantages", "loss_mask"])
            yield pb.TrainResponse(progress=pb.TrainProgress(num_done=1, num_total=1))
            self.trained += [ref.id for ref in batch.rows]
            self.records.append(
                pb.TrainResult(step=request.step, digest=batch.digest, metrics=self.metrics_of(batch).to_proto())
            )
            self.step += 1
        yield pb.TrainResponse(result=self.records[request.step])

    def metrics_of(self, batch: TrainBatch) -> Metrics:
        """What the step says of itself."""
        return Metrics()

    async def save(self, request: pb.SaveTrainerCheckpointRequest) -> AsyncIterator[pb.SaveTrainerCheckpointResponse]:
        if self.disk_is_full:
            raise DiskFullError("no space for a checkpoint")
        state = {
            "step": self.step,
            "trained": self.trained,
            "version": self.policy_version,
            "digests": [record.digest for record in self.records],
        }
        yield pb.SaveTrainerCheckpointResponse(snapshot=pb.CheckpointSnapshot())
        await self.may_write.wait()
        file = store_file(open_storage(request.path), "state.json", lambda file: file.write(json.dumps(state).encode()))
        written = pb.CheckpointFile(name=file.name, num_bytes=file.num_bytes, checksum=file.checksum)
        yield pb.SaveTrainerCheckpointResponse(saved=pb.CheckpointFiles(files=[written]))

    def load(self, request: pb.LoadTrainerCheckpointRequest) -> pb.LoadTrainerCheckpointResponse:
        state = json.loads(open_storage(request.path).read("state.json"))
        self.step, self.trained, self.policy_version = state["step"], state["trained"], state["version"]
        self.records = [pb.TrainResult(step=step, digest=digest) for step, digest in enumerate(state["digests"])]
        return pb.LoadTrainerCheckpointResponse(step=self.step, policy_version=self.policy_version)


class LightActor(actor_pb2_grpc.ActorServiceServicer):
    """An actor without weights."""

    def __init__(self, trainer: LightTrainer) -> None:
        self.trainer = trainer
        self.publishes: list[tuple[int, int]] = []
        """(step, version) of each publish."""
        self.columns_asked: list[tuple[int, int]] = []
        """(step, rows) of each call for logprobs."""
        self.failures: deque[RoleCallError] = deque()
        """Errors that the next calls for logprobs answer, one each, when these are written."""
        self.lie = False
        """While true, the digest it names is another than the one it sent."""

    async def Train(self, request: pb.TrainRequest, context: Any) -> AsyncIterator[pb.TrainResponse]:
        async for event in self.trainer.train(request):
            yield event

    async def ComputeLogprobs(self, request: pb.ComputeColumnRequest, context: Any) -> pb.ComputeColumnResponse:
        if request.step != self.trainer.step:
            raise OutOfOrderError(f"logprobs of step {request.step} were asked for at step {self.trainer.step}")
        refs = list(request.rows)
        self.columns_asked.append((request.step, len(refs)))
        rows = await asyncio.to_thread(self.trainer.store.rows.read, refs, ["rollout_logprobs", "response_mask"])
        columns: list[dict[str, Array]] = [
            {"old_logprobs": row["rollout_logprobs"], "sum_squared_probs": row["response_mask"].astype(np.float32) / 2}
            for row in rows
        ]
        num_already_written = await asyncio.to_thread(self.trainer.store.rows.put, refs, columns)
        if self.failures:
            raise self.failures.popleft()
        return pb.ComputeColumnResponse(num_already_written=num_already_written)

    async def OpenWeightChannel(
        self, request: weights_pb2.OpenWeightChannelRequest, context: Any
    ) -> weights_pb2.OpenWeightChannelResponse:
        return weights_pb2.OpenWeightChannelResponse(address="127.0.0.1:1", backend=weights_pb2.WEIGHT_BACKEND_GLOO)

    async def PublishWeights(
        self, request: actor_pb2.PublishWeightsRequest, context: Any
    ) -> actor_pb2.PublishWeightsResponse:
        assert request.step == self.trainer.step
        assert request.policy_version > self.trainer.policy_version
        self.trainer.policy_version = version = request.policy_version
        self.publishes.append((request.step, version))
        logprobs = np.full(request.probe.token_ids.shape[0], -(version + 1) / 8, np.float32)
        logprobs[0] = 0
        return actor_pb2.PublishWeightsResponse(
            fingerprints=[weights_pb2.Fingerprint(name="model.weight", value=version)],
            digest="another" if self.lie else digest_of(version),
            probe=weights_pb2.Probe(logprobs=encode_tensor(logprobs), again=encode_tensor(logprobs)),
            num_bytes=8,
            transfer_s=0.001,
        )

    async def SaveCheckpoint(
        self, request: pb.SaveTrainerCheckpointRequest, context: Any
    ) -> AsyncIterator[pb.SaveTrainerCheckpointResponse]:
        async for event in self.trainer.save(request):
            yield event

    async def LoadCheckpoint(
        self, request: pb.LoadTrainerCheckpointRequest, context: Any
    ) -> pb.LoadTrainerCheckpointResponse:
        return self.trainer.load(request)

    async def Offload(self, request: pb.OffloadRequest, context: Any) -> pb.OffloadResponse:
        return pb.OffloadResponse()

    async def Onload(self, request: pb.OnloadRequest, context: Any) -> pb.OnloadResponse:
        return pb.OnloadResponse()

    async def GetInfo(self, request: pb.GetTrainerInfoRequest, context: Any) -> pb.GetTrainerInfoResponse:
        return pb.GetTrainerInfoResponse(
            worker="actor.light", step=self.trainer.step, policy_version=self.trainer.policy_version, world_size=1
        )


class LightCritic(critic_pb2_grpc.CriticServiceServicer):
    """A critic that values every sampled token 0.5."""

    def __init__(self, trainer: LightTrainer) -> None:
        self.trainer = trainer

    async def ComputeValues(self, request: pb.ComputeColumnRequest, context: Any) -> pb.ComputeColumnResponse:
        if request.step != self.trainer.step:
            raise OutOfOrderError(f"values of step {request.step} were asked for at step {self.trainer.step}")
        refs = list(request.rows)
        rows = await asyncio.to_thread(self.trainer.store.rows.read, refs, ["response_mask"])
        columns: list[dict[str, Array]] = [
            {"values": row["response_mask"].astype(np.float32) / 2, "bootstrap_value": np.full(1, 0.5, np.float32)}
            for row in rows
        ]
        return pb.ComputeColumnResponse(
            num_already_written=await asyncio.to_thread(self.trainer.store.rows.put, refs, columns)
        )

    async def Train(self, request: pb.TrainRequest, context: Any) -> AsyncIterator[pb.TrainResponse]:
        async for event in self.trainer.train(request):
            yield event

    async def SaveCheckpoint(
        self, request: pb.SaveTrainerCheckpointRequest, context: Any
    ) -> AsyncIterator[pb.SaveTrainerCheckpointResponse]:
        async for event in self.trainer.save(request):
            yield event

    async def LoadCheckpoint(
        self, request: pb.LoadTrainerCheckpointRequest, context: Any
    ) -> pb.LoadTrainerCheckpointResponse:
        return self.trainer.load(request)

    async def Offload(self, request: pb.OffloadRequest, context: Any) -> pb.OffloadResponse:
        return pb.OffloadResponse()

    async def Onload(self, request: pb.OnloadRequest, context: Any) -> pb.OnloadResponse:
        return pb.OnloadResponse()

    async def GetInfo(self, request: pb.GetTrainerInfoRequest, context: Any) -> pb.GetTrainerInfoResponse:
        return pb.GetTrainerInfoResponse(worker="critic.light", step=self.trainer.step, policy_version=-1, world_size=1)


def parity(item: Item) -> float:
    """1 for responses of an even number of tokens: a reward that differs within a group."""
    return float(item.num_response_tokens % 2 == 0)


@dataclass
class LightRun:
    """The roles of one run and the ways to start a controller over them."""

    settings: RunSettings
    store: StoreUnderTest
    actor: LightActor
    critic: LightCritic
    stack: AsyncExitStack

    @asynccontextmanager
    async def controller(self) -> AsyncIterator[tuple[ControllerServiceStub, "asyncio.Task[None]"]]:
        """A served controller and the task that runs its loop; both end with the context."""
        engine = ControllerEngine(self.settings)
        server = Server(RpcSection(), str(self.settings.controller.address))
        server.add(
            controller_pb2_grpc.add_ControllerServiceServicer_to_server,
            ControllerServicer(engine),
            "rolecall.v1.ControllerService",
        )
        await server.start()
        channel = open_channel(str(self.settings.controller.address), RpcSection())
        running = asyncio.create_task(engine.run())
        try:
            yield ControllerServiceStub(channel), running
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await channel.close()
            await server.drain(0.1)
            await engine.close()

    @asynccontextmanager
    async def rollout(
        self, worker: str, token_s: float = 0.0, engine: ScriptedEngine | None = None
    ) -> AsyncIterator[ScriptedEngine]:
        """A rollout replica that joins, pulls and serves until the context ends; then it is silent, as a killed process
        is.
        """
        consumer = f"{worker}.{id(object()):x}"
        engine = engine or ScriptedEngine(token_s=token_s, vocab_size=200)
        server = Server(RpcSection(), "127.0.0.1:0")
        replica = Replica(
            engine, pause_timeout_s=5.0, load_timeout_s=5.0, keep_timeout_s=5.0, on_serving=server.set_serving
        )
        chat = ChatTokenizer(self.settings.model.path)
        connection = self.store.connect()
        rows = Rows(connection, self.store.run, self.settings.store.num_shards)
        pull = PullLoop(
            PullSettings(
                consumer,
                MAX_GROUPS,
                self.settings.controller.lease_s,
                30.0,
                60,
                self.settings.controller.max_deliveries,
            ),
            replica,
            PromptQueue(connection, self.store.run, consumer),
            rows,
            chat,
            lambda phase: None,
        )
        servicer = RolloutServicer(
            replica, pull, chat, Fence(1), consumer=consumer, max_groups=MAX_GROUPS, generation_timeout_s=30.0
        )
        server.add(rollout_pb2_grpc.add_RolloutServiceServicer_to_server, servicer, ROLLOUT_SERVICE)
        address = await server.start()
        name, _, incarnation = consumer.partition(".")
        membership = Membership(
            self.settings, controller_pb2.ROLE_ROLLOUT, name, incarnation, address, num_weight_ranks=1
        )
        membership.start()
        pulling = asyncio.create_task(pull.run())
        try:
            yield engine
        finally:
            pulling.cancel()
            await asyncio.gather(pulling, return_exceptions=True)
            membership.stop()
            await server.drain(0.1)

    def metrics(self) -> list[dict[str, float]]:
        """Lines of metrics.jsonl that are of a step, not of an evaluation."""
        lines = [json.loads(line) for line in (self.settings.run.dir / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if "reward/mean" in line]


@asynccontextmanager
async def light_run(
    store: StoreUnderTest,
    folder: Path,
    make_settings: Callable[..., RunSettings],
    *,
    score: ScoreFunction = parity,
    **sections: Any,
) -> AsyncIterator[LightRun]:
    """Serves actor, critic and reward; `sections` are merged over a run of 3 steps of 4 groups of 2."""
    async with AsyncExitStack() as stack:
        write_tokenizer(folder / "model")
        (folder / "train.jsonl").write_text(
            "".join(json.dumps({"prompt": f"number {i}", "ground_truth": str(i)}) + "\n" for i in range(30))
        )
        spec = description("parity", (0, 1), ("response_text", "ground_truth"), {}, False, max_items=0)
        actor, critic = LightActor(LightTrainer(store)), LightCritic(LightTrainer(store))
        addresses = [
            await _served(stack, actor_pb2_grpc.add_ActorServiceServicer_to_server, actor, "rolecall.v1.ActorService"),
            await _served(
                stack, critic_pb2_grpc.add_CriticServiceServicer_to_server, critic, "rolecall.v1.CriticService"
            ),
            await _served(
                stack,
                reward_pb2_grpc.add_RewardServiceServicer_to_server,
                Scorer(spec, one_by_one(score, spec), None),
                REWARD_SERVICE,
            ),
            await _free_port(),
        ]
        defaults: dict[str, dict[str, Any]] = {
            "run": {"name": store.run, "dir": str(folder / "run"), "num_steps": 3, "checkpoint_every_steps": 2},
            "data": {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 48},
            "sampling": {"num_responses": 2, "max_tokens": 12},
            "algorithm": {"groups_per_batch": 4},
            "controller": {
                "address": addresses[3],
                "lease_s": 1.5,
                "heartbeat_s": 0.1,
                "start_timeout_s": 20.0,
                "stall_timeout_s": 20.0,
            },
            "actor": {"address": addresses[0]},
            "reward": {"address": addresses[2], "timeout_s": 5.0},
            "store": {"url": store.section.url.get_secret_value() if store.section.url else None, "num_shards": 2},
            "trackers": {"tensorboard": False},
        }
        if sections.get("algorithm", {}).get("advantage", {}).get("kind") == "gae":
            defaults["critic"] = {"address": addresses[1]}
        merged = {
            name: {**defaults.get(name, {}), **sections.get(name, {})} for name in defaults.keys() | sections.keys()
        }
        settings = make_settings(**merged)
        settings.run.dir.mkdir(exist_ok=True)
        yield LightRun(settings, store, actor, critic, stack)


async def _served(stack: AsyncExitStack, add: Callable[[Any, Any], None], servicer: object, name: str) -> str:
    server = Server(RpcSection(), "127.0.0.1:0")
    server.add(add, servicer, name)
    address = await server.start()
    await server.set_serving(True)
    stack.push_async_callback(server.drain, 0.1)
    return address


async def _free_port() -> str:
    server = await asyncio.start_server(lambda reader, writer: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    server.close()
    await server.wait_closed()
    return f"127.0.0.1:{port}"


def balance(run: LightRun) -> tuple[int, int, int, int]:
    """admitted, trained, dropped, live; they balance."""
    counts = Ledger(run.store.connection, run.store.run).counts()
    dropped = sum(counts.dropped.values())
    assert counts.admitted == counts.trained + dropped + counts.live
    return counts.admitted, counts.trained, dropped, counts.live


def check_trained_once(trainer: LightTrainer, num_rows: int) -> None:
    """`num_rows` rows were trained, each once."""
    assert max(Counter(trainer.trained).values()) == 1
    assert len(trainer.trained) == num_rows


async def saved(stub: ControllerServiceStub) -> None:
    """Returns when a checkpoint was made."""
    await stub.SaveCheckpoint(controller_pb2.SaveCheckpointRequest(), timeout=60.0)
