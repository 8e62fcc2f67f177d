"""A weight channel in one process, its root and its receivers, for publishes in which something goes wrong.

The collective has the rules of the real one: all ranks meet or nobody goes on, buckets move in lockstep, an abort frees
everyone, the root knows who is behind. Weights are a few strings. An engine computes with the buckets it really holds,
so that torn or false weights show in its tokens.
"""

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from rolecall.errors import ChannelBrokenError, RoleCallError, TornWeightsError
from rolecall.trajectory import seed_of
from rolecall.v1 import actor_pb2, actor_pb2_grpc, trajectory_pb2, weights_pb2
from rolecall.weights.transferred import Transferred, encode_fingerprints
from rolecall.wire import decode_tensor, encode_tensor
from services.rollout.replica import Replica
from services.rollout.sampling import MeetingPlace, Probed, Transfer
from services.rollout.state import State
from tests.twins.engine import DigestEngine
from tests.twins.weights import numbers_of, token_of

NUM_BUCKETS = 4
POLL_S = 0.002
RUN_SEED = 11


class Kind(Enum):
    """The ways in which a receiver fails."""

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
    """A failure that strikes once, when the engine comes by its phase."""

    phase: str
    kind: Kind


def digest_of(buckets: Sequence[str]) -> str:
    """Returns the digest of the weights that consist of these buckets."""
    return hashlib.sha256("|".join(buckets).encode()).hexdigest()


def weights_after(step: int) -> list[str]:
    """Returns the policy's buckets after `step` steps."""
    return [f"{step}/{i}" for i in range(NUM_BUCKETS)]


def transferred(buckets: Sequence[str]) -> Transferred:
    """Returns what either side of a whole transfer says of it."""
    fingerprints = {f"bucket-{i}": int(digest_of([bucket])[:8], 16) for i, bucket in enumerate(buckets)}
    return Transferred(fingerprints, digest_of(buckets), num_bytes=8, wire_bytes=8, transfer_s=0.001)


def oracle(meta: trajectory_pb2.TrajectoryMeta, token_ids: Sequence[int], index: int, digest: str) -> int:
    """Returns what weights of `digest` sample at `index`: an attestation.Oracle."""
    start = meta.num_prompt_tokens
    return token_of(token_ids[:start], seed_of(RUN_SEED, meta.gid, meta.index), digest, index - start)[0]


@dataclass
class Meeting:
    """The state of one epoch of the collective."""

    epoch: int
    world_size: int
    arrived: set[int] = field(default_factory=set)
    offered: list[str] = field(default_factory=list)
    """The buckets of all publishes of the epoch: a receiver may come before the root begins."""
    counts: dict[int, int] = field(init=False)
    """The number of buckets that each receiver took."""
    broken: str = ""

    def __post_init__(self) -> None:
        self.counts = dict.fromkeys(range(1, self.world_size), 0)

    def check(self) -> None:
        """Raises ChannelBrokenError when it is over."""
        if self.broken:
            raise ChannelBrokenError(f"epoch {self.epoch} is broken: {self.broken}")


class Collective:
    """The twin of rolecall.weights; a run has one, as its actor has."""

    def __init__(self) -> None:
        self.meetings: dict[int, Meeting] = {}

    def open(self, epoch: int, world_size: int) -> None:
        """Opens an epoch and aborts those before."""
        for meeting in self.meetings.values():
            meeting.broken = meeting.broken or f"epoch {epoch} was opened"
        self.meetings[epoch] = Meeting(epoch, world_size)

    async def until(self, meeting: Meeting, timeout_s: float, ready: Callable[[], bool], late: str) -> None:
        """Polls until `ready`. Raises ChannelBrokenError when the epoch breaks; breaks it when it takes too long, which
        no time does in which this process stood still.
        """
        clock, waited_s = asyncio.get_running_loop().time, 0.0
        while not ready():
            meeting.check()
            if waited_s > timeout_s:
                meeting.broken = meeting.broken or late
            since = clock()
            await asyncio.sleep(POLL_S)
            waited_s += min(clock() - since, 10 * POLL_S)
        meeting.check()

    async def meet(self, epoch: int, rank: int, timeout_s: float) -> None:
        """Returns when all ranks are there."""
        meeting = self.meetings[epoch]
        meeting.arrived.add(rank)
        await self.until(
            meeting, timeout_s, lambda: len(meeting.arrived) == meeting.world_size - 1, "the ranks did not meet"
        )

    async def send(self, epoch: int, buckets: Sequence[str], timeout_s: float) -> None:
        """Sends as the root: at most one bucket ahead of the slowest."""
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
        """Returns a receiver's next bucket."""
        meeting = self.meetings[epoch]
        index = meeting.counts[rank]
        await self.until(meeting, timeout_s, lambda: len(meeting.offered) > index, "the actor was late")
        meeting.counts[rank] = index + 1
        return meeting.offered[index]


class CollectiveEngine(DigestEngine):
    """An engine that computes with the buckets it holds, and fails as it is told."""

    def __init__(self, collective: Collective) -> None:
        super().__init__(max_model_tokens=128, token_s=0.002)
        self._collective = collective
        self._rank = 0
        self.buckets: list[str] = []
        self._hold(["empty"] * NUM_BUCKETS)
        self.fault: Fault | None = None
        self.has_died = asyncio.Event()
        self.is_stopped = False
        self.late_s = 0.0
        self.backend = ""
        """The back end of the epoch joined last."""

    def _hold(self, buckets: list[str]) -> None:
        self.buckets, self.digest = buckets, digest_of(buckets)

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
            self._hold(["false", *self.buckets[1:]])
        self.is_stopped = self.is_stopped or kind is Kind.STOP
        self.frozen = self.frozen or kind in (Kind.HANG, Kind.STOP)
        while self.frozen:
            await asyncio.sleep(POLL_S)

    async def probe(self, token_ids: Sequence[int], num_decoded: int) -> Probed:
        await self._pass("probe")
        return await super().probe(token_ids, num_decoded)

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
            self._hold([*self.buckets[:index], bucket, *self.buckets[index + 1 :]])
            if index == 1:
                await self._pass("bucket")
        self._version = policy_version
        return transferred(arrived)


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


class CollectiveActor(actor_pb2_grpc.ActorServiceServicer):
    """An actor that is the root of the collective."""

    def __init__(self, collective: Collective) -> None:
        self._collective = collective
        self.step = 0
        self.version = -1
        self.published = (-1, -1)
        """The last version, and the step of its weights."""
        self.false_buckets: list[str] = []
        """What it sends instead of its weights, if any."""
        self.aborted: list[int] = []
        """Epochs whose publish was cancelled."""
        self.meeting_timeout_s = 0.0
        """Deadline of the last meeting."""
        self.failures: dict[str, RoleCallError] = {}
        """Errors that the next call of a phase ("open", "publish") answers."""

    async def OpenWeightChannel(
        self, request: weights_pb2.OpenWeightChannelRequest, context: Any
    ) -> weights_pb2.OpenWeightChannelResponse:
        if error := self.failures.pop("open", None):
            raise error
        self._collective.open(request.epoch, request.world_size)
        self.meeting_timeout_s = request.timeout_s
        backend = weights_pb2.WEIGHT_BACKEND_NCCL if request.receivers_on_gpus else weights_pb2.WEIGHT_BACKEND_GLOO
        return weights_pb2.OpenWeightChannelResponse(address="127.0.0.1:1", backend=backend)

    async def PublishWeights(
        self, request: actor_pb2.PublishWeightsRequest, context: Any
    ) -> actor_pb2.PublishWeightsResponse:
        assert request.step == self.step
        assert request.policy_version > self.version or (request.policy_version, request.step) == self.published
        self.version, self.published = request.policy_version, (request.policy_version, request.step)
        if error := self.failures.pop("publish", None):
            self._collective.meetings[request.epoch].broken = "the actor died"
            raise error
        buckets = self.false_buckets or weights_after(self.step)
        try:
            await self._collective.send(request.epoch, buckets, request.bucket_timeout_s)
        except asyncio.CancelledError:
            self.aborted.append(request.epoch)
            self._collective.meetings[request.epoch].broken = "the caller left"
            raise
        sent = transferred(buckets)
        logprobs = numbers_of(sent.digest, decode_tensor(request.probe.token_ids, "probe.token_ids").tolist())
        return actor_pb2.PublishWeightsResponse(
            fingerprints=encode_fingerprints(sent.fingerprints),
            digest=sent.digest,
            probe=weights_pb2.Probe(token_ids=request.probe.token_ids, logprobs=encode_tensor(logprobs)),
            num_bytes=sent.num_bytes,
            transfer_s=sent.transfer_s,
        )
