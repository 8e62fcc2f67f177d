"""A run on an allocation of Slurm: a batch script, which a person goes on editing, and the run's file.

All nodes are equal and the run's own. The names of nodes are known inside the allocation alone, so the file says
NODE_0, NODE_1 and so on, and the script puts the names in. What is the same for every run stands in
`templates/run.sbatch`.
"""

import shlex
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from rolecall.data.shift_plan import check_cpu_sleep
from rolecall.errors import ConfigError
from rolecall.launcher.plan import binds_from, role_environment
from rolecall.manifests.completed import (
    as_text,
    complete,
    local_roles,
    nodes_of,
    replicas_of,
    require_no_servers,
    trainers_of,
    with_certificates,
    with_full_paths,
    with_store_bytes,
)
from rolecall.manifests.environment import agents_port, places_of
from rolecall.manifests.pods import torchrun
from rolecall.manifests.render import render
from rolecall.settings import RunSettings, TrainerSection, validated

STORE_PORT = 28000
"""The store's; the roles have the ports after it."""
RANKS_PORT = 28100
"""Where the ranks of the first trainer meet; each has a port of its own, for they may share a node."""

_RUN = "job/run.yaml"
"""The run's file with the names of nodes, which the script makes."""
_CPUS = -1
"""Stands for the processors of a node, which one role without GPUs has."""


def slurm(tree: dict[str, Any], file: Path) -> dict[str, str]:
    """Returns the job's files by name, of what `file` says, its `tree`. ConfigError for a run that equal nodes of one
    allocation could not hold.
    """
    local, ports, nodes = local_roles(tree), count(STORE_PORT + 1), _Nodes()
    done = complete(tree, {name: f"{_name(0)}:{next(ports)}" for name in local}, 0)
    done = with_full_paths(done, file)
    done["rpc"] = with_certificates(tree, "tls/{role}")
    weights = tree.get("weights") or {}
    done["weights"] = {**weights, "host": _name(0)}  # some node; whose it is follows from what is validated
    settings = validated(done, file)
    require_no_servers(settings)
    _ = settings.run.total_steps  # of a file whose epochs nobody counted, ConfigError here and not from each role
    _require_an_allocation(tree, settings, local)
    settings = _with_shared_references(done, settings, local)
    devices = settings.rollout.devices or ((),) * replicas_of(tree)
    rollouts = [f"rollout-{number}" for number in range(len(devices))]
    shown = binds_from(settings.telemetry.metrics_bind, [*local, *rollouts])
    first = dict.fromkeys(local, 0)
    started = []
    for number, (name, section) in enumerate(trainers_of(settings, local).items()):
        beside = name if name != "actor" and _shares(section, settings) else ""
        first[name] = nodes.take(section.devices, nodes_of(section), beside)
        started += _trainer(name, section, settings, first[name], RANKS_PORT + number, shown.get(name))
    if "reward" in local:
        first["reward"] = nodes.take(settings.reward.devices) if settings.reward.devices else 0
        environment = _environment(role_environment(settings.reward))
        started.insert(0, _role("reward", "reward", first["reward"], environment, shown.get("reward")))
    started.insert(0, _role("controller", "controller", 0, [], shown.get("controller")))
    for i, (name, gpus) in enumerate(zip(rollouts, devices, strict=True)):
        node = nodes.take(gpus, beside="rollout" if settings.takes_shifts else "")
        if settings.takes_shifts and node >= nodes_of(settings.actor):
            raise ConfigError(
                f"rollout.devices[{i}] {list(gpus)}: on each of the actor's {node} nodes a rollout before it has one "
                "of these GPUs; order the lists by nodes, each of whose GPUs is in one of its lists"
            )
        started.append(_role("rollout", name, node, [], shown.get(name)))
    for name, node in first.items():
        section = (done if name in done else done["references"])[name]
        section["address"] = f"{_name(node)}:{section['address'].rpartition(':')[2]}"
    done["weights"] = {**weights, "host": _name(first["actor"])}
    values = {
        "nodes": len(nodes),
        "gpus": _gpus(settings),
        "hosts": _hosts(first, settings),
        "roles": "".join(started),
    }
    done = with_store_bytes(done, settings)
    return {
        "run.sbatch": render("run.sbatch", _of_every_run(settings) | values),
        "run.yaml": as_text(done, "Made by `rolecall manifests`: the run's file, in which run.sbatch names the nodes."),
    }


def _of_every_run(settings: RunSettings) -> dict[str, object]:
    """The values of the script that do not depend on which roles are where."""
    return {
        "run": settings.run.name,
        "server": settings.store.binary or "",
        "maxmemory": f"{-(-settings.store.max_bytes // 2**20)}mb",
        "port": STORE_PORT,
        "metrics_file": shlex.quote(str(settings.run.dir / "metrics.jsonl")),
        "max_restarts": settings.launcher.max_restarts,
        "start_s": round(settings.controller.start_timeout_s),
        "backoff_s": max(1, round(settings.launcher.backoff_s)),
        "max_backoff_s": max(1, round(settings.launcher.max_backoff_s)),
        "environment": "".join(f"export {name}={value}\n" for name, value in role_environment(None).items()),
    }


class _Nodes:
    """The nodes of the allocation, with the GPUs of each that a role has."""

    def __init__(self) -> None:
        self._taken: list[set[tuple[str, int]]] = [set()]

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, devices: Sequence[int], number: int = 1, beside: str = "") -> int:
        """Gives a role `devices` of the first `number` nodes in a row where nobody has them; returns the first one. Who
        takes shifts there has them `beside` others, under a name of its own.
        """
        wanted, first = {(beside, device) for device in devices or (_CPUS,)}, 0
        while any(wanted & taken for taken in self._taken[first : first + number]):
            first += 1
        self._taken += [set() for _ in range(first + number - len(self._taken))]
        for taken in self._taken[first : first + number]:
            taken |= wanted
        return first


def _require_an_allocation(tree: dict[str, Any], settings: RunSettings, local: list[str]) -> None:
    devices, replicas = settings.rollout.devices, replicas_of(tree)
    if settings.rpc.behind_mesh:
        raise ConfigError("rpc.behind_mesh: the roles of a job of Slurm have no sidecars; leave it out")
    for name in {"controller", "actor"} - set(local):
        raise ConfigError(f"{name}.address: the job has its own {name}, and says where; leave it out")
    if devices and len(devices) != replicas:
        raise ConfigError(
            f"rollout.devices has {len(devices)} entries, rollout.num_replicas is {replicas}; name the GPUs of each "
            "replica on its node"
        )
    settings.require_same_gpus()
    if not devices:
        check_cpu_sleep(settings)
    if agents_port(settings) is not None:
        raise ConfigError(
            "rollout.endpoint_bind: rollouts of a job share nodes, and agents elsewhere could not tell them apart "
            "by one port; use sessions (leave it out), or write the run --to kubernetes"
        )


def _shares(section: TrainerSection, settings: RunSettings) -> bool:
    """Whether a critic or reference takes shifts on GPUs of the actor's nodes: it names them, and no others."""
    is_among = bool(section.devices) and set(section.devices) <= set(settings.actor.devices)
    return settings.takes_shifts and is_among and nodes_of(section) <= nodes_of(settings.actor)


def _with_shared_references(done: dict[str, Any], settings: RunSettings, local: Sequence[str]) -> RunSettings:
    """Returns `settings` with `offload` of the references that share GPUs, as on one machine; it is in `done`, too."""
    references = dict(settings.references)
    for name, section in references.items():
        if name in local and section.offload is None and _shares(section, settings):
            done["references"][name]["offload"] = True
            references[name] = section.model_copy(update={"offload": True})
    return settings.model_copy(update={"references": references})


def _name(node: int) -> str:
    """The word that the run's file has for a node's name."""
    return f"NODE_{node}"


def _host(node: int) -> str:
    """The same for the script."""
    return f"${{NODES[{node}]}}"


def _trainer(
    name: str, section: TrainerSection, settings: RunSettings, first: int, port: int, metrics: str | None
) -> list[str]:
    """The ranks of a trainer, as one process on each of its nodes."""
    role = "reference" if name in settings.references else name
    nodes, ranks = nodes_of(section), len(section.devices) or section.num_ranks
    given = role_environment(section, settings.actor.num_threads)
    if settings.actor.num_threads is None:
        given["OMP_NUM_THREADS"] = f"$((SLURM_CPUS_ON_NODE / {ranks}))"
    environment = _environment(given)
    if section.num_ranks == 1:
        return [_role(role, name, first, environment, metrics)]
    made = []
    for i in range(nodes):
        own, leader = (_host(first + i), _host(first)) if nodes > 1 else ("127.0.0.1", "127.0.0.1")
        arguments = _arguments(name, metrics)
        words = torchrun(role, ranks, arguments, nodes=nodes, node=str(i), own=own, leader=leader, port=port)
        made.append(_line(role, f"{name}.{i}" if i else name, first + i, [*environment, *words]))
    return made


def _role(role: str, name: str, node: int, environment: Sequence[str], metrics: str | None) -> str:
    """The line that starts a role of one process."""
    return _line(role, name, node, [*environment, "rolecall", "serve", role, *_arguments(name, metrics)])


def _line(role: str, name: str, node: int, words: Sequence[str]) -> str:
    command = " ".join(f'"{word}"' if "$" in word else shlex.quote(word) for word in words)
    return f"role {role} {shlex.quote(name)} {node} \\\n    {command}\n"


def _arguments(name: str, metrics: str | None) -> list[str]:
    shown = [] if metrics is None else ["--telemetry.metrics_bind", metrics]
    return [_RUN, "--name", name, *shown]


def _environment(variables: dict[str, str]) -> list[str]:
    """Words that set what a role has besides the variables that the script exports for all."""
    common = role_environment(None)
    return ["env", *(f"{name}={value}" for name, value in variables.items() if name not in common)]


def _gpus(settings: RunSettings) -> str:
    """The line that asks for GPUs, as many as the highest of a node that a role names."""
    sections = [settings.actor, settings.critic, settings.reward, *settings.references.values()]
    named = [device for section in sections if section is not None for device in section.devices]
    named += [device for devices in settings.rollout.devices for device in devices]
    return f"#SBATCH --gpus-per-node={max(named) + 1}\n" if named else ""


def _hosts(first: dict[str, int], settings: RunSettings) -> str:
    """The names of servers' certificates, as arguments of `rolecall certificates`."""
    named = [("store", _host(0))]
    named += [("reference" if name in settings.references else name, _host(node)) for name, node in first.items()]
    named += [(place.name, place.host) for place in places_of(settings) if place.is_ours]
    return " ".join(f'--host "{role}={host}"' for role, host in dict.fromkeys(named))
