"""A whole run behind sidecars: each role a process with an Envoy of its own, started again as a kubelet would.

The roles are started by their entry points and their settings alone, as in containers: each listens on loopback, has
`rpc.behind_mesh`, and knows the others by the addresses of its own sidecar. The store and the weight channel lead past
the sidecars. Without habits there are no sidecars, and the roles reach each other as on one machine.
"""

import asyncio
import dataclasses
import random
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from rolecall.errors import RoleCallError
from rolecall.launcher.plan import plan_workers, write_config
from rolecall.launcher.processes import FINAL_CODES, Processes, Worker
from rolecall.launcher.run_dir import prepare_run_dir
from rolecall.rpc.callers import Caller
from rolecall.rpc.channel import open_channel
from rolecall.rpc.identity import acting_as
from rolecall.settings import RunSettings
from rolecall.store.embedded import EmbeddedStore
from rolecall.v1 import controller_pb2, controller_pb2_grpc
from tests.mesh.envoy import Habits, Participant
from tests.mesh.pki import write_certificates
from tests.mesh.sidecars import Sidecar
from tests.ports import free_port

POLL_S = 0.1
LOOK_S = 2.0
END_S = 90.0
PEOPLE = ("operator", "viewer")


class MeshRun:
    """One run. Use it from the main thread, with which its processes end."""

    def __init__(
        self, settings: RunSettings, folder: Path, *, package: str = "services", habits: Habits | None = Habits()
    ) -> None:
        self.folder, self.habits, self._package = folder, habits, package
        self.sidecars: dict[str, Sidecar] = {}
        self.num_restarts = 0
        self.status = controller_pb2.RunStatus()
        """The run as it was last heard."""
        self.exit_code: int | None = None
        """The controller's, once it ended."""
        self._configured = settings
        self._net = f"127.{random.randint(1, 250)}"
        self._participants = self._placed(settings)
        self.settings = self._resolved(settings)
        self._processes = Processes(settings.run.dir / "processes.json")

    def start(self) -> None:
        """Starts everything: store, sidecars, roles."""
        prepare_run_dir(self.settings, resume=False)
        write_config(self.settings)
        run = self.settings.run.name
        if self.habits is not None:
            self._start_sidecars(self.habits)
        store = EmbeddedStore(self.settings.run.dir / "store", run, self.settings.store.max_bytes)
        self._processes.store = store
        store.start()
        for worker in plan_workers(self._configured, self.settings, store.url_of, self._package):
            self._processes.start(self._behind_its_sidecar(worker))

    def end(self) -> None:
        """Ends every process."""
        self._processes.stop_all()
        for sidecar in self.sidecars.values():
            sidecar.kill()

    async def until(self, true: Callable[[], bool], timeout_s: float, what: str) -> None:
        """Tends the processes and listens to the run until `true`."""
        deadline = time.monotonic() + timeout_s
        async with self.channel("operator") as channel:
            stub = controller_pb2_grpc.ControllerServiceStub(channel)
            while not true():
                assert time.monotonic() < deadline, (
                    f"waited {timeout_s:.0f} s for {what} at step {self.status.step}, which waits for "
                    f"{self.status.waiting_for}; last failure: {self.status.last_failure}; see {self.folder}"
                )
                self._tend()
                with suppress(RoleCallError):
                    self.status = (await stub.GetRun(controller_pb2.GetRunRequest(), timeout=LOOK_S)).status
                await asyncio.sleep(POLL_S)

    async def steps(self, number: int, timeout_s: float) -> None:
        """Returns once so many more steps were applied."""
        wanted = self.status.step + number
        await self.until(lambda: self.status.step >= wanted, timeout_s, f"step {wanted}")

    async def heard(self, true: Callable[[controller_pb2.RunStatus], bool], timeout_s: float) -> None:
        """Returns as soon as the run says something of which this is true."""
        async with self.channel("operator") as channel:
            stub = controller_pb2_grpc.ControllerServiceStub(channel)
            async for message in stub.WatchRun(controller_pb2.WatchRunRequest(), timeout=timeout_s):
                if true(message.status):
                    return
        raise AssertionError("the run ended")

    async def stop(self) -> None:
        """Stops the run with a checkpoint and waits for its end."""
        deadline = time.monotonic() + END_S
        async with self.channel("operator") as channel:
            stub = controller_pb2_grpc.ControllerServiceStub(channel)
            await stub.StopRun(controller_pb2.StopRunRequest(checkpoint=True), timeout=10)
        while self.exit_code is None:
            assert time.monotonic() < deadline, f"the run did not end within {END_S:.0f} s of StopRun"
            self._tend()
            await asyncio.sleep(POLL_S)

    def channel(self, person: str) -> Any:
        """A channel to the controller through a person's sidecar."""
        port = self._participants["controller"].port
        rpc = acting_as(self.settings, Caller(person)).rpc
        return open_channel(f"{self._participants[person].here}:{port}", rpc)

    def _start_sidecars(self, habits: Habits) -> None:
        ids = {name: each.spiffe_id for name, each in self._participants.items()}
        write_certificates(self.folder / "certificates", ids)
        for name, own in self._participants.items():
            self.sidecars[name] = Sidecar(own, self._participants, self.settings.run.name, self.folder)
            self.sidecars[name].start(habits)
        for sidecar in self.sidecars.values():
            sidecar.ready()

    def _tend(self) -> None:
        """Starts again what ended, unless its exit code says that this cannot help."""
        for start, code in self._processes.poll():
            if start.worker.role == "controller" and code == 0:
                self.exit_code = 0
            else:
                assert code not in FINAL_CODES, f"{start.worker.name} ended with {code}"
                self.num_restarts += 1
                self._processes.start(start.worker)

    def _placed(self, settings: RunSettings) -> dict[str, Participant]:
        rollouts = [f"rollout-{i}" for i in range(settings.rollout.num_replicas)]
        workers = ["actor", *(["critic"] if settings.critic else []), *settings.references, *rollouts]
        calls = {
            "controller": (*workers, "reward"),
            **dict.fromkeys(workers, ("controller",)),
            "reward": ("controller",),
        }
        calls |= dict.fromkeys(PEOPLE, ("controller",))
        roles = {**dict.fromkeys(settings.references, "reference"), **dict.fromkeys(rollouts, "rollout")}
        return {
            name: Participant(
                name,
                f"spiffe://rolecall/rolecall/{settings.run.name}/{roles.get(name, name)}/{name}",
                self.folder / "certificates" / name,
                f"{self._net}.1.{index}" if self.habits else "127.0.0.1",
                f"{self._net}.2.{index}",
                0 if name in PEOPLE else free_port(),
                whom,
            )
            for index, (name, whom) in enumerate(calls.items(), 1)
        }

    def _resolved(self, settings: RunSettings) -> RunSettings:
        """As the controller sees the others; what a worker sees of it differs by worker."""
        here = self._participants["controller"].here

        def placed(section: Any, name: str) -> Any:
            port = self._participants[name].port
            return section.model_copy(update={"bind": f"127.0.0.1:{port}", "address": f"{here}:{port}"})

        return settings.model_copy(
            update={
                "controller": placed(settings.controller, "controller"),
                "actor": placed(settings.actor, "actor"),
                "critic": settings.critic and placed(settings.critic, "critic"),
                "references": {name: placed(section, name) for name, section in settings.references.items()},
                "reward": placed(settings.reward, "reward"),
                "rollout": settings.rollout.model_copy(update={"advertise_host": here}),
                "rpc": settings.rpc.model_copy(
                    update={"behind_mesh": self.habits is not None, "forwarded_identity": self.habits is not None}
                ),
            }
        )

    def _behind_its_sidecar(self, worker: Worker) -> Worker:
        own = self._participants[worker.name]
        words = [f"--controller.address={own.here}:{self._participants['controller'].port}"]
        if worker.role == "rollout":
            words.append(f"--rollout.bind=127.0.0.1:{own.port}")
        return dataclasses.replace(worker, command=(*worker.command, *words))
