"""The fleet: which workers joined, which are alive.

Owns membership and judges liveness by this process's monotonic clock alone (protocol, rule 4). How new weights reach the rollouts is publish.py's affair.
"""

import asyncio
import logging
import time
from dataclasses import dataclass

import grpc.aio

from rolecall import __version__
from rolecall.errors import DeadlineError, InvalidInputError, UnknownWorkerError, VersionMismatchError
from rolecall.rpc.channel import open_channel
from rolecall.settings import RunSettings
from rolecall.store.ledger import Ledger
from rolecall.v1 import controller_pb2
from rolecall.v1.rollout_pb2_grpc import RolloutServiceStub
from services.controller.threads import StoreThreads

logger = logging.getLogger(__name__)


@dataclass(kw_only=True)
class Worker:
    """One process that joined."""

    join: controller_pb2.JoinRequest
    last_seen: float
    """Monotonic seconds of its last sign of life; -inf once it was replaced."""
    phase: str = "joined"
    policy_version: int = -1
    """Version it is attested at; -1 for none."""

    @property
    def consumer(self) -> str:
        """Its name in the store."""
        return f"{self.join.worker}.{self.join.incarnation}"


@dataclass(kw_only=True)
class Rollout(Worker):
    """A worker that samples, with the connection to it."""

    channel: grpc.aio.Channel
    stub: RolloutServiceStub


class Fleet:
    """All workers that joined. Used from one event loop."""

    def __init__(self, settings: RunSettings, ledger: Ledger, threads: StoreThreads) -> None:
        self._settings = settings
        self._ledger = ledger
        self._threads = threads
        self._workers: dict[str, Worker] = {}
        self._replaced: list[Worker] = []
        self._changed = asyncio.Event()

    def join(self, request: controller_pb2.JoinRequest) -> None:
        """Takes a worker in; a new incarnation replaces the old one, whose claims go back at the next sweep."""
        if request.run != self._settings.run.name:
            raise InvalidInputError(f"{request.worker} means to serve run {request.run!r}; this is {self._settings.run.name!r}: mend controller.address")
        if request.version != __version__:
            raise VersionMismatchError(f"{request.worker} was built with contracts {request.version}, the controller with {__version__}; install one release")
        known = self._workers.get(request.worker)
        if known is not None:
            known.last_seen = time.monotonic()
            if known.join.incarnation == request.incarnation:
                return
            self._replaced.append(known)
        if request.role == controller_pb2.ROLE_ROLLOUT:
            channel = open_channel(request.address, self._settings.rpc)
            self._workers[request.worker] = Rollout(join=request, last_seen=time.monotonic(), channel=channel, stub=RolloutServiceStub(channel))
        else:
            self._workers[request.worker] = Worker(join=request, last_seen=time.monotonic())
        self._changed.set()
        logger.info("%s.%s joined from %s", request.worker, request.incarnation, request.address)

    def heartbeat(self, request: controller_pb2.HeartbeatRequest) -> None:
        """Notes a sign of life. UnknownWorkerError when the worker must join again."""
        worker = self._workers.get(request.worker)
        if worker is None or worker.join.incarnation != request.incarnation:
            raise UnknownWorkerError(f"{request.worker}.{request.incarnation} is not a member; join again")
        worker.last_seen = time.monotonic()
        worker.phase = request.phase

    def statuses(self) -> list[controller_pb2.WorkerStatus]:
        """Every member, for people."""
        now = time.monotonic()
        return [
            controller_pb2.WorkerStatus(
                worker=worker.join.worker,
                role=worker.join.role,
                address=worker.join.address,
                policy_version=worker.policy_version,
                phase=worker.phase,
                silence_s=now - worker.last_seen,
            )
            for _, worker in sorted(self._workers.items())
        ]

    def rollouts(self) -> list[Rollout]:
        """Living rollouts, in order of name."""
        return [worker for _, worker in sorted(self._workers.items()) if isinstance(worker, Rollout)]

    async def wait_for_rollouts(self, number: int, timeout_s: float) -> None:
        """Returns once `number` rollouts are members. DeadlineError after timeout_s."""
        try:
            async with asyncio.timeout(timeout_s):
                while len(self.rollouts()) < number:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError as error:
            raise DeadlineError(
                f"{len(self.rollouts())} of {number} rollouts joined within {timeout_s:.0f} s; start them with `rolecall serve rollout`"
            ) from error

    async def watch(self) -> None:
        """Buries the silent and the replaced: their claims go back to the stream. Runs until cancelled."""
        while True:
            await asyncio.sleep(self._settings.controller.heartbeat_s)
            now = time.monotonic()
            for name, worker in list(self._workers.items()):
                if now - worker.last_seen > self._settings.controller.lease_s:
                    logger.warning("%s has been silent for %.1f s and is taken for dead", worker.consumer, now - worker.last_seen)
                    del self._workers[name]
                    await self._bury(worker)
            while self._replaced:
                await self._bury(self._replaced.pop())

    async def _bury(self, worker: Worker) -> None:
        if isinstance(worker, Rollout):
            await self._threads.call(self._ledger.expel, worker.consumer, self._settings.controller.max_deliveries)
            await worker.channel.close()

    async def close(self) -> None:
        """Closes the connections."""
        for rollout in self.rollouts():
            await rollout.channel.close()
