"""A run on one machine, a container a role: the files of a Compose project. deploy/compose is the one of
deploy/compose/runs/sort-digits.yaml, and what its example needs besides.
"""

import re
from pathlib import Path
from typing import Any

from rolecall.errors import ConfigError
from rolecall.manifests.completed import (
    TLS_FOLDER,
    as_text,
    complete_for_containers,
    local_roles,
    nodes_of,
    replicas_of,
    require_no_servers,
    require_paths_under,
    trainers_of,
    with_certificates,
    with_store_bytes,
)
from rolecall.manifests.environment import agents_port, places_of
from rolecall.manifests.pods import torchrun
from rolecall.manifests.render import flow, render
from rolecall.settings import RunSettings, TrainerSection, validated

CONFIG = "/etc/rolecall/run.yaml"
JOB, RUN = "/var/lib/rolecall/job", "/var/lib/rolecall/run"
"""Where the volumes of these names are mounted."""

_PORTS = {"controller": 9000, "actor": 9001, "critic": 9002, "reference": 9003, "reward": 9004, "rollout": 9005}
_WEIGHTS_HOST = "actor-weights"
"""The actor's name on the network of the weights."""
_NAME = re.compile(r"[a-z0-9][a-z0-9_-]*")


def compose(tree: dict[str, Any], file: Path) -> dict[str, str]:
    """Returns the project's files by name, of what `file` says, its `tree`. ConfigError for a run that one machine's
    containers could not hold.
    """
    here, local = validated(tree, file), local_roles(tree)
    require_no_servers(here)
    _ = here.run.total_steps  # of a file whose epochs nobody counted, ConfigError here and not from each container
    _require_one_machine(here, local)
    services = {name: _service(name, here, local) for name in local}
    addresses = {name: _address(name, here, services[name]) for name in local}
    done = complete_for_containers(tree, addresses, _PORTS["rollout"])
    done["weights"] = {**(tree.get("weights") or {}), "host": _WEIGHTS_HOST}
    done["rpc"] = with_certificates(tree)
    ours = [place.name for place in places_of(here) if place.is_ours]
    if agents_port(here) is not None:
        done["rollout"]["advertise_host"] = "rollout"  # a name of its certificate, and of nobody else
    require_paths_under(tree, validated(done, file), (JOB, RUN, TLS_FOLDER))
    trainers = [_trainer(name, section, here, services[name]) for name, section in trainers_of(here, local).items()]
    values = {
        "run": here.run.name,
        "certificates": _certificates(tree, here, services),
        "environment_tls": "".join(f"- tls-{name}:/run/rolecall/certificates/{name}\n" for name in ours),
        "environment_volumes": "".join(f"tls-{name}: {{}}\n" for name in ours),
        "maxmemory": f"{-(-here.store.max_bytes // 2**20)}mb",
        "port": _PORTS["controller"],
        "trainers": "".join(trainers),
        "rollouts": _rollouts(here, replicas_of(tree)),
        "reward": render("compose-reward.yaml", {}) if "reward" in local else "",
    }
    done = with_store_bytes(done, here)
    return {
        "compose.yaml": render("compose.yaml", values),
        "run.yaml": as_text(done, "Made by `rolecall manifests`: the run's file, and what compose.yaml decides."),
    }


def _require_one_machine(settings: RunSettings, local: list[str]) -> None:
    if not _NAME.fullmatch(settings.run.name):
        raise ConfigError(f"run.name {settings.run.name!r} names the project: use lower case letters, digits, '-', '_'")
    if settings.rpc.behind_mesh:
        raise ConfigError("rpc.behind_mesh: the roles of a Compose project have no sidecars; leave it out")
    if settings.takes_shifts:
        raise ConfigError(
            "rollout.sleep_mode: the container of a rollout does not see run.dir, by whose locks actor and rollouts "
            "take turns on GPUs; run `rolecall train` on that machine, or give each role GPUs of its own"
        )
    rollouts = settings.rollout.num_replicas
    if agents_port(settings) is not None and rollouts > 1:
        raise ConfigError(
            f"rollout.endpoint_bind: agents call the rollout of their episode by its name, and the containers of "
            f"{rollouts} share one; use one rollout, or write it --to kubernetes"
        )
    for name in {"controller", "actor"} - set(local):
        raise ConfigError(f"{name}.address: the project has its own {name}, and says where; leave it out")
    for name, section in trainers_of(settings, local).items():
        if nodes_of(section) > 1:
            raise ConfigError(
                f"{name} has {section.num_ranks} ranks on {len(section.devices)} devices, so it needs several "
                "machines, and a Compose project has one; give it as many devices, or write it --to kubernetes"
            )


def _service(name: str, settings: RunSettings, local: list[str]) -> str:
    """Returns the name of a role's service; of references the instance's, where there are several."""
    if name not in settings.references:
        return name
    return "reference" if len(settings.references.keys() & set(local)) == 1 else f"reference-{name}"


def _address(name: str, settings: RunSettings, service: str) -> str:
    if name in settings.references:
        return f"dns:///{service}:{_PORTS['reference']}"
    return ("dns:///" if name == "reward" else "") + f"{service}:{_PORTS[name]}"  # all replicas, by their addresses


def _certificates(tree: dict[str, Any], settings: RunSettings, services: dict[str, str]) -> str:
    command = ["certificates", "/run/rolecall/certificates", "--run", settings.run.name, "--renew"]
    for name in settings.references:
        if services.get(name, "reference") != "reference":
            command += ["--host", f"reference={services[name]}"]
    for place in places_of(settings):
        if place.is_ours:
            command += ["--host", f"{place.name}={place.host}"]
    if "spiffe_id" in (tree.get("rpc") or {}):
        command += ["--spiffe-id", settings.rpc.spiffe_id]
    return flow(command)


def _trainer(name: str, section: TrainerSection, settings: RunSettings, service: str) -> str:
    role = "reference" if name in settings.references else name
    named = ["--name", name] if role == "reference" else []
    health = ["CMD", "rolecall", "health", role, CONFIG, *named]
    broadcasts = {"control": {}, "data": {}, "weights": {"aliases": [_WEIGHTS_HOST]}}
    values = {
        "service": service,
        "role": role,
        "command": _command(role, section.num_ranks, [CONFIG, *named]),
        "health": flow(health),
        "more": _gpus(section.devices) + _sysctls(settings),
        "networks": flow(broadcasts if name == "actor" else ["control", "data"]),
        "run_volume": f"- run:{RUN}" if role != "reference" else "",
    }
    return render("compose-trainer.yaml", values)


def _command(role: str, ranks: int, arguments: list[str]) -> str:
    if ranks == 1:
        return f"command: {flow(['serve', role, *arguments])}"
    local = "127.0.0.1"
    words = torchrun(role, ranks, arguments, nodes=1, node="0", own=local, leader=local)
    return f'entrypoint: [tini, -e, "1", -e, "2", --]\ncommand: {flow(words)}'


def _rollouts(settings: RunSettings, replicas: int) -> str:
    """One service of several containers; with GPUs, one for each, as the containers of a service all see the same."""
    devices = settings.rollout.devices
    if not devices:
        scale = f"scale: {replicas}\n" if replicas > 1 else ""
        return render("compose-rollout.yaml", {"service": "rollout", "more": scale + _sysctls(settings)})
    made = []
    for number, gpus in enumerate(devices[:replicas]):
        service = "rollout" if replicas == 1 else f"rollout-{number}"
        values = {"service": service, "more": _gpus(gpus) + _sysctls(settings)}
        made.append(render("compose-rollout.yaml", values))
    return "".join(made)


def _gpus(devices: tuple[int, ...]) -> str:
    """The machine's GPUs of a container, which numbers them from 0 for itself."""
    return render("compose-gpu.yaml", {"devices": flow([str(device) for device in devices])}) if devices else ""


def _sysctls(settings: RunSettings) -> str:
    """The range of ports of `weights.ports`, which the container's kernel is told."""
    if settings.weights.ports is None:
        return ""
    return f'sysctls: {{net.ipv4.ip_local_port_range: "{settings.weights.ports.replace("-", " ")}"}}\n'
