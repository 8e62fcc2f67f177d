"""Eyes for a real run, whose roles have no hooks: the controller's status, asked several times a second, told to the
observer and the traps as events.

A heartbeat carries what a worker says it is doing; that is its phase here, `says <first word>`, as late as heartbeats
are.
"""

import asyncio
import time
from contextlib import suppress

from rolecall.errors import RoleCallError
from rolecall.rpc.callers import Caller
from rolecall.rpc.channel import open_channel
from rolecall.rpc.identity import acting_as
from rolecall.settings import RunSettings
from rolecall.v1 import controller_pb2, controller_pb2_grpc
from tests.chaos.links import Traps
from tests.chaos.observer import OUTSIDE, Observer

LOOK_S = 0.2
TIMEOUT_S = 2.0


async def watch(settings: RunSettings, observer: Observer, traps: Traps) -> None:
    """Tells until cancelled."""
    assert settings.controller.address is not None
    eyes = _Eyes(observer, traps)
    async with open_channel(settings.controller.address, acting_as(settings, Caller.VIEWER).rpc) as channel:
        stub = controller_pb2_grpc.ControllerServiceStub(channel)
        while True:
            asked_at = time.monotonic()
            with suppress(RoleCallError):
                eyes.saw((await stub.GetRun(controller_pb2.GetRunRequest(), timeout=TIMEOUT_S)).status, asked_at)
            await asyncio.sleep(LOOK_S)


class _Eyes:
    def __init__(self, observer: Observer, traps: Traps) -> None:
        self._observer = observer
        self._traps = traps
        self._incarnations: dict[str, str] = {}
        self._renewed_at: dict[str, float] = {}
        """When the present incarnation of each worker was first seen."""
        self._progress: tuple[int, ...] = ()
        self._step = -1

    def saw(self, status: controller_pb2.RunStatus, asked_at: float) -> None:
        observer, ledger = self._observer, status.ledger
        self._back("controller", asked_at)
        progress = (status.step, status.policy_version, ledger.trained, ledger.committed, sum(ledger.dropped.values()))
        if progress != self._progress:
            self._progress = progress
            observer.moved()
            for target in ("store", "reward/worker", OUTSIDE):
                self._back(target, asked_at)
        if status.step > self._step:
            observer.stepped(status.step - max(self._step, 0))
            self._step = status.step
        for worker in status.workers:
            self._saw_worker(worker, asked_at)

    def _saw_worker(self, worker: controller_pb2.WorkerStatus, asked_at: float) -> None:
        name = worker.worker
        if worker.lost:
            self._observer.noticed(name)
            return
        if self._incarnations.get(name) != worker.incarnation:
            self._incarnations[name], self._renewed_at[name] = worker.incarnation, asked_at
        heard_at = asked_at - worker.silence_s
        if worker.policy_version >= 0 or worker.role != controller_pb2.ROLE_ROLLOUT:
            self._back(name, heard_at)
            self._back(f"{name}/1", self._renewed_at[name])  # another rank's end takes the whole role with it
        self._traps.visit(name, f"says {worker.phase.partition(' ')[0]}")

    def _back(self, target: str, seen_at: float) -> None:
        record = self._observer.open.get(target)
        if record is None or seen_at > record.hit_at:
            self._observer.back(target)
