"""Every service of ours behind a server: the real servicers and all that lies under them, around engines without a
model.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import descriptor_pool
from google.protobuf.descriptor import MethodDescriptor
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection, reflection_pb2

from rolecall.contract import contract_version
from rolecall.environment import Action, Env, Task
from rolecall.environment.server import SERVICE_NAME as ENVIRONMENT_SERVICE
from rolecall.environment.server import EnvironmentServicer
from rolecall.environment.server import description as environment_description
from rolecall.environment.sessions import Sessions
from rolecall.reward import SERVICE_NAME as REWARD_SERVICE
from rolecall.rpc.callers import Caller, services
from rolecall.rpc.fence import Fence
from rolecall.rpc.membership import Membership
from rolecall.settings import RpcSection
from rolecall.settings.reward.components import RewardComponent
from rolecall.settings.reward.scorers import AnswerScorer, JsonScorer
from rolecall.store.ledger import Ledger
from rolecall.store.sealed import read_ctl
from rolecall.training.serving.calls import ColumnCalls
from rolecall.training.serving.device_thread import DeviceThread
from rolecall.v1 import controller_pb2, environment_pb2_grpc, reference_pb2_grpc, reward_pb2_grpc
from services.reference.service import ReferenceServicer
from services.reward.config import RewardSettings
from services.reward.dispatcher import Dispatcher
from services.reward.service import RewardServicer
from services.rollout.scripted import ScriptedEngine
from services.rollout.service import SERVICE_NAME as ROLLOUT_SERVICE
from tests.conftest import MakeSettings
from tests.fixtures_store import StoreUnderTest
from tests.twins.callers import playing
from tests.twins.rollout import NumberTokenizer, RolloutTwin
from tests.twins.run import TwinRun, served, twin_run
from tests.twins.trainer import ColumnTwin

STANDARD = (health.SERVICE_NAME, reflection.SERVICE_NAME)
"""Services that are not ours and stand on each of our servers."""
assert health_pb2.DESCRIPTOR
assert reflection_pb2.DESCRIPTOR


@dataclass(frozen=True)
class Target:
    """A method at an address."""

    address: str
    method: MethodDescriptor

    @property
    def is_standard(self) -> bool:
        """Whether somebody else wrote it."""
        return self.method.containing_service.full_name in STANDARD

    @property
    def path(self) -> str:
        """Its name on the wire."""
        return f"/{self.method.containing_service.full_name}/{self.method.name}"


@dataclass(frozen=True)
class Served:
    """All of them."""

    targets: tuple[Target, ...]
    hints: dict[str, object]
    """Values that a run's own callers would send, by the name of a field."""


RUNNING_S = 60.0
"""Longest wait for the run's first step."""


@asynccontextmanager
async def all_services(store: StoreUnderTest, folder: Path, make_settings: MakeSettings) -> AsyncIterator[Served]:
    """Serves every service in this process, beside a run that goes on."""
    run = {"num_steps": 1_000_000, "checkpoint_every_steps": 50}
    algorithm = {"groups_per_batch": 2, "advantage": {"kind": "gae"}}
    async with AsyncExitStack() as stack:
        twin = await stack.enter_async_context(twin_run(store, folder, make_settings, run=run, algorithm=algorithm))
        await stack.enter_async_context(twin.controller())
        await stack.enter_async_context(twin.rollout("rollout-0", token_s=0.01))
        places = {
            "rolecall.v1.ControllerService": str(twin.settings.controller.address),
            "rolecall.v1.ActorService": str(twin.settings.actor.address),
            "rolecall.v1.CriticService": str(twin.settings.critic.address) if twin.settings.critic else "",
            "rolecall.v1.ReferenceService": await _reference(twin, stack),
            ROLLOUT_SERVICE: await _rollout(twin, stack),
            REWARD_SERVICE: await _reward(folder, stack),
            ENVIRONMENT_SERVICE: await _environment(stack),
        }
        assert set(places) == {service.full_name for service in services()}, "a service is missing here"
        pool = descriptor_pool.Default()
        all_places = [*places.items(), *((name, address) for name in STANDARD for address in places.values())]
        targets = [
            Target(address, method) for name, address in all_places for method in pool.FindServiceByName(name).methods
        ]
        async with asyncio.timeout(RUNNING_S):
            while not (await asyncio.to_thread(Ledger(store.connection, store.run).position)).step:
                await asyncio.sleep(0.05)
        ctl = read_ctl(store.connection, store.run)
        hints = {"run": store.run, "version": contract_version(), "ctl": ctl, "worker": "hostile", "incarnation": "1"}
        yield Served(tuple(targets), hints)


async def _reference(twin: TwinRun, stack: AsyncExitStack) -> str:
    store = twin.store
    fence = Fence(lambda: read_ctl(store.connection, store.run))
    column = ColumnTwin(store.rows)
    calls = ColumnCalls(column, DeviceThread(), fence, 2**20)
    calls.start()
    stack.push_async_callback(calls.close)
    servicer = ReferenceServicer(column, calls, "ref", "ref.1")
    add = reference_pb2_grpc.add_ReferenceServiceServicer_to_server
    return await served(stack, add, servicer, "rolecall.v1.ReferenceService")


async def _rollout(twin: TwinRun, stack: AsyncExitStack) -> str:
    engine = ScriptedEngine(vocab_size=200, sleep_levels=(1, 2))
    parts = RolloutTwin.of_run(twin.settings, "hostile.1", engine, NumberTokenizer(), twin.store.connect())
    address = await parts.start()
    stack.push_async_callback(parts.close)
    settings = playing(twin.settings, Caller.ROLLOUT)
    member = Membership(settings, controller_pb2.ROLE_ROLLOUT, "hostile", "1", address, num_weight_ranks=1)
    member.start()
    stack.callback(member.stop)
    return address


async def _reward(folder: Path, stack: AsyncExitStack) -> str:
    components = {"same": RewardComponent(scorer=AnswerScorer()), "json": RewardComponent(scorer=JsonScorer())}
    settings = RewardSettings("127.0.0.1:0", components, 1, folder, 20.0)
    dispatcher = Dispatcher(settings, RpcSection())
    stack.push_async_callback(dispatcher.close)
    await dispatcher.start()
    servicer = RewardServicer(dispatcher, lambda: None)
    return await served(stack, reward_pb2_grpc.add_RewardServiceServicer_to_server, servicer, REWARD_SERVICE)


class _Echo(Env):
    """An environment that repeats what it is told."""

    def reset(self, task: Task, seed: int) -> str:
        return task.uid

    def step(self, action: Action) -> str:
        return action.text


async def _environment(stack: AsyncExitStack) -> str:
    sessions = Sessions(_Echo, environment_description("echo", (0, 1), max_sessions=8, lease_s=1.0))
    reaping = asyncio.create_task(sessions.run())
    stack.push_async_callback(sessions.close)
    stack.callback(reaping.cancel)
    add = environment_pb2_grpc.add_EnvironmentServiceServicer_to_server
    return await served(stack, add, EnvironmentServicer(sessions), ENVIRONMENT_SERVICE)
