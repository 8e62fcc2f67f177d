"""Publishing in one process: the real fleet, publisher, replicas, pull loops, gRPC and store around engines and an
actor whose weights are a few numbers.

The collective is a small twin of the weight channel with its rules: all ranks meet or nobody goes on, buckets move in
lockstep, an abort frees everyone, the root knows who is behind. An engine computes with the buckets it really holds, so
that torn or false weights show in its tokens.
"""

import asyncio
import contextlib
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from rolecall.contract import contract_version
from rolecall.errors import (
    ChannelBrokenError,
    RoleCallError,
    TornWeightsError,
    UnavailableError,
    UnknownWorkerError,
    WorkerLostError,
)
from rolecall.rpc.channel import open_channel
from rolecall.rpc.server import Server
from rolecall.settings import RpcSection, RunSettings
from rolecall.store.position import RunPosition
from rolecall.store.prompts import PromptQueue
from rolecall.trajectory import seed_of
from rolecall.v1 import actor_pb2, actor_pb2_grpc, controller_pb2, trajectory_pb2, weights_pb2
from rolecall.weights.transferred import Transferred
from rolecall.wire import Array, encode_tensor
from services.controller.fleet.members import Fleet
from services.controller.publish.publisher import PolicyPublisher
from services.controller.recovered import Recovered
from services.controller.threads import StoreThreads
from services.rollout.heartbeat import feed_heartbeat
from services.rollout.pull import PullSettings
from services.rollout.replica import Replica, Transfer
from services.rollout.sampling import MeetingPlace, Probed, SampleRequest
from services.rollout.scripted import ScriptedEngine, probed
from services.rollout.state import State
from tests.attestation import Trajectory, read_attested, read_trajectories, violations
from tests.fixtures_store import StoreUnderTest
from tests.twins.rollout import NumberTokenizer, RolloutTwin

NUM_BUCKETS = 4
POLL_S = 0.002
VOCABULARY = 200
EOS = 2
PROMPT = (5, 6, 7)
PROBE = weights_pb2.Probe(token_ids=encode_tensor(np.arange(3, 19, dtype=np.int32)), num_decoded=4)
RUN_SEED = 11
LEASE_S, HEARTBEAT_S, HANG_S, BUCKET_S, OPEN_S = 1.2, 0.1, 2.0, 0.8, 0.9
ROW_EXPIRY_S = 3600
"""As in production: no example outlives the rows of a rollout that died between its commit and lifting their expiry."""


class Kind(Enum):
    """What goes wrong in a receiver."""

    DIE = "die"
    HANG = "hang"
    """It hangs until somebody ends it; its heartbeats go on."""
    STOP = "stop"
    """As SIGSTOP: it hangs and is silent."""
    LATE = "late"
    """It goes on after everybody's deadline."""
    FAIL = "fail"
    """It says that it failed."""
    BREAK = "break"
    """It felt the collective break, as one does that did nothing wrong."""
    LIE = "lie"
    """Its weights are not what it received, and it does not know."""


PHASES = ("join", "receive", "bucket", "probe", "resume")


@dataclass
class Fault:
    """Happens once, when the engine comes by."""

    phase: str
    kind: Kind


def digest_of(buckets: Sequence[str]) -> str:
    """Of the weights that consist of these buckets."""
    return hashlib.sha256("|".join(buckets).encode()).hexdigest()


def weights_after(step: int) -> list[str]:
    """The policy's buckets after `step` steps."""
    return [f"{step}/{i}" for i in range(NUM_BUCKETS)]


def logprobs_of(digest: str, num_tokens: int) -> Array:
    """The probe under weights of this digest."""
    logprobs = np.full(num_tokens, -1 - int(digest[:6], 16) / 2**24, np.float32)
    logprobs[0] = 0
    return logprobs


def token_of(prompt: Sequence[int], seed: int, digest: str, position: int) -> int:
    """What weights of this digest sample."""
    draw = int.from_bytes(
        hashlib.blake2b(f"{list(prompt)}/{seed}/{digest}/{position}".encode(), digest_size=4).digest(), "little"
    )
    return EOS if draw % 8 == 0 else 3 + draw % (VOCABULARY - 3)


def oracle(meta: trajectory_pb2.TrajectoryMeta, token_ids: Sequence[int], index: int, digest: str) -> int:
    """attestation.Oracle of these engines."""
    start = meta.num_prompt_tokens
    return token_of(token_ids[:start], seed_of(RUN_SEED, meta.gid, meta.index), digest, index - start)


@dataclass
class Meeting:
    """One epoch of the collective."""

    epoch: int
    world_size: int
    arrived: set[int] = field(default_factory=set)
    offered: list[str] = field(default_factory=list)
    """Of all publishes of the epoch: a receiver may come before the root begins."""
    counts: dict[int, int] = field(init=False)
    """What each receiver took of them."""
    broken: str = ""

    def __post_init__(self) -> None:
        self.counts = dict.fromkeys(range(1, self.world_size), 0)

    def check(self) -> None:
        """ChannelBrokenError when it is over."""
        if self.broken:
            raise ChannelBrokenError(f"epoch {self.epoch} is broken: {self.broken}")


class Collective:
    """The twin of rolecall.weights; one per run, as the actor's."""

    def __init__(self) -> None:
        self.meetings: dict[int, Meeting] = {}

    def open(self, epoch: int, world_size: int) -> None:
        """A new epoch aborts those before."""
        for meeting in self.meetings.values():
            meeting.broken = meeting.broken or f"epoch {epoch} was opened"
        self.meetings[epoch] = Meeting(epoch, world_size)

    async def until(self, meeting: Meeting, timeout_s: float, ready: Any, late: str) -> None:
        """Polls; ChannelBrokenError when the epoch breaks or, after breaking it, when it takes too long."""
        deadline = asyncio.get_running_loop().time() + timeout_s
        while not ready():
            meeting.check()
            if asyncio.get_running_loop().time() > deadline:
                meeting.broken = meeting.broken or late
            await asyncio.sleep(POLL_S)
        meeting.check()

    async def meet(self, epoch: int, rank: int, timeout_s: float) -> None:
        """Returns when all ranks are there."""
        meeting = self.meetings[epoch]
        meeting.arrived.add(rank)
        await self.until(
            meeting, timeout_s, lambda: len(meeting.arrived) == meeting.world_size - 1, "the ranks did not meet"
        )

    async def send(self, epoch: int, buckets: Sequence[str], timeout_s: float) -> None:
        """The root's side: at most one bucket ahead of the slowest."""
        meeting = self.meetings[epoch]
        for bucket in buckets:
            meeting.check()
            meeting.offered.append(bucket)
            try:
                await self.until(
                    meeting,
                    timeout_s,
                    lambda: min(meeting.counts.values()) >= len(meeting.offered) - 1,
                    "a bucket was late",
                )
            except ChannelBrokenError as error:
                fewest = min(meeting.counts.values())
                raise ChannelBrokenError(
                    error.message,
                    ranks=",".join(str(rank) for rank, count in meeting.counts.items() if count == fewest),
                ) from error

    async def take(self, epoch: int, rank: int, timeout_s: float) -> str:
        """A receiver's next bucket."""
        meeting = self.meetings[epoch]
        index = meeting.counts[rank]
        await self.until(meeting, timeout_s, lambda: len(meeting.offered) > index, "the actor was late")
        meeting.counts[rank] = index + 1
        return meeting.offered[index]


class RigEngine(ScriptedEngine):
    """Computes with the buckets it holds, and fails as it is told."""

    def __init__(self, collective: Collective) -> None:
        super().__init__(vocab_size=VOCABULARY, eos_token_id=EOS, max_model_tokens=128, token_s=0.002)
        self._collective = collective
        self._rank = 0
        self.buckets = ["empty"] * NUM_BUCKETS
        self.fault: Fault | None = None
        self.has_died = asyncio.Event()
        self.is_stopped = False
        self.late_s = 0.0
        self.backend = ""
        """Of the epoch joined last."""

    async def _pass(self, phase: str) -> None:
        if self.fault is None or self.fault.phase != phase:
            return
        kind, self.fault = self.fault.kind, None
        if kind is Kind.DIE:
            self.has_died.set()
            await asyncio.sleep(60)
        if kind is Kind.LATE:
            await asyncio.sleep(self.late_s)
        if kind is Kind.FAIL:
            raise TornWeightsError("this engine failed", cause=TornWeightsError.reason)
        if kind is Kind.BREAK:
            broken = ChannelBrokenError("this engine felt a break")
            raise TornWeightsError(broken.message, cause=broken.reason) if phase == "bucket" else broken
        if kind is Kind.LIE:
            self.buckets[0] = "false"
        self.is_stopped = self.is_stopped or kind is Kind.STOP
        self.frozen = self.frozen or kind in (Kind.HANG, Kind.STOP)
        while self.frozen:
            await asyncio.sleep(POLL_S)

    def _next(self, request: SampleRequest, position: int) -> tuple[int, float]:
        return token_of(request.prompt_token_ids, request.seed, digest_of(self.buckets), position), -1.0

    async def probe(self, token_ids: Sequence[int], num_decoded: int) -> Probed:
        await self._pass("probe")
        return probed(logprobs_of(digest_of(self.buckets), len(token_ids)), num_decoded)

    async def resume(self) -> None:
        await self._pass("resume")
        await super().resume()

    async def join(self, place: MeetingPlace) -> None:
        await self._pass("join")
        self._rank, self.backend = place.rank, place.backend
        await self._collective.meet(place.epoch, place.rank, place.timeout_s)

    async def receive(self, epoch: int, policy_version: int, bucket_timeout_s: float) -> Transferred:
        await self._pass("receive")
        arrived: list[str] = []
        for index in range(NUM_BUCKETS):
            try:
                bucket = await self._collective.take(epoch, self._rank, bucket_timeout_s)
            except ChannelBrokenError as error:
                if not arrived:
                    raise
                raise TornWeightsError(error.message, cause=error.reason) from error
            arrived.append(bucket)
            self.buckets[index] = bucket
            if index == 1:
                await self._pass("bucket")
        self._version = policy_version
        fingerprints = {f"bucket-{i}": int(digest_of([bucket])[:8], 16) for i, bucket in enumerate(arrived)}
        return Transferred(fingerprints, digest_of(arrived), num_bytes=8, transfer_s=0.001)


class RogueReplica(Replica):
    """A planted violation: after a load that did not finish it serves again by itself, under the last version that was
    attested.
    """

    async def _receive(self, transfer: Transfer) -> tuple[Transferred, Probed | None]:
        before = self.held.policy_version, self.held.digest
        try:
            return await super()._receive(transfer)
        except RoleCallError:
            self.held.state, (self.held.policy_version, self.held.digest) = State.ATTESTED, before
            await self._engine.resume()
            await self.gate.open()
            raise

    async def _give_up(self) -> None:
        """It keeps what it has, too."""


class RigActor(actor_pb2_grpc.ActorServiceServicer):
    """The root of the collective."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self.step = 0
        self.version = -1
        self.aborted: list[int] = []
        """Epochs whose publish was cancelled."""
        self.failures: dict[str, RoleCallError] = {}
        """Errors that the next call of a phase ("open", "publish") answers."""

    async def OpenWeightChannel(
        self, request: weights_pb2.OpenWeightChannelRequest, context: Any
    ) -> weights_pb2.OpenWeightChannelResponse:
        if error := self.failures.pop("open", None):
            raise error
        self._collective.open(request.epoch, request.world_size)
        backend = weights_pb2.WEIGHT_BACKEND_NCCL if request.receivers_on_gpus else weights_pb2.WEIGHT_BACKEND_GLOO
        return weights_pb2.OpenWeightChannelResponse(address="127.0.0.1:1", backend=backend)

    async def PublishWeights(
        self, request: actor_pb2.PublishWeightsRequest, context: Any
    ) -> actor_pb2.PublishWeightsResponse:
        assert request.step == self.step
        assert request.policy_version > self.version
        self.version = request.policy_version
        if error := self.failures.pop("publish", None):
            self._collective.meetings[request.epoch].broken = "the actor died"
            raise error
        buckets = weights_after(self.step)
        try:
            await self._collective.send(request.epoch, buckets, request.bucket_timeout_s)
        except asyncio.CancelledError:
            self.aborted.append(request.epoch)
            self._collective.meetings[request.epoch].broken = "the caller left"
            raise
        digest = digest_of(buckets)
        return actor_pb2.PublishWeightsResponse(
            fingerprints=[
                weights_pb2.Fingerprint(name=f"bucket-{i}", value=int(digest_of([bucket])[:8], 16))
                for i, bucket in enumerate(buckets)
            ],
            digest=digest,
            probe=weights_pb2.Probe(
                token_ids=request.probe.token_ids,
                logprobs=encode_tensor(logprobs_of(digest, request.probe.token_ids.shape[0])),
            ),
            num_bytes=8,
            transfer_s=0.001,
        )


@dataclass
class Beat:
    """The Pulse of a twin."""

    phase: str = ""
    busy: bool = False
    count: int = 0

    def progress(self) -> None:
        """Counts."""
        self.count += 1


class Twin:
    """One rollout process: replica, server, pull loop and heartbeats, which end when it is killed, dies, leaves or is
    given up.
    """

    def __init__(self, rig: "Rig", name: str, incarnation: int, replica: type[Replica]) -> None:
        self.name, self.consumer = name, f"{name}.{incarnation}"
        self._rig = rig
        self.engine = RigEngine(rig.collective)
        self.engine.late_s = 2 * BUCKET_S
        self._parts = RolloutTwin(
            self.engine,
            PullSettings(self.consumer, 2, LEASE_S, 10.0, ROW_EXPIRY_S, 0),
            PromptQueue(rig.store.connect(), rig.store.run, self.consumer),
            rig.store.rows,
            NumberTokenizer(),
            Server(RpcSection(), "127.0.0.1:0"),
            replica=replica,
            load_timeout_s=30.0,
        )
        self.replica = self._parts.replica
        self._tasks: list[asyncio.Task[None]] = []
        self.join = controller_pb2.JoinRequest()
        self.is_alive = True
        self.on_gpus = False
        """What it says of itself when it joins."""

    async def start(self) -> None:
        """Serves, joins, pulls."""
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
        """SIGCONT."""
        self.engine.is_stopped = self.engine.frozen = False


@dataclass
class Rig:
    """One run."""

    settings: RunSettings
    store: StoreUnderTest
    collective: Collective
    actor: RigActor
    fleet: Fleet
    publisher: PolicyPublisher
    threads: StoreThreads
    twins: list[Twin] = field(default_factory=list)
    ending: set[asyncio.Task[None]] = field(default_factory=set)
    num_admitted: int = 0
    replica: type[Replica] = Replica

    @property
    def alive(self) -> list[Twin]:
        """Processes that have not ended."""
        return [twin for twin in self.twins if twin.is_alive]

    async def rollout(self, name: str, *, on_gpus: bool = False) -> Twin:
        """Starts a process of this name."""
        self.twins.append(twin := Twin(self, name, len(self.twins), self.replica))
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
        """All that is committed."""
        return read_trajectories(self.store.ledger, self.store.rows)

    def violations(self) -> list[str]:
        """What the checker finds."""
        return violations(self.trajectories(), read_attested(self.store.connection, self.store.run), oracle)


def at_the_start(ctl: int) -> Recovered:
    """A run of which nothing is published."""
    return Recovered(
        ctl=ctl,
        position=RunPosition(),
        live={},
        backlog=(),
        policy_version=-1,
        retained_bytes=0,
        saved_step=0,
        is_actor_restored=False,
        step_of_version={},
        sealed=None,
        begun=frozenset(),
        rates={},
    )


@asynccontextmanager
async def publish_rig(store: StoreUnderTest, tree: dict[str, Any], folder: Path) -> AsyncIterator[Rig]:
    """An actor at step 0, nothing published, nobody joined; `tree` is merged over settings with short deadlines."""
    defaults: dict[str, Any] = {
        "run": {"name": store.run, "dir": str(folder / "run"), "num_steps": 1},
        "model": {"path": str(folder / "model"), "dtype": "float32"},
        "data": {"train": str(folder / "train.jsonl")},
        "algorithm": {"groups_per_batch": 2},
        "reward": {"components": {"correct": {"scorer": {"kind": "exact_match"}}}},
        "controller": {"lease_s": LEASE_S, "heartbeat_s": HEARTBEAT_S, "stall_timeout_s": 20.0},
        "rollout": {"hang_s": HANG_S},
        "weights": {"open_timeout_s": OPEN_S, "bucket_timeout_s": BUCKET_S, "publish_timeout_s": 15.0},
    }
    settings = RunSettings.model_validate(
        {name: {**defaults.get(name, {}), **tree.get(name, {})} for name in defaults.keys() | tree.keys()}
    )
    collective = Collective()
    actor = RigActor(collective)  # type: ignore[abstract]  # a publish asks for two of its methods
    server = Server(RpcSection(), "127.0.0.1:0")
    server.add(actor_pb2_grpc.add_ActorServiceServicer_to_server, actor, "rolecall.v1.ActorService")
    channel = open_channel(await server.start(), RpcSection())
    threads = StoreThreads()
    fleet = Fleet(settings, store.ledger, threads)
    stub = actor_pb2_grpc.ActorServiceStub(channel)
    publisher = PolicyPublisher(settings, store.ledger, threads, fleet, stub, PROBE, at_the_start(store.ledger.ctl))
    rig = Rig(settings, store, collective, actor, fleet, publisher, threads)
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
    """What a caller of a process that just died gets."""
    return UnavailableError(f"{what} cannot be reached")
