"""A run on an allocation of Slurm: a batch script, which a person goes on editing, and the run's file.

All nodes are equal and the run's own. The names of nodes are known inside the allocation alone, so the file says
NODE_0, NODE_1 and so on, and the script puts the names in. What is the same for every run stands in
`templates/run.sbatch`.
"""

import re
import shlex
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

from rolecall.errors import ConfigError
from rolecall.launcher.plan import metrics_binds, role_environment
from rolecall.manifests.completed import (
    as_text,
    complete,
    local_roles,
    nodes_of,
    replicas_of,
    trainers_of,
    with_certificates,
    with_full_paths,
)
from rolecall.manifests.environment import Place, place_of
from rolecall.manifests.pods import torchrun
from rolecall.manifests.render import render
from rolecall.settings import RunSettings, TrainerSection, validated

STORE_PORT = 28000
"""The store's; the roles have the ports after it."""
RANKS_PORT = 28100
"""Where the ranks of the first trainer meet; each has a port of its own, for they may share a node."""

_RUN = "job/run.yaml"
"""The run's file with the names of nodes, which the script makes."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_CPUS = -1
"""Stands for the processors of a node, which one role without GPUs has."""


def slurm(tree: dict[str, Any], file: Path) -> dict[str, str]:
    """Returns the job's files by name, of what `file` says, its `tree`. ConfigError for a run that equal nodes of one
    allocation could not hold.
    """
    tree = with_full_paths(tree, file)
    local, place = local_roles(tree), place_of(validated(tree, file))
    _require_an_allocation(tree, local, place)
    ports = count(STORE_PORT + 1)
    nodes = _Nodes()
    done = complete(tree, {name: f"{_name(0)}:{next(ports)}" for name in local}, 0)
    done["rpc"] = with_certificates(tree, "tls/{role}")
    settings = validated(done, file)
    if settings.takes_shifts:
        raise ConfigError(
            "rollout.sleep_mode: actor and rollouts that take turns on GPUs belong to one `rolecall train`; sbatch "
            "that command on one node, or leave it out: each role then gets GPUs of its own"
        )
    _ = settings.run.total_steps  # of a file whose epochs nobody counted, ConfigError here and not from each role
    metrics = metrics_binds(validated(tree, file))
    started, first = [], dict.fromkeys(local, 0)
    for number, (name, section) in enumerate(trainers_of(settings, local).items()):
        first[name] = nodes.take(section.devices, nodes_of(section))
        _move(done, name, first[name])
        started += _trainer(name, section, settings, first[name], RANKS_PORT + number, metrics.get(name))
    if "reward" in local and settings.reward.devices:
        first["reward"] = nodes.take(settings.reward.devices)
        _move(done, "reward", first["reward"])
    done["weights"] = {**(tree.get("weights") or {}), "host": _name(first["actor"])}
    devices = settings.rollout.devices or ((),) * replicas_of(tree)
    for number, gpus in enumerate(devices):
        name = f"rollout-{number}"
        words = ["rolecall", "serve", "rollout", _RUN, "--name", name, *_shown(metrics.get(name))]
        started.append(_role("rollout", name, nodes.take(gpus), words))
    for name in ("reward", "controller"):
        if name in local:
            environment = _environment(role_environment(getattr(settings, name), 1)) if name == "reward" else []
            words = [*environment, "rolecall", "serve", name, _RUN, *_shown(metrics.get(name))]
            started.insert(0, _role(name, name, first[name], words))
    values = {
        "run": settings.run.name,
        "nodes": len(nodes),
        "gpus": _gpus(settings),
        "server": settings.store.binary or "",
        "maxmemory": f"{-(-settings.store.max_bytes // 2**20)}mb",
        "port": STORE_PORT,
        "metrics_file": shlex.quote(str(settings.run.dir / "metrics.jsonl")),
        "max_restarts": settings.launcher.max_restarts,
        "backoff_s": max(1, round(settings.launcher.backoff_s)),
        "max_backoff_s": max(1, round(settings.launcher.max_backoff_s)),
        "hosts": _hosts(first, settings, place),
        "environment": "".join(f"export {name}={value}\n" for name, value in role_environment(None).items()),
        "roles": "".join(started),
    }
    return {
        "run.sbatch": render("run.sbatch", values),
        "run.yaml": as_text(done, "Made by `rolecall manifests`: the run's file, in which run.sbatch names the nodes."),
    }


class _Nodes:
    """The nodes of the allocation, with the GPUs of each that a role has."""

    def __init__(self) -> None:
        self._taken: list[set[int]] = [set()]

    def __len__(self) -> int:
        return len(self._taken)

    def take(self, devices: Sequence[int], number: int = 1) -> int:
        """Gives a role `devices` of the first `number` nodes in a row where nobody has them; returns the first one."""
        wanted, first = set(devices) or {_CPUS}, 0
        while any(wanted & taken for taken in self._taken[first : first + number]):
            first += 1
        self._taken += [set() for _ in range(first + number - len(self._taken))]
        for taken in self._taken[first : first + number]:
            taken |= wanted
        return first


def _require_an_allocation(tree: dict[str, Any], local: list[str], place: Place | None) -> None:
    run, rollout = tree["run"], tree.get("rollout") or {}
    if not _NAME.fullmatch(str(run["name"])):
        raise ConfigError(f"run.name {run['name']!r} names the job: use letters, digits, '.', '-' and '_'")
    if (tree.get("rpc") or {}).get("behind_mesh"):
        raise ConfigError("rpc.behind_mesh: the roles of a job of Slurm have no sidecars; leave it out")
    for name in {"controller", "actor"} - set(local):
        raise ConfigError(f"{name}.address: the job has its own {name}, and says where; leave it out")
    if rollout.get("devices") and len(rollout["devices"]) != replicas_of(tree):
        raise ConfigError(
            f"rollout.devices has {len(rollout['devices'])} entries, rollout.num_replicas is {replicas_of(tree)}; name "
            "the GPUs of each replica on its node"
        )
    if place is not None and place.agents_port is not None:
        raise ConfigError(
            "environment.endpoint_bind: rollouts of a job share nodes, and agents elsewhere could not tell them apart "
            "by one port; use sessions (leave it out), or write the run --to kubernetes"
        )


def _name(node: int) -> str:
    """The word that the run's file has for a node's name."""
    return f"NODE_{node}"


def _host(node: int) -> str:
    """The same for the script."""
    return f"${{NODES[{node}]}}"


def _move(done: dict[str, Any], name: str, node: int) -> None:
    """Says in the run's file that a role is on this node."""
    section = (done if name in done else done["references"])[name]
    section["address"] = f"{_name(node)}:{section['address'].rpartition(':')[2]}"


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
    arguments = [_RUN, "--name", name, *_shown(metrics)]
    if section.num_ranks == 1:
        return [_role(role, name, first, [*environment, "rolecall", "serve", role, *arguments])]
    made = []
    for i in range(nodes):
        own, leader = (_host(first + i), _host(first)) if nodes > 1 else ("127.0.0.1", "127.0.0.1")
        words = torchrun(role, ranks, arguments, nodes=nodes, node=str(i), own=own, leader=leader, port=port)
        made.append(_role(role, f"{name}.{i}" if i else name, first + i, [*environment, *words]))
    return made


def _shown(metrics_bind: str | None) -> list[str]:
    return [] if metrics_bind is None else ["--telemetry.metrics_bind", metrics_bind]


def _environment(variables: dict[str, str]) -> list[str]:
    """Words that set what a role has besides the variables that the script exports for all."""
    common = role_environment(None)
    return ["env", *(f"{name}={value}" for name, value in variables.items() if name not in common)]


def _role(role: str, name: str, node: int, words: Sequence[str]) -> str:
    """The line of the script that starts a role."""
    command = " ".join(f'"{word}"' if "$" in word else shlex.quote(word) for word in words)
    return f"role {role} {shlex.quote(name)} {node} {command}\n"


def _gpus(settings: RunSettings) -> str:
    """The line that asks for GPUs, as many as the highest of a node that a role names."""
    sections = [settings.actor, settings.critic, settings.reward, *settings.references.values()]
    named = [device for section in sections if section is not None for device in section.devices]
    named += [device for devices in settings.rollout.devices for device in devices]
    return f"#SBATCH --gpus-per-node={max(named) + 1}\n" if named else ""


def _hosts(first: dict[str, int], settings: RunSettings, place: Place | None) -> str:
    """The names of servers' certificates, as arguments of `rolecall certificates`."""
    named = [("store", _host(0))]
    named += [("reference" if name in settings.references else name, _host(node)) for name, node in first.items()]
    named += [("environment", place.host)] if place is not None and place.is_ours else []
    return " ".join(f'--host "{role}={host}"' for role, host in dict.fromkeys(named))
