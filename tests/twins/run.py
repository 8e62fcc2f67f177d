"""A whole run in this process: the real controller, servicers, store, gRPC and membership around engines without a
model.

Its trainers are those of tests/twins/trainer.py, which note the rows they trained, so that a test can count. Its
rollouts sample by the scripted engine, whose weights of version v have a known digest and probe; the actor publishes
exactly those.
"""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from rolecall.checkpoint.storage import open_storage
from rolecall.data.images.tokens import image_processor_of
from rolecall.data.tokenizer import ChatTokenizer
from rolecall.reward import SERVICE_NAME as REWARD_SERVICE
from rolecall.reward import Scorer, description, one_by_one
from rolecall.rpc.callers import Caller
from rolecall.rpc.channel import open_channel
from rolecall.rpc.fence import Fence
from rolecall.rpc.membership import Membership
from rolecall.rpc.server import Server
from rolecall.scoring.scores import Item, ScoreFunction
from rolecall.settings import RpcSection, RunSettings
from rolecall.store.ledger import Ledger
from rolecall.store.sealed import read_ctl
from rolecall.telemetry.states import StateClock
from rolecall.training.serving.calls import TrainerCalls
from rolecall.v1 import (
    actor_pb2_grpc,
    controller_pb2,
    controller_pb2_grpc,
    critic_pb2_grpc,
    reward_pb2_grpc,
)
from rolecall.v1.controller_pb2_grpc import ControllerServiceStub
from services.actor.service import ActorServicer
from services.controller.durable.run_point import Checkpoints, RunPoint
from services.controller.run import ControllerRun
from services.controller.service import ControllerServicer
from services.critic.service import CriticServicer
from services.rollout.__main__ import on_shift
from services.rollout.scripted import ScriptedEngine
from tests.fixtures_store import StoreUnderTest
from tests.ports import free_port
from tests.tiny_tokenizer import CHAT_TEMPLATE, write_tokenizer
from tests.twins.callers import of_role, party, place, playing
from tests.twins.calls import trainer_calls
from tests.twins.rollout import RolloutTwin
from tests.twins.trainer import ActorTwin, TrainerTwin

LightRun = Callable[..., "AbstractAsyncContextManager[TwinRun]"]
RUN_S = 120.0
"""Deadline of one light run, which takes a second or two on a quiet machine."""


class ServedActor(ActorServicer):
    """The actor's servicer over a twin."""

    def __init__(
        self, store: StoreUnderTest, stack: AsyncExitStack, checkpoints: str, save_timeout_s: float = 3600.0
    ) -> None:
        self._store, self._stack = store, stack
        self._saves = checkpoints, save_timeout_s
        self.restart()

    def restart(self, trainer: ActorTwin | None = None) -> None:
        """Serves a trainer that has applied nothing, as a new process does."""
        self.trainer = trainer or ActorTwin(self._store.rows)
        calls = _calls_of(self.trainer, self._store, self._stack, *self._saves)
        self.profiles = calls.chain.profiles
        super().__init__(self.trainer, calls)


class ServedCritic(CriticServicer):
    """The critic's servicer over a twin."""

    def __init__(
        self, store: StoreUnderTest, stack: AsyncExitStack, checkpoints: str, save_timeout_s: float = 3600.0
    ) -> None:
        self._store, self._stack = store, stack
        self._saves = checkpoints, save_timeout_s
        self.restart()

    def restart(self) -> None:
        """Serves a trainer that has applied nothing, as a new process does."""
        self.trainer = TrainerTwin(self._store.rows)
        super().__init__(_calls_of(self.trainer, self._store, self._stack, *self._saves))


def _calls_of(
    trainer: TrainerTwin, store: StoreUnderTest, stack: AsyncExitStack, checkpoints: str, save_timeout_s: float
) -> TrainerCalls:
    fence = Fence(lambda: read_ctl(store.connection, store.run))
    calls = trainer_calls(trainer, store.connection, store.run, fence, checkpoints, save_timeout_s=save_timeout_s)
    calls.start()
    stack.push_async_callback(calls.close)
    return calls


def parity(item: Item) -> float:
    """1 for responses of an even number of tokens: a reward that differs within a group."""
    return float(item.num_response_tokens % 2 == 0)


class Life(NamedTuple):
    """One life of a run's controller, and what people ask of it."""

    stub: ControllerServiceStub
    running: "asyncio.Task[None]"
    states: StateClock
    """What its loop did with its time."""

    async def status(self) -> controller_pb2.RunStatus:
        return (await self.stub.GetRun(controller_pb2.GetRunRequest())).status

    async def shows(self, seen: Callable[[controller_pb2.RunStatus], object]) -> controller_pb2.RunStatus:
        """The first status for which `seen` is true, while the run goes on."""
        async with asyncio.timeout(RUN_S):
            while not seen(status := await self.status()):
                assert not self.running.done(), self.running.exception()
                await asyncio.sleep(0.01)
        return status

    async def reaches(self, step: int) -> None:
        """Returns when the run has applied `step` steps, and goes on from there."""
        await self.shows(lambda status: status.step >= step and status.state != controller_pb2.RUN_STATE_STARTING)

    async def rests(self) -> controller_pb2.RunStatus:
        """The first status of the run paused, its roles being there."""
        return await self.shows(
            lambda status: (
                status.state == controller_pb2.RUN_STATE_PAUSED and status.waiting_for.startswith("groups of step")
            )
        )

    async def saved(self) -> controller_pb2.SaveCheckpointResponse:
        """Returns when a checkpoint was made."""
        return await self.stub.SaveCheckpoint(controller_pb2.SaveCheckpointRequest(), timeout=RUN_S)

    async def ends(self) -> None:
        """Returns, or fails, as the run does."""
        await asyncio.wait_for(self.running, RUN_S)


@dataclass
class TwinRun:
    """The roles of one run and the ways to start a controller over them."""

    settings: RunSettings
    store: StoreUnderTest
    actor: ServedActor
    critic: ServedCritic
    stack: AsyncExitStack
    latest: ControllerRun | None = None
    """The controller of the last life."""
    memberships: dict[str, Membership] = field(default_factory=dict)
    """Of the rollouts, by worker: one that is stopped leaves a rollout that lives and is not heard."""

    @property
    def ledger(self) -> Ledger:
        """A look at the run's ledger."""
        return Ledger(self.store.connection, self.store.run)

    @property
    def checkpoints(self) -> Checkpoints:
        return Checkpoints(open_storage(self.settings.run.checkpoints), 2)

    def newest(self) -> RunPoint:
        """What the newest checkpoint says."""
        latest = self.checkpoints.latest()
        assert latest is not None
        return latest[1]

    def lose_the_store(self) -> None:
        """Empties the store of all that is the run's."""
        for key in self.store.connection.ledger.scan_iter(f"{{rl:{self.store.run}*"):
            self.store.connection.ledger.delete(key)

    async def to_the_end(self, *rollouts: str, **options: Any) -> None:
        """A life of the controller up to its end, beside which these rollouts live, with `options`."""
        async with AsyncExitStack() as stack:
            life = await stack.enter_async_context(self.controller())
            for worker in rollouts:
                await stack.enter_async_context(self.rollout(worker, **options))
            await life.ends()

    @asynccontextmanager
    async def controller(self) -> AsyncIterator[Life]:
        """A served controller and the task that runs its loop; both end with the context."""
        run = self.latest = ControllerRun(self.settings)
        server = Server(self.settings.rpc, str(self.settings.controller.address))
        server.add(
            controller_pb2_grpc.add_ControllerServiceServicer_to_server,
            ControllerServicer(run),
            "rolecall.v1.ControllerService",
        )
        await server.start()
        channel = open_channel(str(self.settings.controller.address), playing(self.settings, Caller.OPERATOR).rpc)
        running = asyncio.create_task(run.run())
        try:
            yield Life(ControllerServiceStub(channel), running, run.states)
        finally:
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
            await channel.close()
            await server.drain(0.1)
            await run.close()

    @asynccontextmanager
    async def rollout(
        self, worker: str, token_s: float = 0.0, engine: ScriptedEngine | None = None
    ) -> AsyncIterator[ScriptedEngine]:
        """A rollout replica that joins, pulls and serves until the context ends; then it is silent, as a killed process
        is.
        """
        incarnation = f"{id(object()):x}"
        post = await on_shift(self.settings)
        engine = engine or ScriptedEngine(token_s=token_s, vocab_size=200)
        chat = ChatTokenizer.of(self.settings.model)
        twin = RolloutTwin.of_run(
            self.settings, f"{worker}.{incarnation}", engine, chat, self.store.connect(), post=post
        )
        address = await twin.start()
        membership = Membership(
            playing(self.settings, Caller.ROLLOUT),
            controller_pb2.ROLE_ROLLOUT,
            worker,
            incarnation,
            address,
            num_weight_ranks=1,
            image_processor=image_processor_of(self.settings, self.settings.model.path),
            tokenizer=chat.digest,
            launched=True,  # it lives until the context ends, also when one of several lives of the run is over
        )
        self.memberships[worker] = membership
        membership.start()
        try:
            yield engine
        finally:
            membership.stop()
            await twin.close()
            if post is not None:
                post.close()

    def metrics(self) -> list[dict[str, float]]:
        """Lines of metrics.jsonl that are of a step, not of an evaluation."""
        lines = [json.loads(line) for line in (self.settings.run.dir / "metrics.jsonl").read_text().splitlines()]
        return [line for line in lines if "reward/mean" in line]


@asynccontextmanager
async def twin_run(
    store: StoreUnderTest,
    folder: Path,
    make_settings: Callable[..., RunSettings],
    /,
    *,
    score: ScoreFunction = parity,
    template: str = CHAT_TEMPLATE,
    more_tokens: Sequence[str] = (),
    components: Mapping[str, tuple[float, float]] = {},
    **sections: Any,
) -> AsyncIterator[TwinRun]:
    """Serves actor, critic and reward; `sections` are merged over a run of 3 steps of 4 groups of 2. `components`: the
    ranges of what `score` gives besides the reward.
    """
    store.ledger.unlock()  # the fixture's: the first controller need not wait until its lease is over
    async with AsyncExitStack() as stack:
        write_tokenizer(folder / "model", template, more_tokens)
        (folder / "train.jsonl").write_text(
            "".join(json.dumps({"prompt": f"number {i}", "ground_truth": str(i)}) + "\n" for i in range(30))
        )
        spec = description(
            "parity",
            (0, 1),
            ("response_text", "ground_truth", "environment_reward", "messages"),
            components,
            False,
            max_items=0,
        )
        of_run = {"dir": folder / "run", **sections.get("run", {})}
        checkpoints = of_run.get("checkpoint_url") or str(Path(of_run["dir"]) / "checkpoints")
        timeout_s = sections.get("actor", {}).get("train_timeout_s", 3600.0)
        actor = ServedActor(store, stack, checkpoints, timeout_s)
        critic = ServedCritic(store, stack, checkpoints, timeout_s)
        rpc = RpcSection(**sections.get("rpc", {}))
        addresses = [
            await served(stack, add, servicer, name, rpc=of_role(rpc, role, store.run))
            for role, add, servicer, name in (
                (Caller.ACTOR, actor_pb2_grpc.add_ActorServiceServicer_to_server, actor, "rolecall.v1.ActorService"),
                (
                    Caller.CRITIC,
                    critic_pb2_grpc.add_CriticServiceServicer_to_server,
                    critic,
                    "rolecall.v1.CriticService",
                ),
                (
                    Caller.REWARD,
                    reward_pb2_grpc.add_RewardServiceServicer_to_server,
                    Scorer(spec, one_by_one(score, spec), None),
                    REWARD_SERVICE,
                ),
            )
        ]
        defaults = _defaults(store, folder, addresses)
        if sections.get("algorithm", {}).get("advantage", {}).get("kind") == "gae":
            defaults["critic"] = {"address": addresses[1]}
        merged = {
            name: {**defaults.get(name, {}), **sections.get(name, {})} for name in defaults.keys() | sections.keys()
        }
        settings = make_settings(**merged)
        place(settings.run.dir)  # for trainers in processes of their own
        yield TwinRun(settings, store, actor, critic, stack)


def _defaults(store: StoreUnderTest, folder: Path, addresses: list[str]) -> dict[str, dict[str, Any]]:
    """Sections of a run of 3 steps of 4 groups of 2; actor and reward are the first and the third of `addresses`."""
    return {
        "run": {"name": store.run, "dir": str(folder / "run"), "num_steps": 3, "checkpoint_every_steps": 2},
        "data": {"train": str(folder / "train.jsonl"), "max_prompt_tokens": 48},
        "sampling": {"num_responses": 2, "max_tokens": 12},
        "algorithm": {"groups_per_batch": 4},
        "controller": {
            "address": f"127.0.0.1:{free_port()}",
            "lease_s": 1.5,
            "start_timeout_s": 60.0,
            "stall_timeout_s": 60.0,
        },
        "actor": {"address": addresses[0]},
        "reward": {"address": addresses[2], "timeout_s": 5.0},
        "rollout": {"max_groups": 4, "generation_timeout_s": 30.0},
        "store": {"url": store.url, "num_shards": 2},
        "trackers": {"tensorboard": False},
    }


@pytest.fixture
def light_run(store: StoreUnderTest, tmp_path: Path, make_settings: Callable[..., RunSettings]) -> LightRun:
    """`twin_run` over the test's own store, folder and settings: light_run(run={"num_steps": 8})."""
    return partial(twin_run, store, tmp_path, make_settings)


async def served(
    stack: AsyncExitStack,
    add: Callable[[Any, Any], None],
    servicer: object,
    name: str,
    bind: str = "127.0.0.1:0",
    rpc: RpcSection | None = None,
) -> str:
    """Serves `servicer` until `stack` ends; returns the address."""
    server = Server(rpc or party(), bind)
    server.add(add, servicer, name)
    address = await server.start()
    await server.set_serving(True)
    stack.push_async_callback(server.drain, 0.1)
    return address


def balance(run: TwinRun) -> tuple[int, int, int, int]:
    """admitted, trained, dropped, live; they balance."""
    counts = run.ledger.counts()
    dropped = sum(counts.dropped.values())
    assert counts.admitted == counts.trained + dropped + counts.live
    return counts.admitted, counts.trained, dropped, counts.live


def check_trained_once(trainer: TrainerTwin, num_rows: int) -> None:
    """`num_rows` rows were trained, each once."""
    assert max(Counter(trainer.trained).values()) == 1
    assert len(trainer.trained) == num_rows
