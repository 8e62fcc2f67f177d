"""The plan of `rolecall train`: the run directory, an address for every role, and the processes to start.

Owns the run directory's layout (config.yaml, logs/, store/), the ports and the environment of local roles. It knows
services by name only (`python -m services.<role>`); what they do is theirs. `rolecall/launcher/processes.py` starts
what is planned here, `rolecall/launcher/supervisor.py` watches over it.
"""

import fcntl
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any, TypeVar

import yaml

from rolecall.checkpoint.storage import disk_folder
from rolecall.config_file import read_tree
from rolecall.disk import require_writable, writing
from rolecall.errors import ConfigError, NotFoundError, RunExistsError, RunLockedError
from rolecall.identity import newest_checkpoint
from rolecall.launcher.processes import Worker
from rolecall.rpc.tokens import FOLDER
from rolecall.settings import (
    AddressSection,
    JobSection,
    RewardModelSettings,
    RunSettings,
    ServiceSection,
    SftSettings,
    TrainerSection,
)
from rolecall.shifts import FOLDER as SHIFTS
from rolecall.store.embedded import discard_store
from rolecall.store.users import ROLES as STORE_ROLES

_PORTS = range(20_000, 32_768)
"""Where free ports are looked for: below those that the kernel lends to outgoing connections, so that none takes the
port of a role that is being restarted (and a client that calls it meanwhile does not, as TCP allows, connect to
itself).
"""
_APART = 8
"""Ports from one launcher's place to the next one's: as many as a run takes."""
_LOOKS = 100
"""Ports that are tried for one role before the kernel is asked for any."""

_MAX_PORT = 65_535

_OF_AN_ATTEMPT = (
    "config.yaml",
    "identity.json",
    "placed.json",
    "store.json",
    "last_status.json",
    "tracker_run_id",
    "tracker_end",
    "metrics.jsonl",
    "samples.jsonl",
    "history.jsonl",
    "dead.jsonl",
    "tensorboard",
    "memory",
    "checkpoints",
)
"""Files of one attempt, beside the store and the logs, which go on. The locks of shifts stay, too: roles on other
machines may have them open.
"""

_Service = TypeVar("_Service", bound=AddressSection)


def require_folders(run: JobSection) -> None:
    """ConfigError when run.dir, or a folder of checkpoints elsewhere, could not be written. RunExistsError when run.dir
    is somebody's who runs nothing there.
    """
    require_writable(run.dir, "run.dir")
    _require_ours(run.dir)
    folder = disk_folder(run.checkpoints)
    if run.checkpoint_url is not None and folder is not None:
        require_writable(folder, "run.checkpoint_url")


def prepare_run_dir(settings: RunSettings | SftSettings, *, resume: bool) -> int:
    """Makes the run directory and returns a descriptor that holds its lock for as long as this process lives.

    What an attempt left in which nothing was trained is taken away, but for its logs: the same command may be given
    again once its mistake is mended. RunExistsError when it, or run.checkpoint_url, holds a run and `resume` is false,
    or it holds what no run made; NotFoundError when both hold none and it is true, or what they hold is of `rolecall
    sft` and not of `train`, or the other way round; RunLockedError when a launcher works in it.
    """
    directory = settings.run.dir
    _require_ours(directory)
    kept = newest_checkpoint(settings) if settings.run.checkpoint_url is not None else None
    if kept is not None and not resume:
        raise RunExistsError(
            f"run.checkpoint_url {settings.run.checkpoint_url} holds checkpoints of a run, the last of step "
            f"{kept.step}; go on from it with --resume, also where its run.dir is lost, or name another place"
        )
    is_there = (directory / "config.yaml").is_file()
    if resume and not is_there and kept is None:
        raise NotFoundError(f"run.dir {directory} holds no run to resume; start it without --resume")
    if resume and is_there and ("reward" in read_tree(directory / "config.yaml")) != isinstance(settings, RunSettings):
        mine, its = ("train", "sft") if isinstance(settings, RunSettings) else ("sft", "train")
        raise NotFoundError(
            f"run.dir {directory} is of `rolecall {its}`, and `rolecall {mine}` cannot go on with it; name another"
        )
    with writing("make", directory):
        directory.mkdir(parents=True, exist_ok=True)
    lock = _lock(directory)
    try:
        if not resume and any(directory.iterdir()):
            if holds_a_run(directory):
                raise RunExistsError(
                    f"run.dir {directory} exists; resume that run with --resume, or name another with --run.dir"
                )
            _clear(directory)
        with writing("make", directory):
            (directory / "logs").mkdir(exist_ok=True)
    except BaseException:
        os.close(lock)
        raise
    return lock


def holds_a_run(directory: Path) -> bool:
    """Whether anything was trained in the directory, which a new run must not take the place of."""
    checkpoints, metrics, history = (directory / name for name in ("checkpoints", "metrics.jsonl", "history.jsonl"))
    if checkpoints.is_dir() and any(checkpoints.iterdir()):
        return True
    return _has_line(metrics, lambda line: line.get("step", 0) > 0) or _has_line(
        history, lambda line: line.get("event") == "trained"
    )


def _require_ours(directory: Path) -> None:
    """RunExistsError when the directory holds something, and no run was started there. The root of a fresh volume
    holds `lost+found`, and roles that were started by hand may wait for their shift before there is a run.
    """
    if not directory.is_dir() or (directory / "identity.json").is_file():
        return
    for path in sorted(directory.iterdir()):
        if path.name not in ("logs", "lost+found", SHIFTS) and not _is_of_tokens(path):
            raise RunExistsError(
                f"run.dir {directory} holds {path.name}, and no run was started there; name another with --run.dir, or "
                "move what is in it elsewhere"
            )


def _is_of_tokens(path: Path) -> bool:
    """Whether a role that was started by hand may have made it, before there was a run."""
    return path.name.startswith((FOLDER, f".{FOLDER}-"))


def is_under_way(directory: Path) -> bool:
    """Whether a launcher works in the directory."""
    try:
        with run_lock(directory):
            return False
    except RunLockedError:
        return True


@contextmanager
def run_lock(directory: Path) -> Iterator[None]:
    """Keeps launchers out of the directory for the block. RunLockedError when one works there."""
    lock = _lock(directory)
    try:
        yield
    finally:
        os.close(lock)


def _has_line(path: Path, wanted: Callable[[dict[str, Any]], bool]) -> bool:
    """True as well when a line cannot be read: what follows from false is deleted."""
    if not path.is_file():
        return False
    try:
        with path.open() as file:
            return any(wanted(json.loads(line)) for line in file if line.endswith("\n"))
    except (ValueError, TypeError, AttributeError):  # no JSON, no object, or no number in it
        return True


def _clear(directory: Path) -> None:
    with writing("clear", directory):
        discard_store(directory / "store")
        for name in _OF_AN_ATTEMPT:
            path = directory / name
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def _lock(directory: Path) -> int:
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(lock)
        raise RunLockedError(
            f"another `rolecall train`, `sft` or `rewind` works in {directory}; stop it first, or name another run.dir"
        ) from error
    return lock


def resolve(settings: RunSettings) -> RunSettings:
    """`settings` with an address for every role and server, free ports of loopback for local ones."""
    servers = settings.reward.servers
    ports = _free_ports(4 + len(settings.references) + len(servers))
    reward = settings.reward.model_copy(
        update={"servers": {name: _placed(section, ports) for name, section in servers.items()}}
    )
    changes: dict[str, Any] = {
        "controller": _placed(settings.controller, ports),
        "actor": _placed(settings.actor, ports),
        "references": {name: _placed(section, ports) for name, section in settings.references.items()},
        "reward": _placed(reward, ports),
    }
    if settings.critic is not None:
        changes["critic"] = _placed(settings.critic, ports)
    return settings.model_copy(update=changes)


def write_config(settings: RunSettings | SftSettings) -> Path:
    """Writes the resolved configuration to <run dir>/config.yaml, readable by the owner alone.

    Without the store's URL, and without derived deadlines and sizes: who reads it derives them again, of what may have
    been overridden since. But the store's, for a role is given its URL and derives none.
    """
    path = settings.run.dir / "config.yaml"
    text = yaml.safe_dump(settings.model_dump(mode="json", exclude=_left_out(settings)), sort_keys=False)
    beside = path.with_suffix(".new")
    with writing("write", path):
        beside.unlink(missing_ok=True)
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(text)
        os.replace(beside, path)
    return path


def _left_out(settings: RunSettings | SftSettings) -> dict[str, Any]:
    derived = {size.setting for size in settings.derived_sizes}
    tree: dict[str, Any] = {"store": {"url": True}, "actor": _sizes_left_out("actor", settings.actor, derived)}
    if isinstance(settings, RunSettings):
        for deadline in settings.derived_deadlines:
            tree.setdefault(deadline.section, {})[deadline.field] = True
        if settings.critic is not None:
            tree.setdefault("critic", {}).update(_sizes_left_out("critic", settings.critic, derived))
        for name, reference in settings.references.items():
            tree.setdefault("references", {})[name] = _sizes_left_out(f"references.{name}", reference, derived)
    return tree


def _sizes_left_out(name: str, section: TrainerSection, derived: Collection[str]) -> dict[str, bool]:
    return {
        field: True
        for field in ("token_budget", "gradient_checkpointing")
        if f"{name}.{field}" in derived or field not in section.model_fields_set
    }


def plan_workers(
    configured: RunSettings, resolved: RunSettings, store_url_of: Callable[[str], str], package: str = "services"
) -> list[Worker]:
    """The processes of the roles and servers that `configured` gives no address, controller first: each is `python -m
    <package>.<role>`, with the URL of the store for its role.
    """
    metrics = metrics_binds(configured)
    servers = [
        ("model_server" if section.served is None else "reward_model", name, section.served or section)
        for name, section in configured.reward.servers.items()
        if section.address is None
    ]
    return [
        _worker(f"{package}.{role}", name, resolved, store_url_of, section, metrics.get(name))
        for role, name, section in [*_local_roles(configured), *servers]
    ]


def metrics_binds(configured: RunSettings) -> dict[str, str]:
    """Returns where each process of `plan_workers` shows its metrics, by name: telemetry.metrics_bind, and the next
    ports for those after the first; port 0 stays a free one. Empty where it is not set. ConfigError past the last port.
    """
    return binds_from(configured.telemetry.metrics_bind, [name for _, name, _ in _local_roles(configured)])


def binds_from(bind: str | None, names: Sequence[str]) -> dict[str, str]:
    """Returns `bind` for the first of `names` and the next ports for the others, as of `metrics_binds`."""
    if bind is None:
        return {}
    host, _, first = bind.rpartition(":")
    if int(first) + len(names) - 1 > _MAX_PORT:
        raise ConfigError(
            f"telemetry.metrics_bind {bind}: the {len(names)} local roles take a port each from {first} on, past "
            f"{_MAX_PORT}; choose a lower one"
        )
    return {name: f"{host}:{int(first) + i if int(first) else 0}" for i, name in enumerate(names)}


def _local_roles(configured: RunSettings) -> list[tuple[str, str, AddressSection | None]]:
    """(role, name, section) of the roles that `configured` gives no address; a rollout has no section."""
    roles: list[tuple[str, str, AddressSection]] = [
        ("controller", "controller", configured.controller),
        ("actor", "actor", configured.actor),
    ]
    roles += [("critic", "critic", configured.critic)] if configured.critic else []
    roles += [("reference", name, section) for name, section in configured.references.items()]
    roles += [("reward", "reward", configured.reward)]
    local = [(role, name, section) for role, name, section in roles if section.address is None]
    return [*local, *(("rollout", f"rollout-{i}", None) for i in range(configured.rollout.num_replicas))]


def _worker(
    module: str,
    name: str,
    resolved: RunSettings,
    store_url_of: Callable[[str], str],
    section: AddressSection | None,
    metrics_bind: str | None,
) -> Worker:
    role = module.rpartition(".")[2]
    arguments = [module, str(resolved.run.dir / "config.yaml"), "--name", name]
    arguments += ["--telemetry.metrics_bind", metrics_bind] if metrics_bind is not None else []
    num_ranks = section.num_ranks if isinstance(section, TrainerSection) else 1
    num_threads = (section if isinstance(section, RewardModelSettings) else resolved.actor).num_threads
    # "1", not our pid: the role's own children (ranks under torchrun, engine processes) read it too and are tied to
    # their own parent.
    environment = {
        **role_environment(section, num_threads),
        # empty for a reward service, which runs code of others: it may not inherit ours
        "ROLECALL_STORE_URL": store_url_of(role) if role in STORE_ROLES else "",
        "ROLECALL_STORE_URL_FILE": "",
        "ROLECALL_DIE_WITH_PARENT": "1",
    }
    return Worker(
        role,
        name,
        ranks_command(num_ranks, arguments),
        environment,
        resolved.run.dir / "logs" / f"{name}.log",
    )


def ranks_command(num_ranks: int, arguments: Sequence[str]) -> tuple[str, ...]:
    """The module and arguments `arguments` as that many ranks, through torchrun where they are several."""
    command = [sys.executable, "-P", "-m"]
    if num_ranks > 1:
        command += [
            "rolecall.training.ranks.torchrun",
            "--nnodes=1",
            f"--nproc-per-node={num_ranks}",
            "--rdzv-backend=loopback",
            "--rdzv-endpoint=127.0.0.1",  # unused, and torchrun warns where none is named
            "--local-addr=127.0.0.1",
            "-m",
        ]
    return (*command, *arguments)


def role_environment(section: AddressSection | None, num_threads: int | None = None) -> dict[str, str]:
    """The environment that a role must find before it imports torch: its GPUs, its threads, no network by itself.

    `num_threads`: of each rank of a trainer; None: derived. Without a section: a rollout, which derives its own
    (`services/rollout/config.py`), for vLLM needs more said and replicas are started elsewhere too.
    """
    common = {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1"}
    if section is None:
        return common
    num_cores = len(os.sched_getaffinity(0))
    threads = (num_threads or max(1, num_cores // section.num_ranks)) if isinstance(section, TrainerSection) else 1
    # Idle threads sleep: roles take turns on the same cores.
    return {
        **common,
        "CUDA_VISIBLE_DEVICES": ",".join(map(str, section.devices if isinstance(section, ServiceSection) else ())),
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "PASSIVE",
    }


def _placed(section: _Service, ports: Iterator[int]) -> _Service:
    if section.address is not None:
        return section
    host, _, port = (section.bind or "127.0.0.1:0").rpartition(":")
    bind = f"{host}:{port if port != '0' else next(ports)}"
    reachable = bind if host not in ("0.0.0.0", "[::]") else f"127.0.0.1:{bind.rpartition(':')[2]}"
    return section.model_copy(update={"bind": bind, "address": reachable})


def _free_ports(count: int) -> Iterator[int]:
    """`count` different ports of loopback that were free a moment ago. Launchers that start at the same time look in
    different places: each has chosen its ports seconds before its roles bind them.
    """
    place = os.getpid() + os.stat("/proc/self/ns/pid").st_ino  # containers may have one process number and one network
    ports = islice(cycle(_PORTS), place * _APART % len(_PORTS), None)
    with ExitStack() as opened:
        return iter([_bind(opened.enter_context(socket.socket()), ports) for _ in range(count)])


def _bind(opened: socket.socket, ports: Iterator[int]) -> int:
    for port in chain(islice(ports, _LOOKS), (0,)):  # lazily: the ports that are not tried are the next role's
        with suppress(OSError):
            opened.bind(("127.0.0.1", port))
            break
    return int(opened.getsockname()[1])
