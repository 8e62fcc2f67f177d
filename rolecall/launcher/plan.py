"""The plan of `rolecall train`: an address for every role, the configuration that roles read, and the processes to
start.

Owns the ports and the environment of local roles. It knows services by name only (`python -m services.<role>`); what
they do is theirs. `rolecall/launcher/run_dir.py` makes the directory, `rolecall/launcher/processes.py` starts what is
planned here, `rolecall/launcher/supervisor.py` watches over it.
"""

import os
import socket
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, suppress
from itertools import chain, cycle, islice
from pathlib import Path
from typing import Any, TypeVar

import yaml

from rolecall.disk import writing
from rolecall.errors import ConfigError
from rolecall.launcher.processes import Worker
from rolecall.settings import (
    AddressSection,
    RewardModelSettings,
    RunSettings,
    ServiceSection,
    SftSettings,
    TrainerSection,
)
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

_Service = TypeVar("_Service", bound=AddressSection)


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
