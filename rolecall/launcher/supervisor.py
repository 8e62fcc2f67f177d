"""Watches over a run that `rolecall/launcher/plan.py` planned: shows it, starts again what ends, and ends everything
with it.

Owns `rolecall train` from the resolved configuration to the exit code, and the rules of restarting: by exit code
(`rolecall/rpc/role_process.py`), by the controller's word that a worker is lost, by silence of the controller, of the
store and of model servers, within a budget. Decides nothing about the run: the controller does. A role that has an
address runs elsewhere and is not ours to start again.
"""

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress

from rolecall.checkpoint.manifest import RunCheckpoints
from rolecall.checkpoint.storage import open_storage
from rolecall.errors import DeadlineError, ExhaustedError, RoleCallError, UnavailableError
from rolecall.identity import settle
from rolecall.launcher.finished import is_finished
from rolecall.launcher.joining import Joining
from rolecall.launcher.last_words import describe_failure, say_end
from rolecall.launcher.placed import note_placed
from rolecall.launcher.plan import plan_workers, resolve, write_config
from rolecall.launcher.probes import Probes
from rolecall.launcher.processes import FINAL_CODES, MODEL_SERVERS, Processes, Worker
from rolecall.launcher.progress import LONG_WAIT_S, Steady, View
from rolecall.launcher.restarts import GivenUp, RestartBudget
from rolecall.launcher.run_dir import prepare_run_dir
from rolecall.launcher.run_record import INTERRUPTED, keep_record
from rolecall.launcher.tell_trackers import tell_trackers
from rolecall.launcher.used_store import note_used_store, require_used_store
from rolecall.rpc.callers import Caller
from rolecall.rpc.channel import open_channel
from rolecall.rpc.identity import acting_as
from rolecall.rpc.role_process import allow_many_files
from rolecall.settings import RunSettings
from rolecall.settings.deadlines import reading_s
from rolecall.store.embedded import EmbeddedStore
from rolecall.store.probe import require_free_name
from rolecall.v1 import controller_pb2, controller_pb2_grpc

POLL_S = 0.1
"""Seconds between looks at the processes."""
RECONNECT_S = 0.5
"""Seconds before the controller is asked again while it does not answer."""
WATCH_TIMEOUT_S = 3600.0
"""Deadline of one WatchRun stream; it is opened again."""
END_GRACE_S = 30.0
"""Time for the controller to end by itself after the run has ended: what trackers have queued is sent then."""
RUN_CALL_TIMEOUT_S = 5.0
"""Deadline of the request to stop, and of a look at the run where no stream is left to follow it."""
CHECKPOINT_GRACE_S = 60.0
"""Time for the run to end with a checkpoint after a budget was spent."""

_FINAL_STATES = (controller_pb2.RUN_STATE_DONE, controller_pb2.RUN_STATE_FAILED)
_STORE = "store"
_STATEFUL = ("controller", "actor", "critic", _STORE)
"""Roles without which there is no checkpoint."""


def train(settings: RunSettings, *, resume: bool, package: str = "services") -> int:
    """Runs `settings` to its end and returns the exit code: 0 done, 1 failed, 130 interrupted. Call it from the main
    thread.

    package: where the roles' modules are, `<package>.<role>`.
    """
    allow_many_files()
    if settings.store.url is not None and not resume:
        require_free_name(settings)
    if resume:
        require_used_store(settings)
    lock = prepare_run_dir(settings, resume=resume)
    resolved = resolve(settings)
    processes = Processes(resolved.run.dir / "processes.json")
    view = Steady(sys.stdout)
    try:
        settle(settings)
        if resume and is_finished(settings):
            run = settings.run
            view.note(
                f"run {run.name} in {run.dir} is finished, its step {run.total_steps} trained and kept: nothing is "
                "started. More steps: raise run.num_steps or run.num_epochs"
            )
            return 0
        note_placed(settings, resolved)
        note_used_store(settings)
        write_config(resolved)
        operated = acting_as(resolved, Caller.OPERATOR)
        return asyncio.run(Supervisor(settings, operated, processes, view, package).run())
    finally:
        view.close()
        processes.stop_all()
        os.close(lock)


class Supervisor:
    """One `rolecall train`. Everything but waiting happens on the event loop of the main thread, where processes must
    be started.
    """

    def __init__(
        self, settings: RunSettings, resolved: RunSettings, processes: Processes, view: View, package: str
    ) -> None:
        self._settings = settings
        self._resolved = resolved
        self._processes = processes
        self._view = view
        self._package = package
        self._budget = RestartBudget(resolved.launcher)
        self._interrupted = asyncio.Event()
        self._status = controller_pb2.RunStatus()
        """Last heard of the run."""
        self._failure = ""
        self._controller: Worker | None = None
        """The local one."""
        self._ended_at: float | None = None
        """When a final state was heard."""
        self._due: dict[str, tuple[float, Callable[[], None]]] = {}
        """What is to be started again, and when (monotonic seconds); at most one entry a name."""
        self._verdicts: dict[str, str] = {}
        """Why a process was killed that has not been seen to end yet."""
        shifts = resolved.run.dir if resolved.takes_shifts else None
        self._joining = Joining(resolved.controller, shifts, resolved.references_in_shifts, reading_s(resolved))
        self._heard_since = 0.0
        """Monotonic seconds since when the controller, this start of it, is heard."""
        self._told_silent_since = 0.0
        self._probes = Probes(resolved, self._condemn)

    async def run(self) -> int:
        """The whole run; returns the exit code. Every process has ended when it returns."""
        loop = asyncio.get_running_loop()
        # under nohup a terminal that goes stops nothing
        hung_up = [] if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else [signal.SIGHUP]
        for number in (signal.SIGINT, signal.SIGTERM, *hung_up):
            # The second signal does not wait for anyone.
            loop.add_signal_handler(
                number, lambda: self._processes.kill_all() if self._interrupted.is_set() else self._interrupted.set()
            )
        tending = asyncio.create_task(self._start_and_tend())
        watching = asyncio.create_task(self._watch())
        interruption = asyncio.create_task(self._interrupted.wait())
        keep_record(self._resolved.run, self._status)
        try:
            await asyncio.wait(
                [tending, watching, interruption], return_when=asyncio.FIRST_COMPLETED
            )  # bounded: by nothing, on purpose: the run's whole life
            if self._interrupted.is_set():
                self._view.note("interrupted: stopping every process")
                code = INTERRUPTED
            else:
                code = await (
                    tending if not watching.done() else _unreachable(watching)
                )  # bounded: one of the two is done
            keep_record(self._resolved.run, self._status, code, self._failure or self._status.error)
            return code
        except RoleCallError as error:
            keep_record(self._resolved.run, self._status, 1, error.message)
            raise
        finally:
            tasks = [tending, watching, interruption, *self._probes.tasks]
            for task in tasks:
                task.cancel()
            await asyncio.to_thread(self._processes.stop_all)
            await asyncio.gather(
                *tasks, return_exceptions=True
            )  # bounded: they are cancelled, and what they asked is stopped

    # --- the processes ----------------------------------------------------------------------------

    async def _start_and_tend(self) -> int:
        given = self._settings.store.url
        # Somebody else's server: whoever made a user for each role there gives each its URL in its environment.
        url_of = (lambda role: given.get_secret_value()) if given else (await self._start_store()).url_of
        for worker in plan_workers(self._settings, self._resolved, url_of, self._package):
            self._start(worker)
            self._controller = worker if worker.role == "controller" else self._controller
        run, number = self._resolved.run, len(self._processes.running)
        self._view.note(
            f"run {run.name} in {run.dir}: controller at {self._resolved.controller.address}, {number} processes, "
            "logs in logs/"
        )
        try:
            while (code := self._look()) is None:
                await asyncio.sleep(POLL_S)
            return code
        except GivenUp as end:
            return await self._give_up(end)

    def _look(self) -> int | None:
        """One look at everything that may have ended or be due; the exit code when the run is over."""
        for start, code in self._processes.poll():
            self._probes.end(start.worker.name)
            if start.worker.role == "controller" and code == 0:
                return 0
            if self._status.state == controller_pb2.RUN_STATE_FAILED:
                self._ended_at = None  # its exit code says whether it failed for good
            if self._status.state != controller_pb2.RUN_STATE_DONE:
                self._worker_ended(start.worker, code)
        store = self._processes.store
        if store is not None and not store.alive and _STORE not in self._due:
            store.kill()  # children that rewrite its file outlive it
            self._probes.end(_STORE)
            words = store.last_words()
            how = self._verdicts.pop(_STORE, "the store ended" + (f" ({words})" if words else ""))
            self._again(_STORE, _STORE, how, f"log: {store.log_file}", self._restart_store)
        now = time.monotonic()
        for name in [name for name, due in self._due.items() if due[0] <= now]:
            self._due.pop(name)[1]()
        return self._over()

    def _worker_ended(self, worker: Worker, code: int) -> None:
        if code in FINAL_CODES:
            raise GivenUp(worker.role, describe_failure(worker, code))
        how = self._verdicts.pop(worker.name, None) or say_end(worker, code)
        self._again(worker.role, worker.name, how, describe_failure(worker, code), lambda: self._restart(worker))

    def _again(self, role: str, name: str, how: str, details: str, start: Callable[[], None]) -> None:
        """Plans to start `name` again and says so. GivenUp, with the details, when its budget is spent."""
        pause_s = self._budget.take(name)
        limit = self._resolved.launcher.max_restarts
        if pause_s is None:
            raise GivenUp(
                role,
                f"{how}, after {limit} restarts without a step in between (launcher.max_restarts): giving "
                f"up\n{details}",
            )
        self._view.note(
            f"{how}; starting it again in {pause_s:g} s ({self._budget.count(name)} of {limit} without a step)"
        )
        self._due[name] = (time.monotonic() + pause_s, start)

    def _restart(self, worker: Worker) -> None:
        try:
            self._start(worker)
        except OSError as error:  # no room for its log, or for another process: that may pass
            self._again(
                worker.role,
                worker.name,
                f"{worker.name} could not be started ({error})",
                f"log: {worker.log}",
                lambda: self._restart(worker),
            )

    def _start(self, worker: Worker) -> None:
        start = self._processes.start(worker)
        if worker.role == "controller":
            self._probes.ask_controller(start)
        elif worker.role in MODEL_SERVERS:
            self._probes.ask_model_server(start)

    async def _start_store(self) -> EmbeddedStore:
        resolved = self._resolved
        store = EmbeddedStore(
            resolved.run.dir / "store", resolved.run.name, resolved.store.max_bytes, resolved.store.binary
        )
        self._processes.store = store
        store.spawn()
        await asyncio.to_thread(store.wait_until_ready)
        self._probes.ask_store(_STORE, store)
        return store

    def _restart_store(self) -> None:
        store = self._processes.store
        assert store is not None
        try:
            store.spawn(lock_timeout_s=0.0)  # its last holder was killed and waited for
        except (RoleCallError, OSError) as error:
            self._verdicts[_STORE] = f"the store could not be started ({error})"  # the next look finds it not alive
            return
        self._processes.write_record()
        self._probes.ask_store(_STORE, store)

    def _condemn(self, name: str, verdict: str) -> None:
        """Kills the process of `name`, with all it started; `_look` sees its end."""
        self._verdicts[name] = verdict
        if name == _STORE and self._processes.store is not None:
            self._processes.store.kill()
        else:
            self._processes.kill(name)

    # --- the run ----------------------------------------------------------------------------------

    async def _watch(self) -> None:
        """Follows the run, across restarts of its controller; never returns."""
        assert self._resolved.controller.address is not None
        async with open_channel(self._resolved.controller.address, self._resolved.rpc) as channel:
            stub = controller_pb2_grpc.ControllerServiceStub(channel)
            while True:
                self._heard_since = time.monotonic()
                with suppress(UnavailableError, DeadlineError, ExhaustedError):
                    try:
                        async for message in stub.WatchRun(controller_pb2.WatchRunRequest(), timeout=WATCH_TIMEOUT_S):
                            self._heard(message.status)
                    except ExhaustedError:  # others watch, too, and no stream is left for us
                        self._heard(
                            (await stub.GetRun(controller_pb2.GetRunRequest(), timeout=RUN_CALL_TIMEOUT_S)).status
                        )
                self._tell_of_silence()
                await asyncio.sleep(RECONNECT_S)

    def _tell_of_silence(self) -> None:
        """One line when a controller that is not ours to start has not been heard for long."""
        silent_s = time.monotonic() - self._probes.heard_at
        if (
            self._settings.controller.address is not None
            and silent_s > LONG_WAIT_S
            and self._told_silent_since != self._probes.heard_at
        ):
            self._told_silent_since = self._probes.heard_at
            self._view.note(
                f"no answer from the controller at {self._settings.controller.address} for {silent_s:.0f} s; the "
                "roles here wait for it"
            )

    def _heard(self, status: controller_pb2.RunStatus) -> None:
        before, self._status = self._status, status
        self._probes.heard()
        self._budget.applied(status.step)
        self._view.show(status)
        if (status.state, status.step) != (before.state, before.step):
            keep_record(self._resolved.run, status)
        for name, verdict in self._joining.judge(
            status.workers, self._processes.running, self._heard_since, self._verdicts
        ):
            self._condemn(name, verdict)
        if status.state not in _FINAL_STATES:
            self._ended_at = None
        elif self._ended_at is None:
            self._ended_at = time.monotonic()

    def _over(self) -> int | None:
        """The exit code when the run has ended and its controller, which may also be elsewhere, does not say so by its
        own.
        """
        if self._ended_at is None or "controller" in self._due:
            return None
        done = self._status.state == controller_pb2.RUN_STATE_DONE
        local = "controller" in self._processes.running
        if time.monotonic() - self._ended_at < (0.0 if done and not local else END_GRACE_S):
            return None
        if self._status.error:
            self._view.note(f"controller: {self._status.error}")
        return 0 if done else 1

    async def _give_up(self, end: GivenUp) -> int:
        """Says why the run ends, and has a checkpoint saved first if there is something to save and somebody to save
        it.
        """
        self._view.note(end.failure)
        self._failure = end.failure.partition("\n")[0]
        if end.role != "controller" and self._status.error:
            self._view.note(f"controller: {self._status.error}")
        can_save = self._status.step > 0 and end.role not in _STATEFUL
        if can_save:
            await self._stop_with_checkpoint()
        elif self._status.run and "controller" in self._processes.running:  # it shows how the run ended
            await self._stop(checkpoint=False)
        if self._controller is not None and "controller" not in self._processes.running:
            await asyncio.to_thread(tell_trackers, self._resolved, self._controller)
        if self._status.step > 0:
            step, saved = (
                self._status.step,
                max(RunCheckpoints(open_storage(self._resolved.run.checkpoints), 1).steps(), default=None),
            )
            missing = (
                f"no checkpoint of step {step} could be saved, the last is of step {saved or 0}; --resume "
                "goes on from the store"
            )
            self._view.note(
                f"there is a checkpoint of step {saved}; --resume goes on from it" if saved == step else missing
            )
        return 1

    async def _stop_with_checkpoint(self) -> None:
        """Asks the controller to end with a checkpoint and waits for that, within bounds."""
        self._view.note(f"stopping the run with a checkpoint, for at most {CHECKPOINT_GRACE_S:g} s")
        if not await self._stop(checkpoint=True):
            return
        deadline = time.monotonic() + CHECKPOINT_GRACE_S
        while (
            time.monotonic() < deadline
            and self._ended_at is None
            and not any(start.worker.role == "controller" for start, _ in self._processes.poll())
        ):
            await asyncio.sleep(POLL_S)

    async def _stop(self, *, checkpoint: bool) -> bool:
        """Tells the controller that the run ends, and of what; whether it heard."""
        assert self._resolved.controller.address is not None
        request = controller_pb2.StopRunRequest(checkpoint=checkpoint, failure=self._failure)
        try:
            async with open_channel(self._resolved.controller.address, self._resolved.rpc) as channel:
                await controller_pb2_grpc.ControllerServiceStub(channel).StopRun(request, timeout=RUN_CALL_TIMEOUT_S)
        except RoleCallError as error:
            self._view.note(f"the controller could not be asked: {error.message}")
            return False
        return True


async def _unreachable(watching: "asyncio.Task[None]") -> int:
    """Following the run failed of something that no waiting mends, such as credentials."""
    await watching  # bounded: it is done
    return 1
