"""The commands for a run: status, watch, pause, resume, stop, profile. A thin client of ControllerService, and
of what a run that is over left.
"""

import asyncio
import io
import math
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from rolecall.errors import (
    ConfigError,
    DeadlineError,
    ExhaustedError,
    NotFoundError,
    RoleCallError,
    StoreUnavailableError,
    UnauthenticatedError,
    UnavailableError,
    WorkerLostError,
)
from rolecall.launcher.progress import STATES, open_view, render
from rolecall.launcher.run_dir import is_under_way
from rolecall.launcher.run_record import RunRecord, as_json_line, read_record
from rolecall.rpc.callers import Caller
from rolecall.rpc.channel import open_channel
from rolecall.rpc.identity import acting_as
from rolecall.settings import RpcSection, TlsSection, load_settings, require_no_copy, settings_of_run
from rolecall.v1 import controller_pb2, controller_pb2_grpc, training_pb2

WATCH_TIMEOUT_S = 24 * 3600.0
"""Deadline of one stream of `rolecall watch`, which then asks for another."""
AWAY_S = 600.0
"""Longest time in which `rolecall watch` waits for a controller that it has seen: a Job's next pod may need a node."""
WATCH_PAUSE_S = 1.0
"""Seconds between two looks at whether it is back."""
PROFILE_TIMEOUT_S = 24 * 3600.0
"""Deadline of one `rolecall profile`, which waits for the next steps of the run."""
ENGINE_STEPS = 20
"""Steps of a rollout's engine in a profile, unless it is said: each samples a token of every response."""
_TRAINERS = ("actor", "critic")
_NOT_ITS_CONTROLLER = (UnavailableError, DeadlineError, UnauthenticatedError)
"""What is heard at the address of a run that is over: nobody, or the controller of another run."""
_READING = ("status", "watch")
"""Commands that a viewer may give; the others are an operator's."""


@dataclass(frozen=True)
class Run:
    """A run as a command finds it."""

    address: str
    """Address of its controller."""
    rpc: RpcSection
    directory: Path | None = None
    """run.dir, when it is known and here."""


def steer(command: str, run: str, *, tls: Path | None = None, checkpoint: bool = False, as_json: bool = False) -> int:
    """Carries out `command` on the run named by a run directory, a configuration file or a controller's address;
    returns the exit code.

    Of a run that is over, status and watch show what its directory says; there is nothing left to steer. A watch ends
    with 1 when the run failed.
    """
    found = find(run, Caller.VIEWER if command in _READING else Caller.OPERATOR, tls)
    try:
        return asyncio.run(_steer(command, found, checkpoint, as_json))
    except _NOT_ITS_CONTROLLER as error:
        record = _record_of_what_is_over(found, error)
        if command not in _READING:
            raise NotFoundError(
                f"run {record.status.run} is over ({record.how}); there is nothing to {command}{_refusal(found, error)}"
            ) from error
        status = _without_the_moment(record.status)
        sys.stdout.write(as_json_line(status, record) if as_json else _last_of(status, record))
        if refusal := _refusal(found, error):
            sys.stderr.write(f"rolecall: that is its last record{refusal}\n")
        return int(command == "watch" and record.exit_code == 1)


def profile(run: Run, worker: str, num_steps: int | None) -> int:
    """Has a trainer or a rollout of the run record its next steps, and returns the exit code: 1 when a trace is not
    there.

    Prints where the traces are and what took the longest. Without `num_steps` one step of a trainer, or ENGINE_STEPS of
    a rollout. WorkerLostError when `worker` or the run ends before they were recorded.
    """
    if num_steps is None:
        num_steps = 1 if worker in _TRAINERS else ENGINE_STEPS
    try:
        return asyncio.run(_profile(run, worker, num_steps))
    except WorkerLostError:
        raise
    except _NOT_ITS_CONTROLLER as error:
        record = _record_of_what_is_over(run, error)
        raise NotFoundError(f"run {record.status.run} is over ({record.how}); there is nothing to profile") from error


def find(run: str, caller: Caller = Caller.VIEWER, tls: Path | None = None) -> Run:
    """The controller's address and how to talk to it, as the kind of person that the command needs: with the
    certificates in the folder `tls` where it is given. ConfigError when `run` names neither a run nor an address.
    """
    path = Path(run)
    file = path / "config.yaml" if path.is_dir() else path
    if file.is_file():
        require_no_copy(path, load_settings(file).run)
        settings = settings_of_run(path)
        if settings.controller.address is None and (settings.run.dir / "config.yaml").is_file():
            # the resolved one of the run that was started from it
            settings = load_settings(settings.run.dir / "config.yaml")
        if settings.controller.address is None:
            raise ConfigError(
                f"{file} does not say where its controller is (controller.address), and no run was started from it; "
                "name the run's directory"
            )
        rpc = acting_as(settings, caller, make=False).rpc
        return Run(settings.controller.address, rpc, settings.run.dir)
    if ":" in run and not path.exists():
        return Run(run, RpcSection() if tls is None else RpcSection(tls=_certificates(tls)))
    raise ConfigError(f"{run} is neither a run directory with a config.yaml, nor a configuration file, nor host:port")


def _certificates(folder: Path) -> TlsSection:
    """The files of a folder as `rolecall certificates` writes it, for one role or person."""
    return TlsSection(certificate_file=folder / "tls.crt", key_file=folder / "tls.key", ca_file=folder / "ca.crt")


def _record_of_what_is_over(run: Run, error: RoleCallError) -> RunRecord:
    """Reads what is left of a run whose controller does not answer, or where another run's does, which refuses us.
    Where it is not over, raises `error`, or one that says more.
    """
    record = None if run.directory is None else read_record(run.directory)
    if run.directory is None or record is None or isinstance(error, StoreUnavailableError):  # that a controller says
        raise error
    if is_under_way(run.directory):
        if isinstance(error, UnauthenticatedError):  # by its own controller
            raise error
        raise UnavailableError(
            f"the controller does not answer, and is starting or being started again; ask in a moment ({error.message})"
        ) from error
    return record


def _refusal(run: Run, error: RoleCallError) -> str:
    """The end of a sentence on a run that is over by its record, where a controller answers and refuses this caller:
    another run's, or its own that goes on without a launcher here.
    """
    if not isinstance(error, UnauthenticatedError):
        return ""
    why = f"The controller at {run.address} refuses this caller ({error.message})"
    return f". {why}; if it is this run's, use its credentials"


def _without_the_moment(status: controller_pb2.RunStatus) -> controller_pb2.RunStatus:
    """Returns the part of a status that still stands once nobody is at work; `RunRecord.how` tells of an error."""
    lasting = controller_pb2.RunStatus()
    lasting.CopyFrom(status)
    for field in ("workers", "waiting_for", "error", "trouble"):
        lasting.ClearField(field)
    return lasting


def _last_of(status: controller_pb2.RunStatus, record: RunRecord) -> str:
    told = io.StringIO()
    Console(file=told, width=120).print(render(status))
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.at_s))
    since = f"over since {when}" if record.exit_code is not None else f"over; its last news is of {when}"
    return f"{told.getvalue()}{since}, at step {status.step}/{status.total_steps}: {record.how}\n"


async def _steer(command: str, run: Run, checkpoint: bool, as_json: bool) -> int:
    async with open_channel(run.address, run.rpc) as channel:
        stub = controller_pb2_grpc.ControllerServiceStub(channel)
        if command == "watch":
            return await _watch(stub, run)
        if command == "pause":
            await stub.PauseRun(controller_pb2.PauseRunRequest())
        elif command == "resume":
            await stub.ResumeRun(controller_pb2.ResumeRunRequest())
        elif command == "stop":
            await stub.StopRun(controller_pb2.StopRunRequest(checkpoint=checkpoint))
        status = (await stub.GetRun(controller_pb2.GetRunRequest())).status
        if command != "status":
            sys.stdout.write(
                f"{status.run}: {STATES.get(status.state, '?')} at step {status.step}/{status.total_steps}\n"
            )
        elif as_json:
            sys.stdout.write(as_json_line(status))
        else:
            Console(file=sys.stdout).print(render(status))
        return 0


async def _watch(stub: controller_pb2_grpc.ControllerServiceStub, run: Run) -> int:
    view = open_view(sys.stdout)
    was_seen, lost_at, failure = False, math.inf, ""
    try:
        while True:
            try:
                async for message in stub.WatchRun(controller_pb2.WatchRunRequest(), timeout=WATCH_TIMEOUT_S):
                    was_seen = True
                    if message.status.state != controller_pb2.RUN_STATE_FAILED:
                        lost_at, failure = math.inf, ""
                        view.show(message.status)
                    elif not failure:
                        failure = message.status.error
                        view.show(message.status)
                        view.note(f"controller: {failure}")
                if not failure:
                    return 0
            except (UnavailableError, DeadlineError, ExhaustedError) as error:
                if not was_seen or time.monotonic() - lost_at > AWAY_S or not (failure or _may_come_back(run)):
                    raise
                if lost_at == math.inf:
                    lost_at = time.monotonic()
                    if isinstance(error, UnavailableError) and not failure:
                        view.note(f"controller: it does not answer; it is waited for, {AWAY_S:.0f} s at the most")
            if failure and not _is_started_again(run):
                return 1
            await asyncio.sleep(WATCH_PAUSE_S)
    finally:
        view.close()


def _may_come_back(run: Run) -> bool:
    """Whether the run's controller, which does not answer, may be started again; not known where its directory is
    elsewhere.
    """
    return run.directory is None or read_record(run.directory) is None or is_under_way(run.directory)


def _is_started_again(run: Run) -> bool:
    """Whether a launcher is at work, which starts a controller that failed again, or is about to end with it."""
    return run.directory is not None and run.directory.is_dir() and is_under_way(run.directory)


async def _profile(run: Run, worker: str, num_steps: int) -> int:
    request = controller_pb2.ProfileWorkerRequest(worker=worker, num_steps=num_steps)
    console, num_recorded, whole = Console(file=sys.stdout, width=120, soft_wrap=True, highlight=False), 0, True
    num_answers = num_steps if worker in _TRAINERS else 1
    async with open_channel(run.address, run.rpc) as channel:
        stub = controller_pb2_grpc.ControllerServiceStub(channel)
        status = (await stub.GetRun(controller_pb2.GetRunRequest())).status
        paused = (
            "; the run is paused, and no step begins until it goes on"
            if status.state == controller_pb2.RUN_STATE_PAUSED
            else ""
        )
        steps = "its next step" if num_steps == 1 else f"its next {num_steps} steps"
        console.print(f"{status.run}: {worker} is asked to record {steps}{paused}; Ctrl-C takes it back")
        try:
            async for message in stub.ProfileWorker(request, timeout=PROFILE_TIMEOUT_S):
                if not message.HasField("profile"):
                    continue
                num_recorded += 1
                _show_profile(console, worker, message.profile)
                whole &= not any(trace.failure for trace in message.profile.traces)
        except UnavailableError as error:
            raise WorkerLostError(
                f"{worker} was lost or the run ended after {num_recorded} of {num_answers} traces; of a step under way "
                f"there is none ({error.message})"
            ) from error
    console.print("open a trace in https://ui.perfetto.dev or chrome://tracing")
    return 0 if whole else 1


def _show_profile(console: Console, worker: str, profile: training_pb2.StepProfile) -> None:
    plural = "" if profile.num_passes == 1 else "s"
    if worker in _TRAINERS:
        parts = f"{profile.num_passes} microbatch{plural and 'es'}"
        console.print(f"step {profile.step}: {parts} of {worker} and the optimizer's step after")
    else:
        console.print(f"{worker}, version {profile.step}: {profile.num_passes} step{plural} of its engine")
    for rank, trace in enumerate(profile.traces):
        told = f"no trace: {trace.failure}" if trace.failure else f"{trace.path}, {trace.num_bytes / 1e6:.1f} MB"
        console.print(f"  rank {rank}: {told}", markup=False)
    first = next((rank for rank, trace in enumerate(profile.traces) if not trace.failure), None)
    if first is None:
        return
    trace = profile.traces[first]
    table = Table(title=f"rank {first}: operators by the time they take themselves", title_justify="left", box=None)
    for name in ("ms", "share", "calls"):
        table.add_column(name, justify="right")
    table.add_column("operator", no_wrap=True)
    for operator in trace.operators:
        share = operator.self_s / trace.total_s if trace.total_s else 0.0
        table.add_row(f"{operator.self_s * 1e3:.2f}", f"{share:.0%}", str(operator.num_calls), operator.name)
    console.print(table)
