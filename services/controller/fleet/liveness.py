"""A worker as the controller sees it, and the verdict on whether it lives: by its heartbeats and this process's
monotonic clock alone.

    silent   no heartbeat for controller.lease_s: dead, cut off or stopped. It may join again when it wakes up; what it
    held has passed on
    hung     its heartbeats come, it says that it has work, and its progress has not moved for hang_s of its section.
    Given up for good

Owns no list of workers and does nothing about a verdict: the fleet does.
"""

import math
from dataclasses import dataclass

import grpc.aio

from rolecall.settings import ControllerSection
from rolecall.v1 import controller_pb2
from rolecall.v1.rollout_pb2_grpc import RolloutServiceStub


@dataclass(frozen=True)
class Loss:
    """The reason why a worker was given up."""

    reason: str
    is_final: bool
    """Whether this incarnation may never join again."""


@dataclass(kw_only=True, eq=False)
class Worker:
    """One process that joined. All times are monotonic seconds."""

    join: controller_pb2.JoinRequest
    hang_s: float
    """Longest time with work and without progress."""
    last_seen: float
    """Time of the last sign of life."""
    moved_at: float
    """When it was last heard to move, or to have nothing to do."""
    progress: int = -1
    phase: str = "joined"
    busy: bool = False
    """Whether it said last that it has work in hand."""
    policy_version: int = -1
    """Version it is attested at, served since; -1 for none."""
    paused_since: float = math.inf
    """When its attestation was revoked for a publish; inf while it serves."""

    @property
    def consumer(self) -> str:
        """The worker's name in the store."""
        return f"{self.join.worker}.{self.join.incarnation}"

    @property
    def was_paused(self) -> bool:
        """Whether it was last seen paused for a publish: then no prompt is to blame for its end."""
        return self.last_seen > self.paused_since

    def heard(self, beat: controller_pb2.HeartbeatRequest, now: float) -> None:
        """A heartbeat came."""
        if not beat.busy or beat.progress != self.progress:
            self.moved_at = now
        self.last_seen, self.progress, self.phase, self.busy = now, beat.progress, beat.phase, beat.busy

    def revoke(self, now: float) -> None:
        """A publish began: it is attested at nothing, and paused from `now` on unless it was already."""
        self.policy_version, self.paused_since = -1, min(self.paused_since, now)

    def attest(self, policy_version: int) -> None:
        """Notes that the worker serves this version."""
        self.policy_version, self.paused_since = policy_version, math.inf

    def forgive(self, seconds: float, now: float) -> None:
        """Does not count `seconds` during which this process could not listen."""
        self.last_seen, self.moved_at = min(now, self.last_seen + seconds), min(now, self.moved_at + seconds)

    def loss(self, now: float, controller: ControllerSection, look_s: float) -> Loss | None:
        """The verdict, None while it lives. Given at the last look before the bound would be passed; what a heartbeat
        tells may be a heartbeat old.
        """
        silence_s, still_s = now - self.last_seen, now - self.moved_at
        if silence_s + look_s > controller.lease_s:
            return Loss(f"silent for {silence_s:.1f} s while {self.phase!r}", is_final=False)
        if still_s + controller.heartbeat_s + look_s > self.hang_s:
            return Loss(f"hung: no progress for {still_s:.1f} s while {self.phase!r}", is_final=True)
        return None


@dataclass(kw_only=True, eq=False)
class Rollout(Worker):
    """A worker that samples, with the connection to it."""

    channel: grpc.aio.Channel
    stub: RolloutServiceStub
