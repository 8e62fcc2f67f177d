"""Publishing in one process: the real fleet, publisher, rollouts, gRPC and store around the collective of
tests/twins/collective.py.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from rolecall.contract import contract_version
from rolecall.errors import (
    UnavailableError,
    UnknownWorkerError,
    WorkerLostError,
)
from rolecall.rpc.callers import Caller
from rolecall.rpc.channel import open_channel
from rolecall.rpc.fence import Fence
from rolecall.rpc.server import Server
from rolecall.settings import RunSettings
from rolecall.store.position import RunPosition
from rolecall.store.sealed import read_ctl
from rolecall.v1 import actor_pb2_grpc, controller_pb2, trajectory_pb2, weights_pb2
from rolecall.wire import encode_tensor
from services.controller.fleet.members import Fleet
from services.controller.publish.delivery import Delivery
from services.controller.publish.publisher import PolicyPublisher
from services.controller.recovered import Recovered
from services.controller.threads import StoreThreads
from services.rollout.activity import feed_heartbeat
from services.rollout.pull import PullSettings
from services.rollout.replica import Replica
from tests.attestation import Trajectory, read_attested, read_trajectories, violations
from tests.fixtures_store import StoreUnderTest
from tests.smallest import smallest_tree
from tests.twins.callers import party, playing
from tests.twins.collective import RUN_SEED, Collective, CollectiveActor, CollectiveEngine, oracle
from tests.twins.rollout import BriefQueue, NumberTokenizer, RolloutTwin

PROMPT = (5, 6, 7)
PROBE = weights_pb2.Probe(token_ids=encode_tensor(np.arange(3, 19, dtype=np.int32)), num_decoded=4)
LEASE_S, HEARTBEAT_S, HANG_S, BUCKET_S = 1.2, 0.24, 4.0, 0.8
ROW_EXPIRY_S = 3600
"""As in production: no example outlives the rows of a rollout that died between its commit and lifting their expiry."""


@dataclass
class Beat:
    """A Pulse that counts."""

    phase: str = ""
    busy: bool = False
    count: int = 0

    def progress(self) -> None:
        """Counts."""
        self.count += 1


class RolloutProcess:
    """A rollout process: replica, server, pull loop and heartbeats, which end when it is killed, dies, leaves or is
    given up.
    """

    def __init__(self, rig: "Publishing", name: str, incarnation: int, replica: type[Replica]) -> None:
        self.name, self.consumer = name, f"{name}.{incarnation}"
        self._rig = rig
        self.engine = CollectiveEngine(rig.collective)
        self.engine.late_s = 2 * BUCKET_S
        self._parts = RolloutTwin(
            self.engine,
            PullSettings(self.consumer, 2, LEASE_S, 10.0, ROW_EXPIRY_S, 0),
            BriefQueue(rig.store.connect(), rig.store.run, self.consumer),
            rig.store.rows,
            NumberTokenizer(),
            Server(party(), "127.0.0.1:0"),
            replica=replica,
            fence=Fence(lambda: read_ctl(rig.store.connection, rig.store.run)),
            load_timeout_s=30.0,
            keep_timeout_s=rig.keep_timeout_s,
        )
        self.replica = self._parts.replica
        self._tasks: list[asyncio.Task[None]] = []
        self.join = controller_pb2.JoinRequest()
        self.is_alive = True
        self.on_gpus = False
        """Whether it says so of itself when it joins."""

    async def start(self) -> None:
        """Serves, pulls and joins."""
        address = await self._parts.start()
        name, _, incarnation = self.consumer.partition(".")
        self.join = controller_pb2.JoinRequest(
            run=self._rig.settings.run.name,
            role=controller_pb2.ROLE_ROLLOUT,
            worker=name,
            incarnation=incarnation,
            address=address,
            num_weight_ranks=1,
            version=contract_version(),
            on_gpus=self.on_gpus,
        )
        self._rig.fleet.join(self.join)
        pulse = Beat()
        self._tasks = [
            asyncio.create_task(part) for part in (feed_heartbeat(self.replica, pulse), self._live(self.join, pulse))
        ]

    async def _live(self, join: controller_pb2.JoinRequest, pulse: Beat) -> None:
        while not self.engine.has_died.is_set():
            if not self.engine.is_stopped:
                beat = controller_pb2.HeartbeatRequest(
                    worker=join.worker, incarnation=join.incarnation, progress=pulse.count, busy=pulse.busy
                )
                try:
                    self._rig.fleet.heartbeat(beat)
                except UnknownWorkerError:
                    self._rig.fleet.join(join)
                except WorkerLostError:
                    break
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.engine.has_died.wait(), HEARTBEAT_S)
        self._rig.ending.add(task := asyncio.create_task(self.kill()))
        task.add_done_callback(self._rig.ending.discard)

    async def kill(self) -> None:
        """Ends it as SIGKILL does: nothing is said to anyone."""
        self.is_alive = False
        self.engine.frozen = False
        for task in self._tasks:
            task.cancel()
        await self._parts.close(0.0)
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def leave(self) -> None:
        """Ends it as SIGTERM does."""
        await self.replica.stop_taking()
        await self._parts.pull.drain(0.2)
        await self.kill()

    def wake(self) -> None:
        """Lets it go on, as SIGCONT does."""
        self.engine.is_stopped = self.engine.frozen = False


@dataclass
class Publishing:
    """A run of which only publishing is real."""

    settings: RunSettings
    store: StoreUnderTest
    collective: Collective
    actor: CollectiveActor
    fleet: Fleet
    publisher: PolicyPublisher
    publisher_from: Callable[[Recovered], PolicyPublisher]
    """Makes the publisher of another life of the loop."""
    threads: StoreThreads
    twins: list[RolloutProcess] = field(default_factory=list)
    ending: set[asyncio.Task[None]] = field(default_factory=set)
    num_admitted: int = 0
    replica: type[Replica] = Replica
    keep_timeout_s: float = 5.0
    """Of rollouts that start; shorter than in production, where the store may take longer than here."""

    @property
    def alive(self) -> list[RolloutProcess]:
        """The processes that have not ended."""
        return [twin for twin in self.twins if twin.is_alive]

    async def rollout(self, name: str, *, on_gpus: bool = False) -> RolloutProcess:
        """Starts a rollout process of this name."""
        self.twins.append(twin := RolloutProcess(self, name, len(self.twins), self.replica))
        twin.on_gpus = on_gpus
        await twin.start()
        return twin

    async def admit(self, count: int) -> None:
        """Admits the next `count` groups."""
        for gid in range(self.num_admitted, self.num_admitted + count):
            group = trajectory_pb2.PromptGroup(
                gid=gid,
                prompt=trajectory_pb2.Prompt(uid=f"u{gid}", token_ids=np.array(PROMPT, dtype="<i4").tobytes()),
                num_responses=2,
                sampling=trajectory_pb2.SamplingParams(temperature=1.0, top_p=1.0, max_tokens=30),
                run_seed=RUN_SEED,
            )
            await asyncio.to_thread(self.store.ledger.admit, group, b"")
        self.num_admitted += count

    async def committed(self, count: int, timeout_s: float = 10.0) -> None:
        """Returns when `count` groups are committed."""
        async with asyncio.timeout(timeout_s):
            while (await asyncio.to_thread(self.store.ledger.counts)).committed < count:
                await asyncio.sleep(0.02)

    def trajectories(self) -> list[Trajectory]:
        """Returns all that is committed."""
        return read_trajectories(self.store.ledger, self.store.rows)

    def violations(self) -> list[str]:
        """Returns what the checker finds."""
        return violations(self.trajectories(), read_attested(self.store.connection, self.store.run), oracle)


def at_the_start(ctl: int) -> Recovered:
    """Returns the state of a run of which nothing is published."""
    return Recovered(
        ctl=ctl,
        position=RunPosition(),
        live={},
        backlog=(),
        policy_version=-1,
        retained_bytes=0,
        untold={},
        saved_step=0,
        is_actor_restored=False,
        step_of_version={},
        sealed=None,
        begun=frozenset(),
        rates={},
    )


@asynccontextmanager
async def publishing_run(store: StoreUnderTest, tree: dict[str, Any], folder: Path) -> AsyncIterator[Publishing]:
    """Runs an actor at step 0, with nobody joined; `tree` is merged over settings with short deadlines."""
    defaults = smallest_tree(
        folder,
        run={"name": store.run, "dir": str(folder / "run"), "num_steps": 1},
        model={"path": str(folder / "model"), "dtype": "float32"},
        controller={"lease_s": LEASE_S, "stall_timeout_s": 20.0},
        rollout={"hang_s": HANG_S},
        weights={"bucket_timeout_s": BUCKET_S, "publish_timeout_s": 15.0},
    )
    settings = RunSettings.model_validate(
        {name: {**defaults.get(name, {}), **tree.get(name, {})} for name in defaults.keys() | tree.keys()}
    )
    settings = playing(settings, Caller.CONTROLLER)
    collective = Collective()
    actor = CollectiveActor(collective)  # type: ignore[abstract]  # a publish asks for two of its methods
    server = Server(party(), "127.0.0.1:0")
    server.add(actor_pb2_grpc.add_ActorServiceServicer_to_server, actor, "rolecall.v1.ActorService")
    channel = open_channel(await server.start(), party())
    threads = StoreThreads()
    fleet = Fleet(settings, store.ledger, threads, tokenizer="", token_ids="")
    stub = actor_pb2_grpc.ActorServiceStub(channel)

    def publisher_from(recovered: Recovered) -> PolicyPublisher:
        delivery = Delivery(settings, store.ledger, threads, fleet, stub, PROBE, recovered.ctl)
        return PolicyPublisher(settings, store.ledger, threads, fleet, delivery, recovered)

    publisher = publisher_from(at_the_start(store.ledger.ctl))
    rig = Publishing(settings, store, collective, actor, fleet, publisher, publisher_from, threads)
    watching = asyncio.create_task(fleet.watch())
    try:
        yield rig
    finally:
        await asyncio.gather(*(twin.kill() for twin in rig.alive), *rig.ending)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        await fleet.close()
        await channel.close()
        await server.drain(0.0)
        threads.close()


def gone(what: str) -> UnavailableError:
    """Returns what a caller of a process that just died gets."""
    return UnavailableError(f"{what} cannot be reached")
