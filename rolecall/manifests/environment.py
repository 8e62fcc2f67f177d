"""The environments of a run on a cluster: where they are, and the ways between them and the rollouts.

They are images of somebody's, so nothing here starts them: the manifests know what beside them has to be.
"""

import ipaddress
from dataclasses import dataclass, replace
from typing import Any
from urllib.parse import urlsplit

from rolecall.address import endpoints_of, is_loopback
from rolecall.errors import ConfigError
from rolecall.settings import RunSettings

FOLDER = "/run/rolecall/environment"
"""Where rollouts find the files of the secret `environment`: ca_file and bearer_token_file of those elsewhere."""


@dataclass(frozen=True)
class Place:
    """A host of environments, as the run's file names it."""

    name: str
    """Component and service account of its pods in the run's namespace, and its certificate's name: environment-<name>.
    Of several environments on one host, whose pods have one component, the first one's.
    """
    host: str
    ports: tuple[int, ...]
    peers: tuple[dict[str, Any], ...]
    """Who it may be, to a NetworkPolicy."""
    is_beside: bool
    """Whether it runs in the run's own namespace, or is a service of the same Compose project."""
    mesh_ports: tuple[int, ...]
    """Ports at which it is beside the run and called as the roles call each other: with a certificate of the run's, or
    by the mesh.
    """

    @property
    def is_ours(self) -> bool:
        """Whether it has such ports."""
        return bool(self.mesh_ports)


def places_of(settings: RunSettings) -> list[Place]:
    """The hosts of the run's environments. ConfigError for an address that only one machine has."""
    places: dict[str, Place] = {}
    for name, section in settings.environments.items():
        if is_loopback(section.address):
            raise ConfigError(
                f"environments.{name}.address {section.address} is each rollout's own there; name the environment's "
                "service"
            )
        parts = urlsplit(f"//{endpoints_of(section.address)[0]}")
        assert parts.hostname is not None
        assert parts.port is not None
        component = f"environment-{name}"
        peers, is_beside = _peers(parts.hostname, settings.run.name, component)
        place = places.get(parts.hostname) or Place(component, parts.hostname, (), tuple(peers), is_beside, ())
        ports = tuple(dict.fromkeys([*place.ports, parts.port]))
        ours = [parts.port] if is_beside and not section.tls else []
        mesh_ports = tuple(dict.fromkeys([*place.mesh_ports, *ours]))
        places[place.host] = replace(place, ports=ports, mesh_ports=mesh_ports)
    return list(places.values())


def agents_port(settings: RunSettings) -> int | None:
    """The port at which agents of environments call the rollouts, beyond their own host; None: nowhere. Each rollout
    then needs a name of its own, which its certificate holds. ConfigError for any port.
    """
    bind = settings.rollout.endpoint_bind
    if not settings.environments or is_loopback(bind):
        return None
    port = urlsplit(f"//{bind}").port
    if not port:
        raise ConfigError(f"rollout.endpoint_bind {bind}: other hosts' ways to it are opened by its port; name one")
    return port


def are_named(settings: RunSettings) -> bool:
    """Whether each rollout of a cluster has a name of its own: a mesh sends calls to names, and agents look for them in
    certificates.
    """
    return settings.rpc.behind_mesh or agents_port(settings) is not None


def _peers(host: str, namespace: str, component: str) -> tuple[list[dict[str, Any]], bool]:
    """Returns who answers at a host, and whether that is in the namespace: a service's name there, NAME.NAMESPACE.svc
    elsewhere, an address, or any name, which no policy knows.
    """
    try:
        address = ipaddress.ip_address(host)
        return [{"ipBlock": {"cidr": f"{address}/{address.max_prefixlen}"}}], False
    except ValueError:
        _, *rest = host.split(".")
    if not rest or (rest[1:2] in ([], ["svc"]) and rest[0] == namespace):
        return [{"podSelector": {"matchLabels": {"app.kubernetes.io/component": component}}}], True
    if rest[1:2] == ["svc"]:
        return [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": rest[0]}}}], False
    return [{"ipBlock": {"cidr": cidr}} for cidr in ("0.0.0.0/0", "::/0")], False
