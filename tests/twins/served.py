"""Trainers under test that are served in this process: the real servicer on a real server, over a tiny real model and
batches sealed in a real store.
"""

import asyncio
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import torch
import yaml
from transformers import AutoModelForCausalLM, PreTrainedModel

from rolecall.errors import RoleCallError
from rolecall.rpc.channel import open_channel
from rolecall.rpc.fence import Fence
from rolecall.rpc.server import Server
from rolecall.rpc.tokens import FOLDER
from rolecall.settings import RunSettings
from rolecall.store.connection import Connection
from rolecall.store.sealed import read_ctl
from rolecall.training.packing.pieces import join
from rolecall.training.ranks.device import stop_rank
from rolecall.training.serving.calls import ColumnCalls, TrainerCalls
from rolecall.training.serving.device_thread import DeviceThread
from rolecall.training.serving.hooks import ProcessHooks
from rolecall.v1 import actor_pb2, actor_pb2_grpc, critic_pb2_grpc, reference_pb2_grpc, weights_pb2
from rolecall.v1.training_pb2 import (
    CheckpointFile,
    SaveTrainerCheckpointRequest,
    SaveTrainerCheckpointResponse,
    TrainRequest,
    TrainResponse,
    TrainResult,
)
from rolecall.v1.trajectory_pb2 import Coefficients, CommittedGroup, RowRef, SamplingParams, TrainBatch, TrajectoryMeta
from rolecall.wire import Array, encode_tensor
from services.actor import ranks as actor_ranks
from services.actor.service import ActorServicer
from services.critic import ranks as critic_ranks
from services.critic.service import CriticServicer
from services.reference import ranks as reference_ranks
from services.reference.service import ReferenceServicer
from tests.fixtures_store import DIGEST, StoreUnderTest
from tests.smallest import smallest_tree
from tests.twins.callers import party, place
from tests.twins.calls import trainer_calls

MakeRun = Callable[..., RunSettings]
NUM_PROMPT_TOKENS = 4
PROBE = np.arange(5, 37, dtype=np.int32)
"""Token ids of a publish's probe."""


def settings_tree(store: StoreUnderTest, model: Path, run_dir: Path, **sections: Any) -> dict[str, Any]:
    """Returns the settings of a run over `store` and `model`: four groups of two, one mini-batch. Its processes have
    the tokens of this one.
    """
    if not (run_dir / FOLDER).exists():
        place(run_dir)
    tree = smallest_tree(
        run_dir,
        run={"name": store.run, "dir": str(run_dir), "num_steps": 10, "seed": 3},
        model={"path": str(model), "dtype": "float32"},
        data={"train": str(run_dir / "train.jsonl"), "max_prompt_tokens": 48},
        sampling={"num_responses": 2, "max_tokens": 16, "temperature": 0.8},
        algorithm={"groups_per_batch": 4},
        actor={"token_budget": 64, "num_threads": 1, "optimizer": {"learning_rate": 1e-3}},
        store={"url": store.url, "num_shards": 2},
    )
    return tree | sections


def write_settings(store: StoreUnderTest, model: Path, folder: Path, **sections: Any) -> Path:
    """Writes what `settings_tree` returns to run.yaml in `folder`, which is the run's directory, too."""
    config = folder / "run.yaml"
    config.write_text(yaml.safe_dump(settings_tree(store, model, folder, **sections)))
    return config


def true_distribution(model: Path, token_ids: Array, temperature: float) -> Array:
    """Returns float32 [T, V] by plain transformers: the log-probabilities of every id in the place of token t; row 0
    is zeros.
    """
    with torch.no_grad():
        logits = _network(model)(torch.from_numpy(token_ids.astype(np.int64))[None]).logits[0] / temperature
    log_p = np.asarray(torch.log_softmax(logits, -1).numpy(), np.float32)
    return np.concatenate([np.zeros_like(log_p[:1]), log_p[:-1]])


def true_logprobs(model: Path, token_ids: Array, temperature: float) -> Array:
    """Returns float32 [T] by plain transformers: the oracle."""
    return np.take_along_axis(true_distribution(model, token_ids, temperature), token_ids.astype(np.int64)[:, None], 1)[
        :, 0
    ]


@functools.cache
def _network(model: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()


@dataclass
class Batches:
    """A maker of sealed batches out of random trajectories with the true logprobs of `model`."""

    store: StoreUnderTest
    model: Path
    temperature: float = 0.8
    num_groups: int = 4
    num_responses: int = 2
    num_segments: int = 1
    policy_version: int = 0
    coefficients: Coefficients = field(default_factory=Coefficients)
    critic_only: bool = False
    returns_std: float = 0.1
    workers: tuple[str, ...] = ("r.0",)
    """The rollouts that sample, as many groups each."""
    drifted: str = ""
    """The one whose logprobs are not those of `model`."""

    def sampled(self, num_groups: int | None = None) -> list[CommittedGroup]:
        """Returns committed groups that nobody scored."""
        num_groups = num_groups or self.num_groups
        first = self.store.ledger.position().next_gid
        for gid in range(first, first + num_groups):
            self.store.admit(1)
            assert self.store.ledger.position().next_gid == gid + 1
        self.store.publish(self.policy_version, self.store.ledger.position().step, *self.workers)
        queues = [self.store.worker(worker) for worker in self.workers]
        groups = []
        claims = [(queue, claim) for queue in queues for claim in queue.claim(num_groups // len(queues))]
        for queue, claim in claims:
            rng = np.random.default_rng(claim.group.gid)
            drawn = [[self._row(rng) for _ in range(self.num_segments)] for _ in range(self.num_responses)]
            rows = [join(segments) for segments in drawn]
            if self.drifted and claim.token.startswith(self.drifted):
                for row in rows:
                    row["rollout_logprobs"] = (row["rollout_logprobs"] - row["response_mask"]).astype(np.float32)
            starts = [np.cumsum([each["token_ids"].size for each in segments])[:-1].tolist() for segments in drawn]
            refs = [
                self.store.rows.ref(f"{claim.group.gid}/{i}", claim.token, row["token_ids"].size, starts[i])
                for i, row in enumerate(rows)
            ]
            metas = [
                TrajectoryMeta(
                    id=ref.id, gid=claim.group.gid, sampling=SamplingParams(temperature=self.temperature, top_p=1.0)
                )
                for ref in refs
            ]
            self.store.rows.stage_many(refs, rows, metas, 60)
            group = CommittedGroup(gid=claim.group.gid, rows=refs)
            assert queue.commit(claim, group, {(self.policy_version, DIGEST)})
            self.store.rows.persist(refs)
            groups.append(group)
        self.policy_version += 1
        return groups

    def sealed(self, step: int, digest: str = "") -> TrainBatch:
        """Seals the batch of `step`, with advantages of both signs."""
        groups = self.sampled()
        refs = [ref for group in groups for ref in group.rows]
        self.score(refs)
        batch = self.store.batch(step, groups, digest or f"batch-{step}")
        batch.coefficients.CopyFrom(self.coefficients)
        batch.critic_only = self.critic_only
        assert self.store.ledger.seal(batch)
        return batch

    def score(self, refs: Sequence[RowRef]) -> None:
        """Writes loss_mask, advantages, values and returns as a controller and a critic would."""
        scored = []
        for index, (ref, row) in enumerate(zip(refs, self.store.rows.read(refs, ["response_mask"]), strict=True)):
            mask = row["response_mask"]
            noise = np.random.default_rng(index).normal(size=ref.num_tokens).astype(np.float32)
            spread = np.float32(1 if index % 2 else -1) * mask.astype(np.float32)
            scored.append(
                {
                    "loss_mask": mask,
                    "advantages": spread,
                    "values": 0.1 * noise * mask,
                    "returns": (0.5 + self.returns_std * noise.astype(np.float64)).astype(np.float32) * mask,
                }
            )
        self.store.rows.put(
            refs,
            [
                {name: array.astype(np.uint8 if name == "loss_mask" else np.float32) for name, array in row.items()}
                for row in scored
            ],
        )

    def commit(self, result: TrainResult) -> None:
        """Counts the step as trained."""
        assert self.store.ledger.commit_step(result.step, [result])

    def _row(self, rng: np.random.Generator) -> dict[str, Array]:
        length = int(rng.integers(NUM_PROMPT_TOKENS + 2, NUM_PROMPT_TOKENS + 16))
        token_ids = rng.integers(3, 250, length).astype(np.int32)
        mask = (np.arange(length) >= NUM_PROMPT_TOKENS).astype(np.uint8)
        return {
            "token_ids": token_ids,
            "response_mask": mask,
            "rollout_logprobs": true_logprobs(self.model, token_ids, self.temperature) * mask,
            "policy_versions": np.where(mask, self.policy_version, -1).astype(np.int32),
        }


@dataclass
class Rig:
    """A served trainer and the way to it."""

    channel: grpc.aio.Channel
    engine: Any
    calls: ColumnCalls
    settings: RunSettings


@asynccontextmanager
async def served_actor(
    settings: RunSettings, store: StoreUnderTest
) -> AsyncIterator[tuple[Rig, actor_pb2_grpc.ActorServiceStub]]:
    """Serves an actor at step 0."""

    def add(server: Server, actor: Any, calls: TrainerCalls) -> None:
        servicer = ActorServicer(actor, calls)
        server.add(actor_pb2_grpc.add_ActorServiceServicer_to_server, servicer, "rolecall.v1.ActorService")

    async with _served_trainer(settings, store, "actor", actor_ranks.build, settings.actor.token_budget, add) as rig:
        yield rig, actor_pb2_grpc.ActorServiceStub(rig.channel)
        await asyncio.to_thread(rig.engine.close)


@asynccontextmanager
async def served_critic(
    settings: RunSettings, store: StoreUnderTest
) -> AsyncIterator[tuple[Rig, critic_pb2_grpc.CriticServiceStub]]:
    """Serves a critic at step 0."""
    assert settings.critic is not None

    def add(server: Server, critic: Any, calls: TrainerCalls) -> None:
        servicer = CriticServicer(calls)
        server.add(critic_pb2_grpc.add_CriticServiceServicer_to_server, servicer, "rolecall.v1.CriticService")

    async with _served_trainer(settings, store, "critic", critic_ranks.build, settings.critic.token_budget, add) as rig:
        yield rig, critic_pb2_grpc.CriticServiceStub(rig.channel)


@asynccontextmanager
async def _served_trainer(
    settings: RunSettings,
    store: StoreUnderTest,
    worker: str,
    build: Callable[[RunSettings, Connection, ProcessHooks], Any],
    token_budget: int,
    add: Callable[[Server, Any, TrainerCalls], None],
) -> AsyncIterator[Rig]:
    connection = store.connect()
    device_thread = DeviceThread()
    hooks = ProcessHooks(worker, device_thread.progressed)
    trainer = await _built(device_thread, lambda: build(settings, connection, hooks))
    fence = Fence(lambda: read_ctl(connection, settings.run.name))
    sealed = store.connect()
    run = settings.run
    calls = trainer_calls(trainer, sealed, run.name, fence, run.checkpoints, token_budget, device_thread=device_thread)
    server = Server(party(), "127.0.0.1:0")
    add(server, trainer, calls)
    async with _served(settings, server, trainer, calls) as rig:
        yield rig


@asynccontextmanager
async def served_reference(
    settings: RunSettings, instance: str, store: StoreUnderTest
) -> AsyncIterator[reference_pb2_grpc.ReferenceServiceStub]:
    """Serves the reference `instance`."""
    async with served_reference_rig(settings, instance, store) as rig:
        yield reference_pb2_grpc.ReferenceServiceStub(rig.channel)


@asynccontextmanager
async def served_reference_rig(settings: RunSettings, instance: str, store: StoreUnderTest) -> AsyncIterator[Rig]:
    """Serves the reference `instance`."""
    connection = store.connect()
    device_thread = DeviceThread()
    engine = await _built(device_thread, lambda: reference_ranks.build(settings, instance, connection, ProcessHooks()))
    fence = Fence(lambda: read_ctl(connection, settings.run.name))
    calls = ColumnCalls(engine, device_thread, fence, settings.references[instance].token_budget)
    server = Server(party(), "127.0.0.1:0")
    servicer = ReferenceServicer(engine, calls, instance, "ref.1")
    server.add(reference_pb2_grpc.add_ReferenceServiceServicer_to_server, servicer, "rolecall.v1.ReferenceService")
    async with _served(settings, server, engine, calls) as rig:
        yield rig


async def _built(device_thread: DeviceThread, build: Callable[[], Any]) -> Any:
    """Builds the engine; a rank that could not load leaves nothing to the next test."""
    try:
        return await device_thread.run(build, "loading")
    except RoleCallError:
        if torch.distributed.is_initialized():
            stop_rank()
        raise


@asynccontextmanager
async def _served(settings: RunSettings, server: Server, engine: Any, calls: ColumnCalls) -> AsyncIterator[Rig]:
    calls.start()
    address = await server.start()
    try:
        async with open_channel(address, party()) as channel:
            yield Rig(channel, engine, calls, settings)
    finally:
        await server.drain(1.0)
        await calls.close()
        stop_rank()


async def train(stub: Any, request: TrainRequest) -> TrainResult:
    """Returns the result of a Train call; checks that it is the last and only one."""
    responses: list[TrainResponse] = [response async for response in stub.Train(request, timeout=60)]
    assert [response.WhichOneof("event") for response in responses] == [
        *itertools.repeat("progress", len(responses) - 1),
        "result",
    ]
    return responses[-1].result


def values_of(result: TrainResult) -> dict[str, float]:
    """Returns metrics by name."""
    return {metric.name: metric.value for metric in result.metrics}


async def saved(stub: Any, request: SaveTrainerCheckpointRequest) -> list[CheckpointFile]:
    """Returns what a SaveCheckpoint call wrote; checks that it said first that the state was taken."""
    responses: list[SaveTrainerCheckpointResponse] = [
        response async for response in stub.SaveCheckpoint(request, timeout=60)
    ]
    assert [response.WhichOneof("event") for response in responses] == ["snapshot", "saved"]
    return list(responses[-1].saved.files)


def publish_request(ctl: int, step: int, version: int, epoch: int = 1) -> actor_pb2.PublishWeightsRequest:
    """A publish of the weights of `step` as `version`, with PROBE."""
    probe = weights_pb2.Probe(token_ids=encode_tensor(PROBE))
    return actor_pb2.PublishWeightsRequest(
        ctl=ctl, epoch=epoch, step=step, policy_version=version, bucket_timeout_s=10.0, probe=probe
    )
