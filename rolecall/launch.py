"""The local launcher: which processes a run needs here, their environment, and their life from start to the last one's end.

Owns the run directory's layout (config.yaml, logs/, store/), the ports and the environment of local roles, and the rule that nothing outlives the
launcher: every process is tied to it by the kernel, leads a session of its own that is killed whole at the end, and the store ends last.
It knows services by name only (`python -m services.<role>`); what they do is theirs. `rolecall/supervise.py` watches over what is started here.
"""

import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from rolecall import lifeline
from rolecall.errors import NotFoundError, RunExistsError, RunLockedError
from rolecall.settings import RunSettings, ServiceSection, TrainerSection, child_environment
from rolecall.store.embedded import EmbeddedStore

STOP_TIMEOUT_S = 6.0
"""From SIGTERM to SIGKILL; with the store's end it keeps a Ctrl-C under 10 s."""

STARTED = "=== started"
"""Begins a log's line where a process started; a resumed run goes on in the same file."""

_Service = TypeVar("_Service", bound=ServiceSection)


@dataclass(frozen=True)
class Worker:
    """One local process to start."""

    role: str
    name: str
    command: tuple[str, ...]
    environment: Mapping[str, str]
    log: Path


def prepare_run_dir(settings: RunSettings, *, resume: bool) -> int:
    """Makes the run directory and returns a descriptor that holds its lock for as long as this process lives.

    RunExistsError when it holds a run and `resume` is false, NotFoundError when it does not and it is true, RunLockedError when a launcher works in it."""
    directory = settings.run.dir
    exists = directory.is_dir() and any(directory.iterdir())
    if exists and not resume:
        raise RunExistsError(f"run.dir {directory} exists; resume that run with --resume, or name another with --run.dir")
    if resume and not (directory / "config.yaml").is_file():
        raise NotFoundError(f"run.dir {directory} holds no run to resume; start it without --resume")
    (directory / "logs").mkdir(parents=True, exist_ok=True)
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise RunLockedError(f"another `rolecall train` works in {directory}; stop it first") from error
    return lock


def resolve(settings: RunSettings, config_path: Path) -> RunSettings:
    """`settings` with an address for every role, free ports of loopback for local ones, and the user's folder for scorers."""
    ports = _free_ports(4 + len(settings.references))
    changes: dict[str, Any] = {
        "controller": _placed(settings.controller, ports),
        "actor": _placed(settings.actor, ports),
        "references": {name: _placed(section, ports) for name, section in settings.references.items()},
        "reward": _placed(settings.reward, ports).model_copy(update={"search_path": settings.reward.search_path or config_path.resolve().parent}),
    }
    if settings.critic is not None:
        changes["critic"] = _placed(settings.critic, ports)
    return settings.model_copy(update=changes)


def write_config(settings: RunSettings) -> Path:
    """Writes the resolved configuration, without the store's URL, to <run dir>/config.yaml, readable by the owner alone."""
    path = settings.run.dir / "config.yaml"
    text = yaml.safe_dump(settings.model_dump(mode="json", exclude={"store": {"url"}}), sort_keys=False)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)
    return path


def plan_workers(configured: RunSettings, resolved: RunSettings, store_url: str) -> list[Worker]:
    """The processes of the roles that `configured` gives no address, controller first."""
    roles: list[tuple[str, str, ServiceSection]] = [("controller", "controller", configured.controller), ("actor", "actor", configured.actor)]
    roles += [("critic", "critic", configured.critic)] if configured.critic else []
    roles += [("reference", name, section) for name, section in configured.references.items()]
    roles += [("reward", "reward", configured.reward)]
    workers = [_worker(role, name, resolved, store_url, section) for role, name, section in roles if section.address is None]
    replicas = configured.rollout.num_replicas
    return workers + [_worker("rollout", f"rollout-{i}", resolved, store_url, None) for i in range(replicas)]


def _worker(role: str, name: str, resolved: RunSettings, store_url: str, section: ServiceSection | None) -> Worker:
    arguments = [f"services.{role}", "--config", str(resolved.run.dir / "config.yaml"), "--name", name]
    command = [sys.executable, "-P", "-m", *arguments]
    num_ranks = section.num_ranks if isinstance(section, TrainerSection) else 1
    if num_ranks > 1:
        torchrun = ["torch.distributed.run", "--nnodes=1", f"--nproc-per-node={num_ranks}", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
        command = [sys.executable, "-P", "-m", *torchrun, "--local-addr=127.0.0.1", "-m", *arguments]
    # "1", not our pid: the role's own children (ranks under torchrun, engine processes) read it too and are tied to their own parent.
    environment = {**role_environment(section), "ROLECALL_STORE_URL": store_url, "ROLECALL_DIE_WITH_PARENT": "1"}
    return Worker(role, name, tuple(command), environment, resolved.run.dir / "logs" / f"{name}.log")


def role_environment(section: ServiceSection | None) -> dict[str, str]:
    """What a role must find in its environment before it imports torch: its GPUs, its threads, and no network of its own accord.

    None: a rollout, which derives its own (`services/rollout/config.py`), for vLLM needs more said and replicas are started elsewhere too."""
    common = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    if section is None:
        return common
    num_cores = len(os.sched_getaffinity(0))
    threads = (section.num_threads or max(1, num_cores // section.num_ranks)) if isinstance(section, TrainerSection) else 1
    # Idle threads sleep: roles take turns on the same cores.
    return {**common, "CUDA_VISIBLE_DEVICES": ",".join(map(str, section.devices)), "OMP_NUM_THREADS": str(threads), "OMP_WAIT_POLICY": "PASSIVE"}


def _placed(section: _Service, ports: Iterator[int]) -> _Service:
    if section.address is not None:
        return section
    host, _, port = (section.bind or "127.0.0.1:0").rpartition(":")
    bind = f"{host}:{port if port != '0' else next(ports)}"
    reachable = bind if host not in ("0.0.0.0", "[::]") else f"127.0.0.1:{bind.rpartition(':')[2]}"
    return section.model_copy(update={"bind": bind, "address": reachable})


def _free_ports(count: int) -> Iterator[int]:
    """`count` different ports of loopback that were free a moment ago."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for opened in sockets:
            opened.bind(("127.0.0.1", 0))
        return iter([int(opened.getsockname()[1]) for opened in sockets])
    finally:
        for opened in sockets:
            opened.close()


@dataclass
class Fleet:
    """The local processes. Start and stop it from the main thread: the kernel ties children to the thread that started them."""

    store: EmbeddedStore | None = None
    processes: dict[str, tuple[Worker, subprocess.Popen[bytes]]] = field(default_factory=dict)
    exited: list[tuple[Worker, int]] = field(default_factory=list)
    """Workers that ended, in the order it was seen, with their exit codes (negative: the signal)."""

    def start(self, worker: Worker) -> None:
        """Starts `worker`, its output going to its log."""
        command = [sys.executable, "-I", "-S", str(Path(lifeline.__file__)), str(os.getpid()), *worker.command]
        with worker.log.open("ab") as log:
            log.write(f"{STARTED} {worker.name} at {time.strftime('%Y-%m-%d %H:%M:%S')}\n".encode())
            log.flush()
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=child_environment(worker.environment), start_new_session=True
            )
        self.processes[worker.name] = (worker, process)

    def poll(self) -> list[tuple[Worker, int]]:
        """`exited`, brought up to date; in one look a controller comes last, for it fails of what others did."""
        seen = {worker.name for worker, _ in self.exited}
        ended = [(worker, code) for worker, process in self.processes.values() if worker.name not in seen and (code := process.poll()) is not None]
        self.exited += sorted(ended, key=lambda item: item[0].role == "controller")
        return self.exited

    def stop(self) -> None:
        """Ends every process: SIGTERM, after STOP_TIMEOUT_S SIGKILL, with all they started; then the store. Idempotent."""
        processes = [process for _, process in self.processes.values()]
        for process in processes:
            process.terminate()
        deadline = time.monotonic() + STOP_TIMEOUT_S
        while time.monotonic() < deadline and any(process.poll() is None for process in processes):
            time.sleep(0.02)
        self.kill()

    def kill(self) -> None:
        """Ends every process at once, with all they started; then the store. Idempotent."""
        for _, process in self.processes.values():
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        for _, process in self.processes.values():
            process.wait()
        if self.store is not None:
            self.store.stop()
