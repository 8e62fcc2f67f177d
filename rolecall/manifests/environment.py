"""The environment of a run on a cluster: where it is, and the ways between it and the rollouts.

It is an image of somebody's, so nothing here starts it: the manifests know what beside it has to be.
"""

import ipaddress
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from rolecall.address import endpoints_of, is_loopback
from rolecall.errors import ConfigError
from rolecall.settings import EnvironmentSection, RunSettings

NAME = "environment"
"""Component and service account of an environment's pods in the run's namespace, and its certificate's name."""
FOLDER = "/run/rolecall/environment"
"""Where rollouts find the files of the secret `environment`: ca_file and bearer_token_file of one elsewhere."""


@dataclass(frozen=True)
class Place:
    """An environment, as the run's file names it."""

    host: str
    port: int
    peers: tuple[dict[str, Any], ...]
    """Who it may be, to a NetworkPolicy."""
    is_beside: bool
    """Whether it runs in the run's own namespace, or is a service of the same Compose project."""
    is_ours: bool
    """Whether it is there and called as the roles call each other: with a certificate of the run's, or by the mesh."""
    agents_port: int | None
    """Where its agents call the rollouts, beyond their own host; None: nowhere. Each rollout then needs a name of its
    own, which its certificate holds.
    """

    @property
    def mesh_ports(self) -> list[int]:
        """The ports that a mesh carries for it."""
        ports = [self.port] if self.is_ours else []
        return ports + ([self.agents_port] if self.agents_port is not None else [])


def place_of(settings: RunSettings) -> Place | None:
    """The run's environment. ConfigError for an address that only one machine has."""
    section = settings.environment
    if section is None:
        return None
    if is_loopback(section.address):
        raise ConfigError(
            f"environment.address {section.address} is each rollout's own there; name the environment's service"
        )
    parts = urlsplit(f"//{endpoints_of(section.address)[0]}")
    assert parts.hostname is not None
    assert parts.port is not None
    peers, is_beside = _peers(parts.hostname, settings.run.name)
    is_ours, agents_port = is_beside and not section.tls, _agents_port(section)
    return Place(parts.hostname, parts.port, tuple(peers), is_beside, is_ours, agents_port)


def are_named(settings: RunSettings) -> bool:
    """Whether each rollout of a cluster has a name of its own: a mesh sends calls to names, and agents look for them in
    certificates.
    """
    place = place_of(settings)
    return settings.rpc.behind_mesh or (place is not None and place.agents_port is not None)


def _agents_port(section: EnvironmentSection) -> int | None:
    bind = section.endpoint_bind
    if is_loopback(bind):
        return None
    port = urlsplit(f"//{bind}").port
    if not port:
        raise ConfigError(f"environment.endpoint_bind {bind}: other hosts' ways to it are opened by its port; name one")
    return port


def _peers(host: str, namespace: str) -> tuple[list[dict[str, Any]], bool]:
    """Returns who answers at a host, and whether that is in the namespace: a service's name there, NAME.NAMESPACE.svc
    elsewhere, an address, or any name, which no policy knows.
    """
    try:
        address = ipaddress.ip_address(host)
        return [{"ipBlock": {"cidr": f"{address}/{address.max_prefixlen}"}}], False
    except ValueError:
        _, *rest = host.split(".")
    if not rest or (rest[1:2] in ([], ["svc"]) and rest[0] == namespace):
        return [{"podSelector": {"matchLabels": {"app.kubernetes.io/component": NAME}}}], True
    if rest[1:2] == ["svc"]:
        return [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": rest[0]}}}], False
    return [{"ipBlock": {"cidr": cidr}} for cidr in ("0.0.0.0/0", "::/0")], False
