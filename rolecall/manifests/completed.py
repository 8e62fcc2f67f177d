"""The settings of a run whose roles each have a host of their own: the file as it was written, and what that place
decides, which is addresses, binds, devices by each machine's own numbers, ports and certificates.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rolecall.errors import ConfigError
from rolecall.manifests.render import dump_all
from rolecall.settings import PluginSection, RunSettings, Section, TrainerSection, validated

PORT = 50051
"""The gRPC port of every role on a cluster: each has a network of its own."""
RANKS_PORT = 29400
"""Where the ranks of a trainer meet."""
METRICS_PORT = 9464
"""Where each role shows its numbers."""
PORTS = "28400-29399"
"""weights.ports of a cluster, where the file has none, or null: enough for eight ranks of several axes in a pod."""
TLS_FOLDER = "/run/rolecall/tls"
"""Where each role finds its own tls.crt, tls.key and ca.crt."""


def nodes_of(section: TrainerSection) -> int:
    """Machines that its ranks are on: `devices` are those of each."""
    return section.num_ranks // len(section.devices) if section.devices else 1


def trainers_of(settings: RunSettings, local: Sequence[str]) -> dict[str, TrainerSection]:
    """The sections of the actor, the critic and the references among the roles `local`, by name. ConfigError where the
    ranks of one do not fill its machines.
    """
    sections: dict[str, TrainerSection | None] = {"actor": settings.actor, "critic": settings.critic}
    sections |= settings.references
    found = {name: section for name, section in sections.items() if section is not None and name in local}
    for name, section in found.items():
        if section.devices and section.num_ranks % len(section.devices):
            raise ConfigError(
                f"{name}.num_ranks is {section.num_ranks}, and {name}.devices has {len(section.devices)} GPUs, on each "
                "of its machines; a rank has one GPU, so give a multiple of them"
            )
    return found


def require_paths_under(tree: dict[str, Any], settings: RunSettings, folders: Sequence[str]) -> None:
    """ConfigError for a path of the settings that lies in none of the folders that containers see. Where the file's
    `tree` names no reward.search_path, it is the file's folder, there as here.
    """
    beside = {} if "search_path" in (tree.get("reward") or {}) else {"reward": {"search_path"}}
    for name, path in [*_paths(settings.model_dump(exclude=beside), ""), *_modules(settings, "")]:
        if not any(path.is_relative_to(folder) for folder in folders):
            raise ConfigError(
                f"{name} is {path}, which a container does not see; put it under {' or '.join(folders)}, where the "
                "volumes are"
            )


def require_no_servers(settings: RunSettings) -> None:
    """ConfigError for a run that starts servers for its scorers: nothing here places them."""
    for name, section in settings.reward.servers.items():
        if section.address is None:
            raise ConfigError(
                f"reward.servers.{name} is started by `rolecall train` alone, on its machine; start a server of its "
                "model beside this run, and name its address in the scorer, in place of server"
            )


def local_roles(tree: dict[str, Any]) -> list[str]:
    """The roles of the file's `tree` that have no address, so that somebody must start them: controller, reward, actor,
    critic and the references, by their names.
    """
    references = {name: section for name, section in _section(tree, "references").items() if section is not None}
    optional = {} if tree.get("critic") is None else {"critic": tree["critic"]}
    named = {name: tree.get(name) for name in ("controller", "reward", "actor")} | optional | references
    return [name for name, section in named.items() if not (section or {}).get("address")]


def complete(tree: dict[str, Any], addresses: Mapping[str, str], rollout_port: int) -> dict[str, Any]:
    """Returns the file's `tree` with what any place decides. addresses: where clients reach each of its
    `local_roles`, each of which listens on that port.
    """
    done = {name: dict(section) if isinstance(section, dict) else section for name, section in tree.items()}
    for name, address in addresses.items():
        parent = done["references"] if name in _section(tree, "references") else done
        parent[name] = {**(parent.get(name) or {}), "address": address, "bind": f"0.0.0.0:{address.split(':')[-1]}"}
    # nobody starts rollouts but the place: the run begins when one has joined
    rollout = {**_section(tree, "rollout"), "num_replicas": 0, "bind": f"0.0.0.0:{rollout_port}"}
    # a password stays out of the file: each role finds a URL of its own in ROLECALL_STORE_URL_FILE
    store = {key: value for key, value in _section(tree, "store").items() if key != "url"}
    return done | {"rollout": rollout, "store": store}


def with_store_bytes(done: dict[str, Any], settings: RunSettings) -> dict[str, Any]:
    """Returns `done` with the bytes of the store that were derived: a role, which is given a URL, derives none."""
    derived = {size.setting: size.value for size in settings.derived_sizes}
    bytes_of = {"max_bytes": derived["store.max_bytes"]} if "store.max_bytes" in derived else {}
    return done | {"store": done["store"] | bytes_of}


def complete_for_containers(tree: dict[str, Any], addresses: Mapping[str, str], rollout_port: int) -> dict[str, Any]:
    """Returns what `complete` does, with each role's devices as its container counts them, from 0."""
    done = complete(tree, addresses, rollout_port)
    for name in addresses:
        section = (done["references"] if name in _section(tree, "references") else done)[name]
        if section.get("devices"):
            section["devices"] = list(range(len(section["devices"])))
    if done["rollout"].get("devices"):
        done["rollout"]["devices"] = [list(range(len(done["rollout"]["devices"][0])))]
    return done


def complete_for_cluster(tree: dict[str, Any], hosts: Mapping[str, str]) -> dict[str, Any]:
    """Returns `tree` with what a cluster decides, and a mesh in it. hosts: of the addresses of `local_roles`."""
    done = complete_for_containers(tree, {name: f"{host}:{PORT}" for name, host in hosts.items()}, PORT)
    weights = _section(tree, "weights")
    done["weights"] = {**weights, "ports": weights.get("ports") or PORTS}  # its policies open a range
    telemetry = _section(tree, "telemetry")
    shown = telemetry.get("metrics_bind", "") is not None  # null: somebody wants no page of numbers
    done["telemetry"] = {**telemetry, "metrics_bind": f"0.0.0.0:{METRICS_PORT}" if shown else None}
    rpc = _section(tree, "rpc")
    if rpc.get("behind_mesh"):
        identity = f"spiffe://cluster.local/ns/{_section(tree, 'run').get('name')}/sa/{{role}}"
        done["rpc"] = {"forwarded_identity": True, "spiffe_id": identity, **rpc}
    else:
        done["rpc"] = with_certificates(tree)
    return done


def with_certificates(tree: dict[str, Any], folder: str = TLS_FOLDER) -> dict[str, Any]:
    """The section rpc of a run whose roles find their certificates in `folder`."""
    files = {"certificate_file": "tls.crt", "key_file": "tls.key", "ca_file": "ca.crt"}
    return {**_section(tree, "rpc"), "tls": {key: f"{folder}/{file}" for key, file in files.items()}}


def with_full_paths(tree: dict[str, Any], file: Path) -> dict[str, Any]:
    """Returns the file's `tree` with every path that its folder decides written in full, for a copy that lies
    elsewhere. ConfigError for one whose place in the tree is not found.
    """
    said = validated(tree, file)
    full: dict[str, Any] = _in_full(tree, said.model_dump(mode="json"), str(file.resolve().parent))
    there = dict(_paths(validated(full, Path("/nowhere/run.yaml")).model_dump(), ""))
    for name, path in _paths(said.model_dump(), ""):
        if there.get(name) != path:
            raise ConfigError(f"{name} is {path} by where {file} lies, and its copy lies elsewhere; write it in full")
    return full


def _in_full(written: Any, said: Any, folder: str) -> Any:
    """Returns what is `written`, with the paths under `folder` as the settings `said` them."""
    if isinstance(said, str) and f"{said}/".startswith(f"{folder}/"):
        return said
    if isinstance(said, dict) and isinstance(written, dict | None):
        beneath = {key: _in_full((written or {}).get(key), value, folder) for key, value in said.items()}
        found = {key: value for key, value in beneath.items() if value is not None}
        return {**(written or {}), **found} if found or written is not None else None
    if isinstance(said, list) and isinstance(written, list):
        return [_in_full(part, value, folder) for part, value in zip(written, said, strict=True)]
    return written


def replicas_of(tree: dict[str, Any]) -> int:
    """Rollouts to begin with."""
    return max(1, int(_section(tree, "rollout").get("num_replicas", 1)))


def _section(tree: dict[str, Any], name: str) -> dict[str, Any]:
    return tree.get(name) or {}


def as_text(tree: dict[str, Any], head: str) -> str:
    """`tree` as a file, under a comment."""
    return f"# {head}\n" + dump_all([tree])


def _modules(value: Any, name: str) -> list[tuple[str, Path]]:
    """Folders of the modules of functions that the user wrote, but for scorers, which are the reward role's."""
    if isinstance(value, PluginSection):
        return [(f"{name}.function", value.folder)]
    if isinstance(value, Section):
        value = dict(value)
    if not isinstance(value, dict):
        return []
    return [found for key, part in value.items() for found in _modules(part, f"{name}.{key}".lstrip("."))]


def _paths(value: Any, name: str) -> list[tuple[str, Path]]:
    if isinstance(value, Path):
        return [(name, value)]
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if not isinstance(value, dict):
        return []
    return [found for key, part in value.items() for found in _paths(part, f"{name}.{key}".lstrip("."))]
