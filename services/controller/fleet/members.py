"""The fleet: which workers joined, which are alive, and what happens to the rest.

Owns membership. A worker that leaves, is given up (liveness.py says when) or replaced by its next incarnation is
expelled from the store: its attestation is revoked and its claims go to others. An incarnation that left, hung or was
replaced is refused for ever: a zombie that wakes up ends instead of taking its successor's place. publisher.py brings
new weights to the rollouts.
"""

import asyncio
import ipaddress
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from rolecall.address import host_of, is_loopback
from rolecall.contract import contract_version
from rolecall.data.images.tokens import image_processor_of
from rolecall.errors import (
    ConfigError,
    DeadlineError,
    InvalidInputError,
    StoreRolledBackError,
    StoreUnavailableError,
    UnknownWorkerError,
    VersionMismatchError,
    WorkerLostError,
)
from rolecall.rpc.channel import open_channel
from rolecall.settings import RunSettings
from rolecall.store.ledger import Ledger
from rolecall.v1 import controller_pb2
from rolecall.v1.rollout_pb2_grpc import RolloutServiceStub
from services.controller.fleet.liveness import Loss, Rollout, Worker
from services.controller.tasks import FirstErrorGroup
from services.controller.threads import StoreThreads

logger = logging.getLogger(__name__)
T = TypeVar("T")

LOOKS_PER_HEARTBEAT = 4
"""How often the living are looked at, per heartbeat period."""
MAX_REMEMBERED = 1024
"""Lost workers, and refused incarnations, that are remembered; the oldest are forgotten."""
LINGER_S = 60.0
"""The connection to a lost rollout is kept that long: closing it would cancel those who still wait for a call, and they
are told soon enough why it fails.
"""
TRAINERS = (controller_pb2.ROLE_ACTOR, controller_pb2.ROLE_CRITIC)
MAKERS = (controller_pb2.ROLE_ROLLOUT, controller_pb2.ROLE_ACTOR)
"""Roles whose tokenizer is the policy's."""


@dataclass(frozen=True)
class Lost:
    """The last incarnation of a worker that is a member no more."""

    worker: Worker
    loss: Loss
    has_left: bool
    """Whether it was asked to end, and said so."""


class Fleet:
    """All workers that joined. Used from one event loop."""

    def __init__(
        self,
        settings: RunSettings,
        ledger: Ledger,
        threads: StoreThreads,
        clock: Callable[[], float] = time.monotonic,
        *,
        tokenizer: str,
        token_ids: str,
    ) -> None:
        """tokenizer, token_ids: the policy's digest and ids_digest (rolecall/data/tokenizer.py)."""
        self._settings = settings
        self._contracts = contract_version()
        self._image_processor = image_processor_of(settings, settings.model.path)
        self._tokenizer, self._token_ids = tokenizer, token_ids
        self._ledger = ledger
        self._threads = threads
        self._clock = clock
        self._workers: dict[str, Worker] = {}
        self._lost: dict[str, Lost] = {}
        self._refused: dict[str, str] = {}
        self._to_expel: deque[tuple[Worker, str, bool]] = deque()
        """Workers to expel, why, and whether each left when asked: then no prompt that it still held is to blame."""
        self._closing: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()

    # --- what workers say -------------------------------------------------------------------------

    def join(self, request: controller_pb2.JoinRequest) -> None:
        """Takes a worker in; a new incarnation replaces the old one. WorkerLostError for an incarnation that was given
        up for good; InvalidInputError, VersionMismatchError or ConfigError for one of another run, release, image
        processor or tokenizer.
        """
        if request.run != self._settings.run.name:
            raise InvalidInputError(
                f"{request.worker} means to serve run {request.run!r}; this is {self._settings.run.name!r}: mend "
                "controller.address"
            )
        if request.version != self._contracts:
            raise VersionMismatchError(
                f"{request.worker} was built with contracts {request.version or 'of no version'}, the controller "
                f"with {self._contracts}; "
                "install one release everywhere (from a checkout: the same commit)"
            )
        self._refuse_if_it_reads_otherwise(request)
        self._refuse_if_given_up(f"{request.worker}.{request.incarnation}")
        known = self._workers.get(request.worker)
        if known is not None and known.join.incarnation == request.incarnation:
            known.last_seen = self._clock()
            return
        if known is not None:
            self._replace(known, request)
        lost = self._lost.pop(request.worker, None)
        if lost is not None and lost.worker.join.incarnation != request.incarnation:
            self._refuse(lost.worker.consumer, f"replaced by {request.worker}.{request.incarnation}")
        self._workers[request.worker] = self._member(request)
        self._changed.set()
        logger.info("%s.%s joined from %s", request.worker, request.incarnation, request.address)

    def role_of(self, worker: str) -> controller_pb2.Role.ValueType | None:
        """The role of a member; None when there is none of this name."""
        known = self._workers.get(worker)
        return None if known is None else known.join.role

    def heartbeat(self, request: controller_pb2.HeartbeatRequest) -> None:
        """Notes a sign of life, or the last one of a worker that leaves. UnknownWorkerError when it must join again,
        WorkerLostError when it must end.
        """
        self._refuse_if_given_up(f"{request.worker}.{request.incarnation}")
        worker = self._workers.get(request.worker)
        if worker is None or worker.join.incarnation != request.incarnation:
            raise UnknownWorkerError(f"{request.worker}.{request.incarnation} is not a member; join again")
        worker.heard(request, self._clock())
        if request.leaving:
            logger.info("%s has left", worker.consumer)
            self._part_with(worker, Loss("it was asked to end and has left", is_final=True), has_left=True)

    def _member(self, request: controller_pb2.JoinRequest) -> Worker:
        now, hang_s = self._clock(), self._hang_s(request)
        if request.role != controller_pb2.ROLE_ROLLOUT:
            return Worker(join=request, hang_s=hang_s, last_seen=now, moved_at=now)
        channel = open_channel(request.address, self._settings.rpc, server_name=_name_expected(request.address))
        return Rollout(
            join=request, hang_s=hang_s, last_seen=now, moved_at=now, channel=channel, stub=RolloutServiceStub(channel)
        )

    def _hang_s(self, request: controller_pb2.JoinRequest) -> float:
        is_rollout = request.role == controller_pb2.ROLE_ROLLOUT
        return self._settings.rollout.hang_s if is_rollout else self._settings.actor.hang_s

    def _refuse_if_it_reads_otherwise(self, request: controller_pb2.JoinRequest) -> None:
        if request.role != controller_pb2.ROLE_REWARD and request.image_processor != self._image_processor:
            if not (request.image_processor and self._image_processor):
                shows, lacks = "the controller", request.worker
                if request.image_processor:
                    shows, lacks = lacks, shows
                raise ConfigError(
                    f"images are shown by the CONFIG of {shows} alone, not by that of {lacks}; start all roles with "
                    "one CONFIG and the same overrides"
                )
            raise ConfigError(
                f"{request.worker} makes other pixels or tokens of an image than the run's model.path says: its model "
                "directory has another preprocessor_config.json, processor_config.json or config.json; copy them from "
                "the controller's model.path"
            )
        makes = request.role in MAKERS
        if request.tokenizer in ("", self._tokenizer if makes else self._token_ids):
            return
        if makes:
            raise ConfigError(
                f"{request.worker} makes other tokens or text than the controller: its model directory has another "
                "tokenizer.json, tokenizer_config.json or chat template; copy them from the controller's model.path, "
                "and start all roles with one lock and one CONFIG"
            )
        raise ConfigError(
            f"{request.worker} takes the policy's token ids for other text: its model directory has the tokenizer of "
            "another family; name a model of the policy's family, or, where its embeddings are of the policy's ids, "
            "copy tokenizer.json from the controller's model.path"
        )

    def _refuse_if_given_up(self, consumer: str) -> None:
        reason = self._refused.get(consumer)
        if reason is not None:
            raise WorkerLostError(
                f"the controller gave {consumer} up ({reason}); this process must end, another takes its place",
                worker=consumer,
            )

    # --- who is alive -----------------------------------------------------------------------------

    def statuses(self) -> list[controller_pb2.WorkerStatus]:
        """Every member, and who was lost and has not been replaced."""
        now = self._clock()
        known = [(worker, "") for worker in self._workers.values()] + [
            (lost.worker, lost.loss.reason) for lost in self._lost.values() if not lost.has_left
        ]
        return [
            controller_pb2.WorkerStatus(
                worker=worker.join.worker,
                role=worker.join.role,
                address=worker.join.address,
                policy_version=worker.policy_version,
                phase=worker.phase,
                silence_s=now - worker.last_seen,
                incarnation=worker.join.incarnation,
                lost=reason,
            )
            for worker, reason in sorted(known, key=lambda each: each[0].join.worker)
        ]

    def consumers(self) -> set[str]:
        """Consumer names of every member."""
        return {worker.consumer for worker in self._workers.values()}

    def rollouts(self) -> list[Rollout]:
        """Living rollouts, in order of name."""
        return [worker for _, worker in sorted(self._workers.items()) if isinstance(worker, Rollout)]

    def revoke(self) -> None:
        """A publish began: no rollout is attested until it holds the new version."""
        for rollout in self.rollouts():
            rollout.revoke(self._clock())

    def attest(self, rollout: Rollout, policy_version: int) -> None:
        """`rollout` serves this version."""
        rollout.attest(policy_version)

    def actors(self) -> tuple[str, ...]:
        """Consumer names of the living actor, which is one; none when it is away, or joins no controller."""
        return tuple(
            worker.consumer for worker in self._workers.values() if worker.join.role == controller_pb2.ROLE_ACTOR
        )

    def is_lost(self, worker: str) -> str:
        """The reason why the worker of this name is no member any more; "" while it is one, or was never."""
        lost = self._lost.get(worker)
        return "" if lost is None else lost.loss.reason

    async def wait_for_rollouts(self, number: int, timeout_s: float) -> None:
        """Returns once `number` rollouts are members. DeadlineError after timeout_s."""
        try:
            async with asyncio.timeout(timeout_s):
                while len(self.rollouts()) < number:
                    await self._change()
        except TimeoutError as error:
            raise DeadlineError(
                f"{len(self.rollouts())} of {number} rollouts joined within {timeout_s:.0f} s; start them with "
                "`rolecall serve rollout`"
            ) from error

    async def until_lost(self, members: Sequence[Rollout]) -> dict[str, WorkerLostError]:
        """Returns as soon as one of `members` is no longer a member: which, and why."""
        while True:
            gone = {
                rollout.consumer: self._error_of(rollout)
                for rollout in members
                if self._workers.get(rollout.join.worker) is not rollout
            }
            if gone:
                return gone
            await self._change()

    async def trainer_lost(self) -> None:
        """Runs while the trainers live. WorkerLostError when one that is a member now, or joins meanwhile, is lost or
        replaced.
        """
        watched: dict[str, Worker] = {}
        while True:
            for name, worker in watched.items():
                if self._workers.get(name) is not worker:
                    raise self._error_of(worker)
            watched |= {name: worker for name, worker in self._workers.items() if worker.join.role in TRAINERS}
            await self._change()

    async def settled(self) -> None:
        """Returns when everyone given up so far is expelled. Until then the store may still think one of them attested,
        also one that has joined again.
        """
        while self._to_expel:
            await self._change()

    async def _change(self) -> None:
        self._changed.clear()
        await self._changed.wait()  # bounded: by its callers, who wait beside work that has a deadline

    def _error_of(self, worker: Worker) -> WorkerLostError:
        name = worker.join.worker
        reason = self.is_lost(name) or self._refused.get(worker.consumer) or "it was away and has joined again"
        return WorkerLostError(f"{worker.consumer} is lost: {reason}", worker=worker.consumer)

    # --- giving up --------------------------------------------------------------------------------

    async def watch(self) -> None:
        """Judges everyone, and expels the lost from the store; outages of the store are waited for. Runs until
        cancelled.
        """
        async with FirstErrorGroup() as tasks:
            tasks.create_task(self._judge())
            tasks.create_task(self._expel())

    async def _judge(self) -> None:
        controller = self._settings.controller
        look_s = controller.heartbeat_s / LOOKS_PER_HEARTBEAT
        while True:
            due = self._clock() + look_s
            await asyncio.sleep(look_s)
            now = self._clock()
            if now - due > controller.heartbeat_s:
                logger.warning("this controller stood still for %.1f s; nobody's silence in it counts", now - due)
                for worker in self._workers.values():
                    worker.forgive(now - due, now)
            for worker in list(self._workers.values()):
                loss = worker.loss(now, controller, look_s)
                if loss is not None:
                    self.give_up(worker, loss)

    def give_up(self, worker: Worker, loss: Loss) -> None:
        """Ends a membership."""
        logger.warning("%s is given up: %s", worker.consumer, loss.reason)
        self._part_with(worker, loss, has_left=False)

    def _part_with(self, worker: Worker, loss: Loss, *, has_left: bool) -> None:
        del self._workers[worker.join.worker]
        _remember(self._lost, worker.join.worker, Lost(worker, loss, has_left))
        if loss.is_final:
            self._refuse(worker.consumer, loss.reason)
        self._to_expel.append((worker, loss.reason, has_left))
        self._changed.set()

    def _replace(self, worker: Worker, request: controller_pb2.JoinRequest) -> None:
        reason = f"replaced by {request.worker}.{request.incarnation}"
        self._refuse(worker.consumer, reason)
        self._to_expel.append((worker, f"its process ended while {worker.phase!r}; {reason}", False))

    def _refuse(self, consumer: str, reason: str) -> None:
        _remember(self._refused, consumer, reason)

    async def _expel(self) -> None:
        while True:
            while self._to_expel:
                worker, reason, has_left = self._to_expel[0]
                try:
                    await self._bury(worker, reason, is_excused=has_left or worker.was_paused)
                except (StoreUnavailableError, StoreRolledBackError) as error:  # the loop sees to it
                    logger.warning("%s is not expelled yet: %s", worker.consumer, error.message)
                    await asyncio.sleep(self._settings.controller.heartbeat_s)
                    continue
                self._to_expel.popleft()
                self._changed.set()
            await self._change()

    async def _bury(self, worker: Worker, reason: str, *, is_excused: bool) -> None:
        if isinstance(worker, Rollout):
            limit = self._settings.controller.max_deliveries
            await self._threads.call(self._ledger.expel, worker.consumer, limit, is_excused, error=reason)
            self._closing.add(task := asyncio.create_task(_close_later(worker)))
            task.add_done_callback(self._closing.discard)

    async def close(self) -> None:
        """Closes the connections."""
        for task in self._closing:
            task.cancel()
        # bounded: a channel that closes without grace cancels its calls
        await asyncio.gather(
            *self._closing, *(rollout.channel.close() for rollout in self.rollouts()), return_exceptions=True
        )


async def _close_later(rollout: Rollout) -> None:
    try:
        await asyncio.sleep(LINGER_S)
    finally:
        await rollout.channel.close()


def _remember(memory: dict[str, T], key: str, value: T) -> None:
    memory.pop(key, None)
    memory[key] = value
    if len(memory) > MAX_REMEMBERED:
        del memory[next(iter(memory))]


def _name_expected(address: str) -> str | None:
    """Returns the name that the certificate of a rollout at `address` must have: its role, where that is the address of
    a pod or a container, which no certificate can know; None: the host.
    """
    if is_loopback(address):
        return None
    try:
        ipaddress.ip_address(host_of(address))
    except ValueError:
        return None
    return "rollout"
